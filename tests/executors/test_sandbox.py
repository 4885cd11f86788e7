"""What a process with candidate code gets: no secrets, no network where the kernel allows, limits."""

import json
import socket
import subprocess
import sys

import pytest

from harness.executors import sandbox
from harness.executors.sandbox import sandboxed, scrubbed


def test_only_listed_variables_pass_and_none_that_looks_like_a_secret() -> None:
    given = {
        "PATH": "/bin", "LC_ALL": "C", "CUDA_VISIBLE_DEVICES": "1", "GITHUB_TOKEN": "x", "HF_TOKEN": "x",
        "NVIDIA_API_KEY": "x", "FASTTRACK_SIGNING_KEY": "x", "FASTTRACK_THREADS": "2", "SOMETHING": "x",
        "SSH_AUTH_SOCK": "/s",
    }  # fmt: skip
    assert scrubbed(given) == {
        "PATH": "/bin", "LC_ALL": "C", "CUDA_VISIBLE_DEVICES": "1", "FASTTRACK_THREADS": "2",
    }  # fmt: skip


def test_a_child_sees_neither_the_secret_nor_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEPLOY_TOKEN", "hunter2")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        script = (
            "import json, os, socket\n"
            f"s = socket.socket(); s.settimeout(2)\n"
            f"print(json.dumps([os.environ.get('DEPLOY_TOKEN'), s.connect_ex(('127.0.0.1', {port}))]))"
        )
        box = sandboxed((sys.executable, "-c", script))
        done = subprocess.run(box.argv, env=box.environment, capture_output=True, text=True, check=True)
    secret, refused = json.loads(done.stdout)
    assert secret is None
    assert bool(refused) == box.words.endswith("no network")


def test_a_kernel_without_namespaces_leaves_the_network_open_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sandbox, "can_cut_network", lambda: False)
    box = sandboxed(("true",))
    assert box.argv == ("true",)
    assert box.words.endswith("the network is open, as no network namespace can be made here")


def test_a_child_that_asks_a_server_keeps_its_network() -> None:
    box = sandboxed(("true",), has_network=True, OMP_NUM_THREADS="3")
    assert box.argv == ("true",)
    assert box.environment["OMP_NUM_THREADS"] == "3"
    assert box.words.endswith("the network is open")


def test_a_limited_process_writes_no_core_and_no_endless_file() -> None:
    script = (
        "import json, resource\n"
        "from harness.executors.sandbox import MAX_FILE_BYTES, limit_this_process\n"
        "limit_this_process()\n"
        "core, size = (resource.getrlimit(r)[0] for r in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE))\n"
        "print(json.dumps([core, 0 < size <= MAX_FILE_BYTES]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [0, True]
