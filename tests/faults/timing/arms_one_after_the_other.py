"""One arm is timed after the other while the clocks fall, so order looks like speed."""

from harness.domain.check import Samples
from harness.faults.fault import Fault
from harness.faults.scenes import SamplesScene
from tests.faults.sample_edits import Row, retimed

ORDER = ("stock", "optimised", "null", "slow")


def edit(samples: Samples, is_repaired: bool) -> Samples:
    """A drift over the same times: arm after arm, or, a milder one, block after block, where it meets all arms
    alike.
    """

    def drift(rows: list[Row]) -> list[Row]:
        if is_repaired:
            blocks = 1 + max(row["block"] for row in rows)
            return [row | {"us": row["us"] * (1.2 - 0.2 * row["block"] / blocks)} for row in rows]
        rows = sorted(rows, key=lambda row: (ORDER.index(row["arm"]), row["block"]))
        return [row | {"us": row["us"] * (4.0 - 3.0 * i / len(rows))} for i, row in enumerate(rows)]

    return retimed(samples, drift)


FAULT = Fault(
    name="arms_one_after_the_other",
    title="One arm is timed after the other while the clocks fall, so order looks like speed.",
    report="flashinfer-ai/flashinfer#2899",
    target="timing",
    expected="sweep",
    scene=SamplesScene("sweep/decode_step/cpu.tp1.dcp1.b1.c64", edit),
)
