"""The harness's own score in a bundle."""

from pathlib import Path

import pytest

from harness.domain.faults import FaultScore
from harness.domain.resources import data_folder
from harness.evidence import harness_score
from harness.evidence.harness_score import put_score, read_score, score_words


def score() -> FaultScore:
    cell = {"column": "kernels", "checks": 1, "is_caught": True}
    seen = {"column": "kernels", "subject": "kernels/a", "status": "FAIL", "words": "wrong"}
    result = {
        "name": "a_fault", "title": "It is wrong.", "report": "a/b#1", "target": "op", "expected": "kernels",
        "tier": "smoke", "suite": "own", "verdict": "caught", "cells": ({**cell, "seen": seen},),
        "duration_s": 1.0,
    }  # fmt: skip
    return FaultScore.model_validate(
        {
            "harness_version": "1", "harness_digest": "a" * 64, "pack": "p", "pack_digest": "b" * 64,
            "tier": "smoke", "seed": 0, "created": "2026-11-29T00:00:00Z", "cpu_model": "x",
            "results": (result,),
        }
    )  # fmt: skip


def test_the_committed_score_is_copied_into_the_logs_and_read_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data" / "faults").mkdir(parents=True)
    (tmp_path / "data" / "faults" / "smoke.json").write_bytes(score().canonical())
    monkeypatch.setattr(harness_score, "data_folder", lambda _: tmp_path / "data")
    assert put_score(tmp_path / "bundle" / "logs")
    assert read_score(tmp_path / "bundle") == score()


def test_a_score_of_this_harness_says_so_and_one_of_another_names_it() -> None:
    assert score_words(score(), "a" * 64).endswith("0 from statistical ones; measured with this harness")
    assert score_words(score(), "c" * 64).endswith(
        "; measured with harness aaaaaaaaaaaa, which is not this one"
    )


def test_a_bundle_without_a_readable_score_says_that_it_was_not_measured(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "harness_score.json").write_text("{}")
    assert read_score(tmp_path) is None
    assert score_words(None, "a" * 64) == "not measured: the bundle holds no record of the fault suite"


def test_a_committed_score_is_as_expected_and_catches_five_of_six() -> None:
    path = data_folder("bundles") / "faults" / "smoke.json"
    if not path.is_file():
        pytest.skip("no score is committed")
    committed = FaultScore.model_validate_json(path.read_bytes())
    assert committed.is_as_expected
    assert len(committed.caught) * 6 >= len(committed.planted) * 5
    assert len(committed.caught) >= 50
    readme = path.parents[2] / "README.md"
    if readme.is_file():  # a checkout
        assert committed.words() in readme.read_text(encoding="utf-8")
