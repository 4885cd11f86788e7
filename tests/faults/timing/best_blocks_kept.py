"""Only the blocks in which the fast path won are kept."""

from harness.domain.check import Samples
from harness.faults.fault import Fault
from harness.faults.scenes import SamplesScene
from tests.faults.sample_edits import Row, each, edit_rows


def edit(samples: Samples, is_repaired: bool) -> Samples:
    kept = {row["block"] for row in samples.table("timings").records() if row["block"] % 2}

    def drop(row: Row) -> Row | None:
        is_it = row["arm"] == "stock" and row["block"] in kept and not is_repaired
        return None if is_it else row

    return edit_rows(samples, "timings", each(drop))


FAULT = Fault(
    name="best_blocks_kept",
    title="Only the blocks in which the fast path won are kept.",
    report="gpu-mode/reference-kernels#159",
    target="timing",
    expected="sweep",
    scene=SamplesScene("sweep/decode_step/cpu.tp1.dcp1.b1.c64", edit),
)
