"""The sweep's plots: a line joins cells that differ in batch alone."""

import re

from harness.domain.cell import Cell
from harness.domain.check import Check, Figure, Outcome, StageName, Status
from harness.domain.machine import Tier
from harness.report.panels.material import Material
from harness.report.panels.sweep import panels
from tests.evidence.example_run import example_plan


def _timed(kind: str | None, layout: str, tp: int, context: int, batch: int) -> tuple[Check, Outcome]:
    cell = Cell(arch="sm_90a", tp=tp, batch=batch, context=context)
    check = Check(
        id=f"sweep/layer/{kind}.{layout}/{cell.label()}", stage=StageName.SWEEP, proves="x", cell=cell,
        subject="layer", parameters=(("kind", kind), ("layout", layout)), cost_s=0.0,
    )  # fmt: skip
    outcome = Outcome(
        check=check.id, status=Status.INCONCLUSIVE, tier=Tier.RANK, summary="seen", next_step="run more",
        figures=(Figure(name="ratio", value=0.5 + tp / 8 + batch / 100),),
    )  # fmt: skip
    return check, outcome


def _panels(*pairs: tuple[Check, Outcome]) -> dict[str, list[str]]:
    """Names of the lines of each plot of gains."""
    made = panels(Material(example_plan(), pairs, lambda check: None))
    plots = [p for p in made if p.title.startswith("Gain over stock:")]
    return {p.title: re.findall(r'class="key"[^>]*>([^<]*)', str(p.svg)) for p in plots}


def test_layers_of_another_kind_layout_or_tp_are_lines_of_their_own() -> None:
    made = _panels(
        *(_timed("kda_moe", "sharded", tp, 1024, batch) for tp in (8, 16) for batch in (1, 8)),
        *(_timed("kda_moe", "whole", 8, 1024, batch) for batch in (1, 8)),
        *(_timed("mla_moe", "sharded", 8, context, batch) for context in (1024, 32768) for batch in (1, 8)),
    )
    assert {title: sorted(names) for title, names in made.items()} == {
        "Gain over stock: layer, kda_moe, sharded": ["context 1024, tp 16", "context 1024, tp 8"],
        "Gain over stock: layer, kda_moe, whole": ["context 1024"],
        "Gain over stock: layer, mla_moe, sharded": ["context 1024", "context 32768"],
    }


def test_where_it_loses_names_kind_and_layout_beside_the_cell() -> None:
    losing = _timed("kda_moe", "whole", 1, 64, 1)
    losing = (losing[0], losing[1].model_copy(update={"figures": (Figure(name="ratio", value=0.9),)}))
    table = next(
        p.table
        for p in panels(Material(example_plan(), (losing,), lambda check: None))
        if p.title == "Where it loses"
    )
    assert table is not None
    assert table.rows[0][0].text == "kda_moe, whole: batch 1, context 64"


def _with_figures(
    pair: tuple[Check, Outcome], parameters: tuple[tuple[str, str], ...], **figures: float
) -> tuple[Check, Outcome]:
    check = pair[0].model_copy(update={"parameters": parameters})
    found = tuple(
        Figure(name=name, value=v, low=v * 0.99, high=v * 1.01)
        if name == "ratio"
        else Figure(name=name, value=v)
        for name, v in figures.items()
    )
    return check, pair[1].model_copy(update={"figures": found})


def test_layers_get_a_roofline_and_steps_a_pareto_front() -> None:
    layer = _with_figures(
        _timed("kda_moe", "whole", 8, 1024, 1), (("kind", "kda_moe"), ("layout", "whole")), ratio=2.0,
        stock_us=140.0, optimised_us=70.0, optimised_moved_bytes=280e6, optimised_roofline=0.9,
    )  # fmt: skip
    step = _with_figures(
        _timed(None, "", 1, 64, 8), (), ratio=2.0, stock_us=40_000.0, optimised_us=20_000.0,
        verify_steps_per_s=50.0,
    )  # fmt: skip
    titles = [p.title for p in panels(Material(example_plan(), (layer, step), lambda check: None))]
    assert "Roofline" in titles
    assert "Tokens a user against tokens a GPU" in titles
    assert "Time over batch: layer, kda_moe, whole" in titles


def test_what_explains_a_layers_gain_is_told_with_its_gap() -> None:
    """100 to 50 us, of which the one part explains 40."""
    whole = _with_figures(
        _timed("kda_moe", "whole", 8, 1024, 1),
        (("kind", "kda_moe"), ("layout", "whole"), ("parts", "op.experts")),
        ratio=2.0, stock_us=100.0, optimised_us=50.0, noise_floor=0.0,
    )  # fmt: skip
    part = _with_figures(
        _timed("op.experts", "alone", 8, 1024, 1), (("kind", "op.experts"), ("layout", "alone")),
        ratio=3.0, stock_us=60.0, optimised_us=20.0, noise_floor=0.0,
    )  # fmt: skip
    shown = panels(Material(example_plan(), (whole, part), lambda check: None))
    (panel,) = [p for p in shown if p.title == "What explains the gain"]
    assert panel.table is not None
    assert [cell.text for cell in panel.table.rows[0]] == [
        "kda_moe, whole: batch 1, context 1024, tp 8", "50.0 us", "40.0 us", "+10.0 us [+9.3, +10.7]",
        "gap of +10.0 us, 20% of what was saved",
    ]  # fmt: skip
