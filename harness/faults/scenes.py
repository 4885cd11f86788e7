"""The kinds of scene: what is planted, where, and which real stages look at it."""

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.domain.check import Check, Samples
from harness.domain.errors import InputError
from harness.domain.faults import Sighting
from harness.domain.pack import Pack
from harness.faults.bench import Bench

__all__ = ["BundleScene", "ChangeScene", "PackScene", "PatchScene", "SamplesScene"]


@dataclass(frozen=True, slots=True)
class PatchScene:
    """The pack, an eval or the harness itself patched in this process while planned checks run."""

    plant: Callable[[bool], AbstractContextManager[Any]]
    """Takes whether the repaired twin is wanted; the patch is gone when the context ends."""
    checks: tuple[str, ...]
    """How the ids of the checks that run begin."""
    regimes: str = ""
    """Input regimes of kernel checks, where not all: what the pack itself lacks in another is no matter of
    the fault."""

    def look(self, bench: Bench, is_repaired: bool) -> Iterator[Sighting]:
        """Sightings of the planned checks."""
        checks = tuple(_in_regimes(check, self.regimes) for check in bench.checks(*self.checks))
        with self.plant(is_repaired):
            yield from bench.run(checks)


def _in_regimes(check: Check, regimes: str) -> Check:
    """The check over some of its regimes alone."""
    if not regimes:
        return check
    kept = tuple((name, regimes if name == "regimes" else value) for name, value in check.parameters)
    return check.model_copy(update={"parameters": kept})


@dataclass(frozen=True, slots=True)
class PackScene:
    """A small pack of its own, where the installed one has no place for the fault."""

    make: Callable[[Path, bool], Pack]
    """Takes a folder to work in and whether the repaired twin is wanted."""
    look_at: Callable[[Bench, Pack], Iterable[Sighting]]

    def look(self, bench: Bench, is_repaired: bool) -> Iterable[Sighting]:
        """Whatever `look_at` sees of the pack."""
        folder = bench.scratch()
        try:
            return tuple(self.look_at(bench, self.make(folder, is_repaired)))
        finally:
            shutil.rmtree(folder)


@dataclass(frozen=True, slots=True)
class ChangeScene:
    """A commit on top of the pack's own sources, for isolation."""

    path: str
    """Repository path of the file that the commit touches; made where there is none."""
    fault: str
    repaired: str
    instead_of: str = ""
    """Text of the file that gives way; where it is empty, the new text is appended."""

    def look(self, bench: Bench, is_repaired: bool) -> Iterable[Sighting]:
        """What isolation says of the commit; raises `InputError` where `instead_of` is not in the file."""

        def edit(repo: Path) -> None:
            file = repo / self.path
            file.parent.mkdir(parents=True, exist_ok=True)
            before = file.read_text(encoding="utf-8") if file.is_file() else ""
            text = self.repaired if is_repaired else self.fault
            if self.instead_of not in before:
                raise InputError(f"{self.path} does not hold {self.instead_of!r}: bring the fault up to date")
            after = before.replace(self.instead_of, text, 1) if self.instead_of else before + text
            file.write_text(after, encoding="utf-8")

        return bench.isolate(edit)


@dataclass(frozen=True, slots=True)
class SamplesScene:
    """Samples as a faulty sampler would have left them, judged by the real judge."""

    check: str
    """How the id of the check begins whose honest samples are the start."""
    edit: Callable[[Samples, bool], Samples]
    plant: Callable[[bool], AbstractContextManager[Any]] = lambda _: nullcontext()
    """A patch of the judge itself, while it judges."""

    def look(self, bench: Bench, is_repaired: bool) -> Iterator[Sighting]:
        """The judge's word on the edited samples."""
        check, samples = bench.honest(self.check)
        edited = self.edit(samples, is_repaired)
        with self.plant(is_repaired):
            yield bench.judge(check, edited)


@dataclass(frozen=True, slots=True)
class BundleScene:
    """A bundle that somebody changed after the fact, verified and put before the gate."""

    edit: Callable[[Path, bool], None]
    head: str | None = None
    """Head that the gate is asked about; the bundle's own where it is None."""

    def look(self, bench: Bench, is_repaired: bool) -> Iterable[Sighting]:
        """The verdicts of `bundle verify` and the gate."""
        folder = bench.bundle()
        try:
            self.edit(folder, is_repaired)
            return bench.weigh(folder, None if is_repaired else self.head)
        finally:
            shutil.rmtree(folder.parent)
