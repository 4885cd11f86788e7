"""Evals: drift against the oracle, paired tasks, path share, and the harness's own scorers."""

from pathlib import Path
from typing import Any

import pytest

from harness.domain.check import Check, Samples, StageName, Status
from harness.domain.errors import InputError
from harness.stages.evals import judge, sample
from harness.stages.evals.scorers import exact, mrcr, score_tokens, tail
from harness.stages.evals.tables import DRIFT_SHAPES, TASK_SHAPES
from tests.fakes.pack import FakePack, Faults
from tests.fakes.requests import outcome_of, planned, stage_context
from tests.stages.spoiled_tables import spoiled, with_rows, without_rows

EVALS = StageName.EVALS


def test_drift_of_an_honest_path_passes_and_its_poison_is_noticed(tmp_path: Path) -> None:
    outcome = outcome_of(EVALS, "drift", Faults(), tmp_path)
    assert outcome.status is Status.PASS
    assert outcome.control is not None
    assert outcome.control.kind == "poison"


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        (Faults(error=0.01), "mean KL to the oracle"),
        (Faults(growing_error=1e-4), "mean KL to the oracle"),
        (Faults(nan_from_step=50), "not finite"),
    ],
)
def test_drift_fails_on_error_growth_and_nan(faults: Faults, words: str, tmp_path: Path) -> None:
    outcome = outcome_of(EVALS, "drift", faults, tmp_path)
    assert outcome.status is Status.FAIL
    assert words in outcome.summary


def test_a_perfect_score_on_the_standard_path_is_no_evidence(tmp_path: Path) -> None:
    outcome = outcome_of(EVALS, "drift", Faults(fallback_from_step=2), tmp_path)
    assert outcome.status is Status.NO_EVIDENCE
    assert "of the tokens came from the optimised path" in outcome.summary


def test_a_task_with_too_few_items_for_its_margin_is_inconclusive_and_says_how_many(tmp_path: Path) -> None:
    outcome = outcome_of(EVALS, "copy", Faults(), tmp_path)
    assert outcome.status is Status.INCONCLUSIVE
    assert "88 items settle it" in outcome.summary


def test_a_task_passes_when_its_interval_excludes_the_margin(tmp_path: Path) -> None:
    pack = FakePack()
    check = _with_threshold(planned(EVALS, "copy", pack), "margin", 0.6)
    from harness.stages.evals import run

    outcome = run(check, stage_context(pack, tmp_path))
    assert outcome.status is Status.PASS
    figures = {figure.name: figure.value for figure in outcome.figures}
    assert figures["stock_score"] == 1.0
    assert figures["path_share"] == 1.0


def test_a_task_answered_wrongly_fails_and_shows_the_flipped_items(tmp_path: Path) -> None:
    pack = FakePack(Faults(error=2.0))
    check = _with_threshold(planned(EVALS, "copy", pack), "margin", 0.6)
    from harness.stages.evals import run

    outcome = run(check, stage_context(pack, tmp_path))
    assert outcome.status is not Status.PASS
    assert outcome.findings[0].rule == "flipped_item"


def test_arms_that_answered_different_items_are_invalid(tmp_path: Path) -> None:
    pack = FakePack()
    check = planned(EVALS, "copy", pack)
    from harness.stages.evals import sample

    samples = sample(check, stage_context(pack, tmp_path))
    table = samples.table("items")
    assert table is not None
    fewer = table.model_copy(
        update={"rows": tuple(r for r in table.rows if r[:2] != ("optimised", "copy-0"))}
    )
    broken = samples.model_copy(update={"tables": (fewer, *samples.tables[1:])})
    assert judge(check, broken).status is Status.INVALID


def test_lm_eval_drives_the_arms_where_it_is_installed(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="the evals extra is not installed")
    pack = FakePack()
    from harness.stages.evals import sample

    samples = sample(planned(EVALS, "copy", pack), stage_context(pack, tmp_path))
    driver = samples.table("driver")
    assert driver is not None
    assert driver.rows == (("lm-eval",),)


def test_the_direct_driver_gives_the_same_samples_as_lm_eval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval", reason="the evals extra is not installed")
    from harness.stages.evals import sample, sampling, tasks

    pack = FakePack()
    tables = {}
    for part in ("drift", "copy"):
        check = planned(EVALS, part, pack)
        through = sample(check, stage_context(pack, tmp_path))
        with monkeypatch.context() as patch:
            patch.setattr(sampling, "find_spec", lambda _: None)
            patch.setattr(tasks, "find_spec", lambda _: None)
            direct = sample(check, stage_context(pack, tmp_path))
        tables[part] = (through.tables[0], direct.tables[0])
    for through_table, direct_table in tables.values():
        assert through_table == direct_table


def test_mrcr_scores_zero_without_the_prefix_and_a_ratio_with_it() -> None:
    assert mrcr("hello", "XYhello", "XY") == 0.0
    assert mrcr("XYhello", "XYhello", "XY") == 1.0
    assert mrcr("XYhell", "XYhello", "XY") == pytest.approx(2 * 4 / 9)


def test_mrcr_removes_the_prefix_from_both_sides() -> None:
    assert mrcr("XYaaaa", "XYbbbb", "XY") == 0.0


def test_tail_looks_only_at_the_last_tokens() -> None:
    assert tail([9, 9, 4, 5], [1, 2, 4, 5], 2) == 1.0
    assert tail([4, 5, 6], [1, 2, 4, 5], 2) == 0.0
    assert tail([5], [4, 5], 2) == 0.0


def test_exact_wants_the_whole_answer() -> None:
    assert exact([1, 2], [1, 2]) == 1.0
    assert exact([1, 2, 3], [1, 2]) == 0.0


def test_an_unknown_scorer_is_an_error() -> None:
    with pytest.raises(KeyError):
        score_tokens("fuzzy", [1], [1], 0, 0)


def _with_threshold(check, name, value):  # type: ignore[no-untyped-def]  # a test's own shorthand
    thresholds = tuple(
        t.model_copy(update={"value": value}) if t.name == name else t for t in check.thresholds
    )
    return check.model_copy(update={"thresholds": thresholds})


def test_one_turned_near_tie_among_many_positions_is_not_drift() -> None:
    from harness.stages.evals.drift import agreement_noise

    assert 0.995 * 0.99 - agreement_noise(0.995, 192) < 0.985
    assert 0.995 * 0.99 - agreement_noise(0.995, 20_000) > 0.98


def test_an_item_answered_twice_in_one_arm_is_invalid(tmp_path: Path) -> None:
    from harness.stages.evals import sample

    pack = FakePack()
    check = planned(EVALS, "copy", pack)
    samples = sample(check, stage_context(pack, tmp_path))
    table = samples.table("items")
    assert table is not None
    doubled = table.model_copy(update={"rows": (*table.rows, table.rows[0])})
    broken = samples.model_copy(update={"tables": (doubled, *samples.tables[1:])})
    assert judge(check, broken).status is Status.INVALID


def _taken(part: str, folder: Path) -> tuple[Check, Samples]:
    pack = FakePack()
    check = planned(EVALS, part, pack)
    return check, sample(check, stage_context(pack, folder))


def test_drift_samples_that_do_not_fit_are_invalid_and_never_a_crash(tmp_path: Path) -> None:
    check, samples = _taken("drift", tmp_path)
    for done, bad in spoiled(samples, DRIFT_SHAPES):
        assert judge(check, bad).status is Status.INVALID, done


def test_task_samples_that_do_not_fit_are_invalid_and_never_a_crash(tmp_path: Path) -> None:
    check, samples = _taken("copy", tmp_path)
    for done, bad in spoiled(samples, TASK_SHAPES):
        assert judge(check, bad).status is Status.INVALID, done


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"arm": "optimised", "position": 40}, "arm optimised has other positions than stock"),
        ({"arm": "poison"}, "arm poison has other positions than stock"),
        ({"position": 40}, "leaves out positions"),
    ],
)
def test_positions_that_were_left_out_make_drift_invalid(
    values: dict[str, Any], words: str, tmp_path: Path
) -> None:
    check, samples = _taken("drift", tmp_path)
    outcome = judge(check, without_rows(samples, "drift", **values))
    assert outcome.status is Status.INVALID
    assert words in outcome.summary


def test_items_that_were_left_out_by_both_arms_make_a_task_invalid(tmp_path: Path) -> None:
    check, samples = _taken("copy", tmp_path)
    table = samples.table("items")
    assert table is not None
    item = next(r["item"] for r in reversed(table.records()) if r["arm"] == "optimised")
    outcome = judge(check, without_rows(samples, "items", item=item))
    assert outcome.status is Status.INVALID
    assert "items were answered, and the plan asks" in outcome.summary


def test_an_item_with_another_target_for_one_arm_is_invalid(tmp_path: Path) -> None:
    check, samples = _taken("copy", tmp_path)
    table = samples.table("items")
    assert table is not None
    place = table.columns.index("target")
    rows = tuple(
        (*row[:place], "1 2 3", *row[place + 1 :]) if row[0] == "optimised" else row for row in table.rows
    )
    outcome = judge(check, with_rows(samples, "items", rows))
    assert outcome.status is Status.INVALID
    assert "is another question for arm optimised than for stock" in outcome.summary


def test_drift_along_a_text_of_ones_own_says_which_text_and_how_far_the_arms_are_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from harness.domain.record import sha256_hex
    from harness.stages.evals import sampling
    from harness.stages.evals.data import FOLDER_VARIABLE

    pack = FakePack()
    check = planned(EVALS, "drift", pack)
    own = check.model_copy(update={"parameters": (*check.parameters, ("text", "local"))})
    monkeypatch.setattr(sampling, "find_spec", lambda _: None)
    with pytest.raises(InputError, match="names no file of text"):
        sample(own, stage_context(pack, tmp_path))
    (tmp_path / "mine.txt").write_text("Ein eigener Text über Größe.", encoding="utf-8")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "mine.txt"))
    samples = sample(own, stage_context(pack, tmp_path))
    text = samples.table("text")
    assert text is not None
    assert text.rows == (("local", sha256_hex("Ein eigener Text über Größe.".encode())),)
    figures = {figure.name: figure.value for figure in judge(own, samples).figures}
    assert figures["arms_top1_agreement"] == 1.0
    assert figures["arms_mean_kl"] is not None
    assert figures["arms_mean_kl"] < 1e-9
