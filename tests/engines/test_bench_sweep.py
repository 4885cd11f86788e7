"""Servers that vLLM's own sweep starts: how it is asked, and what is read beside it."""

import shlex
import sys
from pathlib import Path

import pytest

from harness.domain.errors import InputError, ServiceError
from harness.engines.bench_serve import Load
from harness.engines.bench_sweep import sweep_arms, sweep_command
from harness.engines.served import ServedArm, ServerSettings

PROGRAM = (sys.executable, str(Path(__file__).parents[1] / "fakes" / "vllm_program.py"))
LOADS = [Load(concurrency=1, output_tokens=4), Load(concurrency=2, output_tokens=4, requests_each=4)]


def settings(folder: Path, *stock: str) -> ServerSettings:
    return ServerSettings(
        model=str(folder), served_name="fake", program=PROGRAM, stock=ServedArm(arguments=stock),
        optimised=ServedArm(arguments=("--switch=on",)), start_limit_s=30,
    )  # fmt: skip


def test_a_sweep_is_asked_with_the_servers_command_and_what_its_loads_share(tmp_path: Path) -> None:
    words = sweep_command(settings(tmp_path), "optimised", 8001, Path("p.json"), Path("out"), LOADS[0])
    told = dict(word[2:].split("=", 1) for word in words if word.startswith("--") and "=" in word)
    serve, bench = shlex.split(told["serve-cmd"]), shlex.split(told["bench-cmd"])
    assert serve[serve.index("--host") :][:4] == ["--host", "127.0.0.1", "--port", "8001"]
    assert serve[-1] == "--switch=on"
    assert [word for word in bench if "concurrency" in word or "prompts" in word or "result" in word] == []
    assert "--save-detailed" in bench
    assert (told["bench-params"], told["num-runs"], told["server-ready-timeout"]) == ("p.json", "1", "30")


def test_three_sweeps_give_a_row_a_load_with_what_the_servers_metrics_said(tmp_path: Path) -> None:
    report = sweep_arms(settings(tmp_path), LOADS, tmp_path / "out", lambda _words: None)
    assert [(run.arm, run.load.concurrency) for run in report.runs] == [
        ("stock", 1), ("stock", 2), ("optimised", 1), ("optimised", 2), ("stock", 1), ("stock", 2),
    ]  # fmt: skip
    assert {(run.completed, run.output_tokens) for run in report.runs} == {(8, 32)}
    assert report.runs[0].tpot_us[0] == pytest.approx(2000.0)
    assert "2 at once were asked, the server had" in report.rows[1].words
    assert {name: value for arm, name, value in report.settings if arm == "stock"}["version"] == "0.32.0"
    assert report.load_command[2:5] == ("bench", "sweep", "serve")


def test_a_sweep_that_fails_is_told_in_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(
        ServiceError, match=r"failed against stock: exit code 3\. Its last words:\nValueError: no such load"
    ):
        sweep_arms(settings(tmp_path, "--fail"), LOADS, tmp_path / "out", lambda _words: None)


def test_servers_that_run_already_and_two_loads_of_one_name_are_refused(tmp_path: Path) -> None:
    urls = ServerSettings(
        model="m", served_name="m", stock=ServedArm(url="http://a"), optimised=ServedArm(url="http://b")
    )
    with pytest.raises(InputError, match="starts its servers itself"):
        sweep_arms(urls, LOADS, tmp_path, lambda _words: None)
    with pytest.raises(InputError, match="two loads have one number of requests at once"):
        sweep_arms(settings(tmp_path), [LOADS[0], LOADS[0]], tmp_path, lambda _words: None)
