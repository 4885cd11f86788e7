"""Every cheat that the kernel-test stage knows ends as a rejected attempt of a loop, its reason on record."""

import json
from pathlib import Path

import pytest

from tests.agent.measure_cheats import RECORD, Tried, names, tried

ROWS = tuple(Tried(**row) for row in json.loads(RECORD.read_text(encoding="utf-8")))
HERE = {
    "nan_returned": ("latent_tail", "times its bound"),
    "scale_over_the_batch": ("moe_front", "times its bound"),
    "tolerance_patched": ("projection", "the candidate replaced module:harness.measure.trial.token_errors"),
    "zeros_returned": ("situ_mlp", "times its bound"),
}
"""One for each op; `measure_cheats` tries the rest."""


def test_the_record_has_every_cheat_and_none_was_accepted() -> None:
    assert sorted(row.cheat for row in ROWS) == list(names())
    assert {row.accepted for row in ROWS} == {False}
    assert {row.stage for row in ROWS} <= {"tests", "held_out", "speed"}
    assert all(len(row.words) > 20 for row in ROWS)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_cheat_of_each_op_is_rejected_for_its_reason_and_nothing_is_harmed(tmp_path: Path) -> None:
    found = {row.cheat: row for row in tried(HERE, tmp_path)}
    assert found.keys() == HERE.keys()
    for cheat, (op, reason) in HERE.items():
        row = found[cheat]
        assert (row.op, row.accepted, row.stage) == (op, False, "tests")
        assert reason in row.words, row.words
