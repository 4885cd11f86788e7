"""Positions whose log-probability is not finite are left out of the comparison."""

from harness.domain.check import Samples
from harness.faults.fault import Fault
from harness.faults.scenes import SamplesScene
from tests.faults.sample_edits import Row, each, edit_rows


def edit(samples: Samples, is_repaired: bool) -> Samples:
    def drop(row: Row) -> Row | None:
        is_it = row["arm"] == "optimised" and row["position"] % 10 == 7 and not is_repaired
        return None if is_it else row

    return edit_rows(samples, "drift", each(drop))


FAULT = Fault(
    name="nan_positions_left_out",
    title="Positions whose log-probability is not finite are left out of the comparison.",
    report="pytorch/pytorch#72194",
    target="eval",
    expected="evals",
    scene=SamplesScene("evals/drift", edit),
)
