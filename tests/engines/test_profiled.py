"""Kernel names from a server's own profiler: asked for, read, and told in words where there are none."""

import gzip
import json
import sys
from contextlib import closing
from pathlib import Path

import pytest

from harness.engines.profiled import Profile, read_trace
from harness.engines.served import ServedArm, ServerSettings
from harness.engines.vllm_server import VllmServer

PROGRAM = (sys.executable, str(Path(__file__).parents[1] / "fakes" / "model_server.py"))


def facts_of(tmp_path: Path, *ways: str, has_profiler: bool = True) -> dict[str, str]:
    """What is told of an optimised arm."""
    arguments = ("--switch=on", *(f"--behave={way}" for way in ways))
    settings = ServerSettings(
        model=str(tmp_path), served_name="fake", program=PROGRAM, start_limit_s=20,
        optimised=ServedArm(arguments=arguments), has_profiler=has_profiler,
    )  # fmt: skip
    with closing(VllmServer(settings, tmp_path, tmp_path / "run")) as engine:
        with engine.open("optimised"):
            pass
        return dict(engine.description("optimised"))


def test_kernels_of_a_few_steps_are_told_with_launches_and_time(tmp_path: Path) -> None:
    facts = facts_of(tmp_path)
    assert facts["profile"] == "4 tokens, 3 launches of 2 kernels"
    assert json.loads(facts["profile.kernels"]) == [["marlin", 2, 5.0], ["k3_experts", 1, 2.5]]
    assert "profiler-config" not in facts["command"]


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("cpu_only", "4 tokens, 1 operators of the CPU, no device kernel"),
        ("bad_trace", "none: the profiler left no trace that can be read"),
    ],
)
def test_a_profile_without_kernels_says_why(tmp_path: Path, way: str, words: str) -> None:
    facts = facts_of(tmp_path, way)
    assert facts["profile"] == words
    assert "profile.kernels" not in facts


def test_a_server_that_is_not_asked_tells_no_kernels(tmp_path: Path) -> None:
    assert "profile" not in facts_of(tmp_path, has_profiler=False)


def test_a_server_of_others_without_a_profiler_is_told_and_asked_on(tmp_path: Path) -> None:
    from harness.engines.server_process import ServerProcess, free_port

    (tmp_path / "traces").mkdir()
    port = free_port()
    command = (*PROGRAM, "serve", "M", f"--port={port}", "--served-model-name=fake")
    url = f"http://127.0.0.1:{port}"
    settings = ServerSettings(
        model="M", served_name="fake", stock=ServedArm(url="http://127.0.0.1:1"),
        optimised=ServedArm(url=url, traces=str(tmp_path / "traces")),
    )  # fmt: skip
    with ServerProcess(command, {}, tmp_path / "log", port) as process:
        process.wait_until(lambda: "fake server" in (tmp_path / "log").read_text(), 10)
        engine = VllmServer(settings, tmp_path, tmp_path / "run")
        with engine.open("optimised") as server:
            assert server.failure == ""
        told = dict(engine.description("optimised"))["profile"]
    assert told == f"none: {url}/start_profile answered 404: no such path"


def test_packed_traces_are_read_and_others_are_none(tmp_path: Path) -> None:
    event = {"cat": "kernel", "name": "k", "dur": 1.5}
    packed, deep = tmp_path / "a.json.gz", tmp_path / "b.json"
    packed.write_bytes(gzip.compress(json.dumps({"traceEvents": [event, event]}).encode()))
    deep.write_text("[" * 100_000)
    assert read_trace(packed) == Profile({"k": (2, 3.0)}, 0)
    assert read_trace(deep) is None
    assert read_trace(tmp_path / "absent.json") is None


def test_files_of_a_server_that_we_start_are_no_setting(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="leave `observer` and `traces` out"):
        ServedArm(observer="steps.jsonl")
