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
    """Names of the lines of each plot."""
    made = panels(Material(example_plan(), pairs, lambda check: None))
    return {p.title: re.findall(r'class="key"[^>]*>([^<]*)', str(p.svg)) for p in made if p.svg is not None}


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
