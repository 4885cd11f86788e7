"""How long a check may take: its own time counts, and what serves other checks too does not."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from harness.domain.check import Check, Samples, StageName
from harness.domain.machine import Tier
from harness.executors import local, marks
from harness.executors.local import ChildSampler

CHECK = Check(id="audit/gate/sm_90a", stage=StageName.AUDIT, proves="x", cost_s=0.0)
CHILD = """
import json, sys, time
steps = json.loads(sys.argv[1])
def say(line): print(json.dumps(line), flush=True)
say({"ready": True})
for _ in sys.stdin:
    for step in steps:
        time.sleep(step) if isinstance(step, float) else say(step)
"""
"""A child that says things, with pauses between."""
BEGIN, END = {"mark": "begin shared"}, {"mark": "end shared"}
ANSWER = {"samples": Samples(check=CHECK.id, tier=Tier.SMOKE).model_dump(mode="json")}


@pytest.fixture(autouse=True)
def _short_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "GRACE_S", 1.0)


def ended(folder: Path, *steps: object) -> Samples:
    return all_ended(folder, 1, *steps)[0]


def all_ended(folder: Path, count: int, *steps: object) -> list[Samples]:
    """Checks one after another; the child of each does the same steps."""
    with (folder / "child.log").open("ab") as log:
        argv: Sequence[str] = (sys.executable, "-I", "-c", CHILD, json.dumps(steps))
        sampler = ChildSampler(argv, Tier.SMOKE, lambda _: None, log)
        try:
            return [sampler.sample(CHECK) for _ in range(count)]
        finally:
            sampler.close()


def test_a_check_that_prepares_for_others_or_waits_for_that_is_not_stopped_for_it(tmp_path: Path) -> None:
    samples = ended(tmp_path, 0.1, BEGIN, 1.4, END, 0.1, ANSWER)
    assert (samples.ended, samples.tables) == ("ran", ())


def test_a_check_that_hangs_behind_shared_work_is_stopped_for_its_own_time(tmp_path: Path) -> None:
    samples = ended(tmp_path, BEGIN, 0.5, END, 9.0, ANSWER)
    assert samples.ended == "timed_out"
    assert samples.duration_s < 4


def test_shared_work_that_never_ends_is_stopped_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marks, "SHARED_MOST_S", 1.0)
    samples = ended(tmp_path, BEGIN, 0.6, END, BEGIN, 9.0, ANSWER)
    assert samples.ended == "timed_out"
    assert samples.duration_s < 4


def test_all_checks_have_one_budget_of_shared_time_and_own_time_is_left_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marks, "SHARED_MOST_S", 2.0)
    first, second = all_ended(tmp_path, 2, BEGIN, 9.0, ANSWER)
    assert (first.ended, second.ended) == ("timed_out", "timed_out")
    assert first.duration_s > 2.9  # the budget and its own second
    assert second.duration_s < 2.8  # its own second


def test_a_check_behind_a_spent_budget_still_ends_in_its_own_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marks, "SHARED_MOST_S", 0.2)
    found = all_ended(tmp_path, 3, BEGIN, 0.3, END, ANSWER)
    assert [samples.ended for samples in found] == ["ran"] * 3
