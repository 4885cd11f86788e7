"""The positions with the largest errors are taken out of the samples, and the digests made to fit."""

from pathlib import Path

from harness.faults.fault import Fault
from harness.faults.scenes import BundleScene
from tests.faults.result_edits import rewrite_table


def edit(folder: Path, is_repaired: bool) -> None:
    def keep(table: object) -> object:
        frame = table.to_pandas()  # type: ignore[attr-defined]  # a pyarrow table
        worst = frame.index if is_repaired else frame.sort_values("kl").index[:-20]
        return frame.loc[sorted(worst)]

    rewrite_table(folder, "evals~drift", "drift", keep)


FAULT = Fault(
    name="samples_left_out",
    title="The positions with the largest errors are taken out of the samples, and the digests made to fit.",
    report="openai/mrcr (dataset card, 5 December 2025)",
    target="result",
    expected="bundle",
    scene=BundleScene(edit),
)
