"""Engines that a program measures: a few at a time, and every way in which one comes to nothing, in words."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from harness.domain.errors import ServiceError
from harness.engines.measured import MeasuredArms, measure_arms
from harness.engines.served import ServerSettings

PROGRAM = """
import json, sys, time
from pathlib import Path
def given(word): return sys.argv[sys.argv.index(word) + 1]
name, out, meet, many = sys.argv[1], Path(given("--out")), Path(given("--meet")), int(given("--wait-for"))
if "--die" in sys.argv:
    print("torch.OutOfMemoryError: CUDA out of memory"); sys.exit(3)
if "--sleep" in sys.argv:
    print("loading", flush=True); time.sleep(60)
if "--mute" in sys.argv:
    sys.exit(0)
meet.mkdir(exist_ok=True); (meet / name).touch()
end = time.monotonic() + 0.3
while len(list(meet.iterdir())) < many and time.monotonic() < end: time.sleep(0.02)
forced = {"top": [[{"5": -1.0}]], "ids": [[5]], "launches": [3, 4], "is_forced": "--free" not in sys.argv}
(out / f"{name}.json").write_text(json.dumps({"name": name, "forced": {"1": forced}, "draws": {"rows": []}}))
"""


def settings(folder: Path, limit_s: float = 30, **arguments: str) -> MeasuredArms:
    """Three arms, two at a time; keywords give an arm its arguments."""
    program = folder / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    arms: list[dict[str, Any]] = [
        {"name": name, "arguments": [arguments[name]] if name in arguments else []}
        for name in ("stock", "optimised", "poison")
    ]
    told = {"program": [sys.executable, str(program)], "arms": arms, "limit_s": limit_s}
    return MeasuredArms.model_validate(told)


def measure(folder: Path, given: MeasuredArms) -> tuple[Any, Any, list[str]]:
    notes: list[str] = []
    found, lost = measure_arms(given, folder / "out", folder / "logs", notes.append)
    return found, lost, notes


def test_arms_run_two_at_a_time_and_what_is_judged_is_read(tmp_path: Path) -> None:
    found, lost, notes = measure(tmp_path, settings(tmp_path))
    assert notes == ["engines stock, optimised", "engines poison"]
    assert lost == ()
    assert sorted(found) == ["optimised", "poison", "stock"]
    assert found["poison"].forced[1].launches == (3, 4)
    assert found["poison"].forced[1].top == (({5: -1.0},),)


def test_a_candidates_engine_that_dies_is_lost_with_its_cause(tmp_path: Path) -> None:
    found, lost, _ = measure(tmp_path, settings(tmp_path, optimised="--die"))
    assert sorted(found) == ["poison", "stock"]
    assert [arm for arm, _ in lost] == ["optimised"]
    assert lost[0].words.startswith("exit code 3; it ran out of memory")


def test_stock_that_comes_to_nothing_is_no_fault_of_the_candidates(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="the stock engine was not measured: it ended and left no file"):
        measure(tmp_path, settings(tmp_path, stock="--mute"))


def test_an_engine_that_takes_too_long_is_ended_and_lost(tmp_path: Path) -> None:
    found, lost, _ = measure(tmp_path, settings(tmp_path, 0.9, poison="--sleep"))
    assert sorted(found) == ["optimised", "stock"]
    assert lost[0].words == "it was not done within 0.9 s. Its last words:\nloading"


def test_an_engine_that_gave_other_tokens_than_it_was_given_is_no_measurement(tmp_path: Path) -> None:
    _, lost, _ = measure(tmp_path, settings(tmp_path, optimised="--free"))
    assert lost[0].words.startswith("its file is no measurement: forced.1.is_forced")


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    given = settings(tmp_path).model_copy(update={"program": ("/no/such/program",)})
    with pytest.raises(ServiceError, match="/no/such/program cannot be started"):
        measure(tmp_path, given)


def test_settings_name_each_arm_once_and_both_that_are_compared(tmp_path: Path) -> None:
    told = json.loads(settings(tmp_path).model_dump_json())
    doubled, single = told | {"arms": told["arms"] * 2}, told | {"arms": told["arms"][:1]}
    with pytest.raises(ValidationError, match="an arm is named twice"):
        MeasuredArms.model_validate(doubled)
    with pytest.raises(ValidationError, match="there is no arm optimised"):
        MeasuredArms.model_validate(single)
    urls = {name: {"url": f"http://127.0.0.1:{port}"} for name, port in (("stock", 1), ("optimised", 2))}
    whole = ServerSettings.model_validate({"model": "m", "served_name": "m", **urls, "measured": told})
    assert whole.measured is not None
