"""The binary is another one than the one that was described."""

from pathlib import Path

from tests.faults.described import described_fault


def swap(path: Path) -> None:
    path.write_text(path.read_text().replace("add.f32 %f3, %f1, %f2;", "mov.f32 %f3, %f1;"))


FAULT = described_fault(
    "binary_swapped_after_description",
    title="The binary is another one than the one that was described.",
    report="gpu-mode/pygpubench#49",
    swap=swap,
)
