"""Another job takes the machine half of the time, and every second block is four times as slow."""

from harness.domain.check import Samples
from harness.faults.fault import Fault
from harness.faults.scenes import SamplesScene
from tests.faults.sample_edits import Row, each, retimed

ARMS = ("stock", "optimised", "null", "slow")
"""Neighbours in this order are never hit in the same block, so that no ratio stays as it was."""


def edit(samples: Samples, is_repaired: bool) -> Samples:
    def noise(row: Row) -> Row:
        is_hit = (row["block"] + ARMS.index(row["arm"])) % 2 == 0 and not is_repaired
        return row | {"us": row["us"] * (4.0 if is_hit else 1.0)}

    return retimed(samples, each(noise))


FAULT = Fault(
    name="noisy_neighbour",
    title="Another job takes the machine half of the time, and every second block is four times as slow.",
    report="NVIDIA/TensorRT-LLM#16937",
    target="timing",
    expected="sweep",
    scene=SamplesScene("sweep/decode_step/cpu.tp1.dcp1.b1.c64", edit),
)
