"""What a process with candidate code gets: no secrets, no network where the kernel allows, limits."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from harness.executors import sandbox
from harness.executors.sandbox import ended_words, sandboxed, scrubbed, wrapper_here

needs_users = pytest.mark.skipif(not wrapper_here(True)[0], reason="needs namespaces of users")
needs_processes = pytest.mark.skipif(
    "--mount-proc" not in wrapper_here(False)[0], reason="needs namespaces of processes and mounts"
)


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


@pytest.fixture
def fresh() -> Iterator[None]:
    """What works here is found anew, before and after."""
    sandbox.wrapper_here.cache_clear()
    yield
    sandbox.wrapper_here.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_a_kernel_without_namespaces_leaves_all_open_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "can_run", lambda wrapper, probe=(): False)
    box = sandboxed(("true",))
    assert box.argv == ("true",)
    assert box.words.endswith(
        "other processes of this user can be read; the network is open, as no network namespace can be made "
        "here"
    )


@pytest.mark.usefixtures("fresh")
def test_where_only_users_can_be_apart_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "can_run", lambda wrapper, probe=(): "--mount" not in wrapper)
    box = sandboxed(("true",), has_network=True)
    assert box.argv == ("unshare", "--user", "--map-current-user", "--", "true")
    assert box.words.endswith("other processes closed to it; the network is open")


def test_a_child_that_asks_a_server_keeps_its_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        asked = f"import socket; socket.create_connection({server.getsockname()!r}, 5)"
        box = sandboxed((sys.executable, "-c", asked), has_network=True, OMP_NUM_THREADS="3")
        subprocess.run(box.argv, env=box.environment, check=True)
    assert box.environment["OMP_NUM_THREADS"] == "3"
    assert box.words.endswith("the network is open")


PEEK = """
import glob, json, os, sys
seen = []
for place in {*glob.glob("/proc/[0-9]*"), f"/proc/{os.getppid()}", f"/proc/{sys.argv[1]}"}:
    for name in ("environ", "mem"):
        try:
            with open(f"{place}/{name}", "rb") as file:
                if b"hunter" + b"2" in (file.read() if name == "environ" else b""):
                    seen.append(place)
        except OSError:
            pass
    try:
        with open(f"{place}/fd/1", "w") as file:
            if place not in ("/proc/1", f"/proc/{os.getpid()}"):  # the box's first process prints nowhere
                seen.append(f"{place} written")
    except OSError:
        pass
print(json.dumps(seen))
"""


@needs_users
@pytest.mark.parametrize("has_network", [False, True], ids=["no_network", "network"])
def test_neither_environment_nor_output_of_who_started_it_is_open_to_a_child(has_network: bool) -> None:
    starter = (
        "import os, subprocess, sys\n"
        "from harness.executors.sandbox import sandboxed\n"
        f"box = sandboxed((sys.executable, '-c', {PEEK!r}, str(os.getpid())), has_network={has_network})\n"
        "print(subprocess.run(box.argv, env=box.environment, capture_output=True, text=True).stdout)"
    )
    secret = os.environ | {"DEPLOY_TOKEN": "hunter2"}
    done = subprocess.run(
        (sys.executable, "-c", starter), env=secret, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == []


@needs_processes
def test_settings_of_the_kernel_and_disks_are_closed_even_to_the_superuser() -> None:
    setting = "/proc/sys/kernel/core_uses_pid"
    script = f"cat {setting} > {setting} 2>/dev/null && echo written"
    box = sandboxed(("sh", "-c", f"{script}; for at in /dev/*; do if [ -b $at ]; then echo $at; fi; done"))
    done = subprocess.run(box.argv, env=box.environment, capture_output=True, text=True, check=False)
    assert done.stdout == ""


@needs_processes
def test_all_that_a_child_started_ends_with_it_even_in_a_session_of_its_own() -> None:
    box = sandboxed(("sh", "-c", "setsid sleep 97531 & echo started; wait"))
    child = subprocess.Popen(box.argv, env=box.environment, stdout=subprocess.PIPE, start_new_session=True)
    assert child.stdout is not None
    assert child.stdout.readline() == b"started\n"
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    for _ in range(100):
        left = subprocess.run(("pgrep", "-f", "^sleep 97531$"), capture_output=True, check=False).stdout
        if not left:
            break
        time.sleep(0.05)
    assert left == b""


@pytest.mark.parametrize(("how", "words"), [
    ("os.abort()", "SIGABRT"),
    ("os.kill(os.getpid(), 9)", "SIGKILL"),
    ("sys.exit(3)", "exit code 3"),
    ("sys.exit(0)", "exit code 0"),
])  # fmt: skip
def test_how_a_child_ended_is_seen_through_the_box(how: str, words: str) -> None:
    box = sandboxed((sys.executable, "-c", f"import os, sys; {how}"))
    assert ended_words(subprocess.run(box.argv, env=box.environment, check=False).returncode) == words


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
