"""Ops explain a layer's gain, or the gap is told: with what an H200 gave for a KDA layer at batch 1."""

import pytest

from harness.domain.cell import Cell
from harness.domain.check import Check, Figure, Outcome, StageName, Status
from harness.domain.machine import Tier
from harness.measure.levels import Level, reconciled, saved_by


def _cell(
    kind: str, stock: float, mine: float, parts: str | None = None, batch: int = 1, context: int = 1024
) -> tuple[Check, Outcome]:
    """Ratio known to within 1 % each way, no noise."""
    cell = Cell(arch="sm_90a", tp=8, batch=batch, context=context)
    check = Check(
        id=f"sweep/layer/{kind}/{cell.label()}", stage=StageName.SWEEP, proves="x", cell=cell, cost_s=0.0,
        parameters=(("kind", kind), ("parts", parts)),
    )  # fmt: skip
    ratio = stock / mine
    figures = (
        Figure(name="stock_us", value=stock), Figure(name="optimised_us", value=mine),
        Figure(name="ratio", value=ratio, low=ratio * 0.99, high=ratio * 1.01),
        Figure(name="noise_floor", value=0.0),
    )  # fmt: skip
    outcome = Outcome(
        check=check.id, status=Status.FAIL, tier=Tier.RANK, summary="x", next_step="y", figures=figures
    )
    return check, outcome


def _level(*pairs: tuple[Check, Outcome]) -> Level:
    (level,) = reconciled(pairs)
    return level


def test_what_a_cell_saved_has_the_interval_of_its_ratio() -> None:
    """100 over 50 us: stock less stock / 1.98 and stock / 2.02."""
    saved = saved_by(_cell("op.router", 100.0, 50.0)[1])
    assert saved is not None
    assert saved == pytest.approx((50.0, 49.495, 50.495), abs=0.001)


def test_parts_that_add_up_explain_the_whole() -> None:
    """2 x 5 + 40 us of 50."""
    level = _level(
        _cell("kda_moe", 100.0, 50.0, "op.attn_res*2 op.experts"),
        _cell("op.attn_res", 8.0, 3.0), _cell("op.experts", 60.0, 20.0),
    )  # fmt: skip
    assert level.explained.us == 50.0
    assert level.is_explained
    assert level.words() == "explained within the interval"


def test_what_the_parts_do_not_explain_is_a_gap_with_its_share() -> None:
    level = _level(_cell("kda_moe", 100.0, 50.0, "op.experts"), _cell("op.experts", 60.0, 20.0))
    assert not level.is_explained
    assert level.words() == "gap of +10.0 us, 20% of what was saved"


def test_a_part_that_nobody_timed_in_this_cell_is_named_and_explains_nothing() -> None:
    level = _level(
        _cell("kda_moe", 100.0, 50.0, "op.experts op.router"),
        _cell("op.experts", 60.0, 10.0), _cell("op.router", 9.0, 2.0, batch=8),
    )  # fmt: skip
    assert level.missing == ("op.router",)
    assert not level.is_explained
    assert level.words() == "not timed in this cell: op.router"


def test_an_op_timed_at_one_context_stands_for_all_and_one_timed_at_several_for_its_own() -> None:
    level = _level(
        _cell("mla_moe", 100.0, 50.0, "op.experts op.mla_attend", context=32768),
        _cell("op.experts", 40.0, 20.0),
        _cell("op.mla_attend", 20.0, 10.0), _cell("op.mla_attend", 50.0, 20.0, context=32768),
    )  # fmt: skip
    assert [part.saved and part.saved.us for part in level.parts] == [20.0, 30.0]
    assert level.is_explained


def test_cells_without_parts_or_without_an_interval_are_no_level() -> None:
    check, outcome = _cell("kda_moe", 100.0, 50.0, "op.experts")
    bare = outcome.model_copy(update={"figures": outcome.figures[:2]})
    assert reconciled([(check, bare), _cell("op.experts", 60.0, 20.0)]) == ()
