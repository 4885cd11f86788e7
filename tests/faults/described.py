"""Faults in a launch that is described as data: small kernels, checked and timed by the trusted process."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harness.domain.errors import FasttrackError
from harness.domain.faults import Sighting
from harness.domain.launch_record import LaunchRecord
from harness.domain.machine import Tier
from harness.faults.bench import Bench
from harness.faults.fault import Fault
from harness.measure.described_run import DescribedJob, run_described
from harness.measure.tensor_files import save_arguments
from harness.stages.kernels.timing import Bounds, judge_described
from tests.measure.launchable import PTX, added_record, write_binary

__all__ = ["DescribedScene", "described_fault"]

ROWS, WIDTH = 4, 32
BOUNDS = Bounds(factor=2.0, floor_ulp=2.0, hard_cap=0.05)


@dataclass(frozen=True, slots=True)
class DescribedScene:
    """out = x + weight by a described launch, with the binary, the record or the file on disk changed."""

    binary: Callable[[str], str]
    """The faulty kernel's text from the sound one's."""
    record: Callable[[LaunchRecord], LaunchRecord]
    swap: Callable[[Path], object]
    """What somebody does to the binary after it was described."""

    def look(self, bench: Bench, is_repaired: bool) -> Iterator[Sighting]:
        """The trusted process's word on it."""
        folder = bench.scratch()
        try:
            yield self._sighting(folder, is_repaired)
        finally:
            shutil.rmtree(folder)

    def _sighting(self, folder: Path, is_repaired: bool) -> Sighting:
        binaries = write_binary(folder / "cubins", PTX if is_repaired else self.binary(PTX))
        ((digest, path),) = binaries.items()
        record = added_record(digest, ROWS, WIDTH)
        record = record if is_repaired else self.record(record)
        (folder / "record.json").write_bytes(record.canonical())
        if not is_repaired:
            self.swap(path)
        try:
            run = run_described(_job(folder))
            status, words, _ = judge_described(run, BOUNDS)
        except FasttrackError as error:
            return _said("FAIL", str(error))
        return _said(status.value, words)


def described_fault(
    name: str, *, title: str, report: str, binary: Callable[[str], str] = lambda text: text,
    record: Callable[[LaunchRecord], LaunchRecord] = lambda record: record,
    swap: Callable[[Path], object] = lambda path: None,
) -> Fault:  # fmt: skip
    """A fault that needs a GPU of one rank."""
    scene = DescribedScene(binary, record, swap)
    return Fault(name, title, report, "kernel", "kernels", scene, Tier.RANK)


def _job(folder: Path) -> DescribedJob:
    places = []
    for number in range(2):
        place = folder / f"inputs{number}"
        args = _arguments(number)
        truth = {"out": args["x"].double() + args["weight"].double()}
        save_arguments(args, place / "arguments")
        save_arguments(truth, place / "truth")
        save_arguments({"out": truth["out"].float()}, place / "stock")
        places.append(str(place))
    return DescribedJob(
        record=str(folder / "record.json"), cubins=str(folder / "cubins"), prepared=str(folder),
        inputs=tuple(places), outputs=("out",), exact=(), states=(), activations=("x",), copies=4, seed=5,
    )  # fmt: skip


def _arguments(seed: int) -> dict[str, Any]:
    source, fixed = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(99)
    return {
        "x": torch.randn(ROWS, WIDTH, generator=source), "weight": torch.randn(WIDTH, generator=fixed),
        "out": torch.full((ROWS, WIDTH), torch.nan),
    }  # fmt: skip


def _said(status: str, words: str) -> Sighting:
    return Sighting(column="kernels", subject="kernels/timed/described", status=status, words=words[:600])
