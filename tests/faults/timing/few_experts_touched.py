"""The bench draws the same token for every request, so two experts are read, not seven."""

from harness.domain.check import Samples
from harness.faults.fault import Fault
from harness.faults.scenes import SamplesScene
from tests.faults.sample_edits import Row, each, edit_rows, retimed


def edit(samples: Samples, is_repaired: bool) -> Samples:
    def faster(row: Row) -> Row:
        return row if is_repaired else row | {"us": row["us"] * 0.6}

    def narrowed(rows: list[Row]) -> list[Row]:
        """Every row's choices on the first two experts of its arm."""
        kept = []
        for arm in dict.fromkeys(row["arm"] for row in rows):
            mine = [row for row in rows if row["arm"] == arm]
            half = sum(row["rows"] for row in mine) // 2
            kept += [row | {"rows": half} for row in mine[:2]]
        return rows if is_repaired else kept

    return edit_rows(retimed(samples, each(faster)), "experts", narrowed)


FAULT = Fault(
    name="few_experts_touched",
    title="The bench draws the same token for every request, so two experts are read, not seven.",
    report="flashinfer-ai/flashinfer#3622",
    target="timing",
    expected="sweep",
    scene=SamplesScene("sweep/decode_step/cpu.tp1.dcp1.b8.c64", edit),
)
