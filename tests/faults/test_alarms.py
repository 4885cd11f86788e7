"""False alarms of statistical checks, counted seed by seed over an honest pack."""

from pathlib import Path

import pytest

from harness.domain.errors import EvidenceError
from harness.domain.faults import AlarmRun
from harness.faults.alarms import alarm_words, read_runs


def run(seed: int, *statuses: str) -> AlarmRun:
    seen = [
        {
            "column": "sweep",
            "subject": f"sweep/{n}",
            "status": status,
            "words": status,
            "is_statistical": True,
        }
        for n, status in enumerate(statuses)
    ]
    return AlarmRun.model_validate(
        {
            "seed": seed, "harness_digest": "0" * 64, "pack": "p", "pack_digest": "1" * 64,
            "created": "2026-11-30T00:00:00Z", "cpu_model": "x", "seen": seen,
        }
    )  # fmt: skip


def test_a_failed_or_invalid_check_of_an_honest_pack_is_an_alarm_and_too_few_samples_are_none() -> None:
    assert [s.status for s in run(0, "PASS", "INCONCLUSIVE", "SKIPPED", "FAIL", "INVALID").alarms] == [
        "FAIL", "INVALID",
    ]  # fmt: skip


def test_the_words_count_seeds_with_any_alarm_and_name_them() -> None:
    runs = [run(0, "PASS", "PASS"), run(4, "PASS", "FAIL"), run(5, "FAIL", "INVALID")]
    assert alarm_words(runs, 0.05) == (
        "2 of 3 seeds have a false alarm from 6 statistical checks: seeds 4, 5; "
        "the policy states a family-wise rate of 5%"
    )


def test_runs_add_up_line_by_line_and_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "alarms.jsonl"
    assert read_runs(path) == ()
    path.write_bytes(b"".join(run(seed, "PASS").canonical() + b"\n" for seed in (0, 1)))
    assert [r.seed for r in read_runs(path)] == [0, 1]
    path.write_text(path.read_text() + "{}\n")
    with pytest.raises(EvidenceError, match=r"alarms\.jsonl: no runs can be read here"):
        read_runs(path)
