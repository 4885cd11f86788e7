"""`fasttrack tune` without its words: which cells are searched, the record, and the table that follows."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

from pydantic import ValidationError

from harness.domain.cell import Cell
from harness.domain.check import Check
from harness.domain.errors import InputError
from harness.domain.machine import Machine
from harness.domain.pack import Pack
from harness.domain.stage import PlanRequest
from harness.domain.tuning import (
    TunablePack,
    TunedEntry,
    TunedTable,
    TuningRecord,
    TuningSpace,
    TuningStudy,
    words_of,
)
from harness.engines.packs import harness_digest, pack_digest
from harness.tuning.desk import op_checks, request_of
from harness.tuning.search import Budget, Desk, search

__all__ = ["Wanted", "load_table", "parse_label", "table_after", "tune"]

LABEL = re.compile(
    r"(?P<arch>\w+)\.tp(?P<tp>\d+)\.dcp(?P<dcp>\d+)\.b(?P<batch>\d+)\.c(?P<context>\d+)\.d(?P<drafts>\d+)"
    r"\.(?P<kv_dtype>\w+)\.(?P<phase>\w+)"
)
"""As `Cell.label` writes it."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be searched."""

    pack: Pack
    op: str
    cells: tuple[str, ...]
    """Texts, one of which a cell's label must hold; empty: the first cell of every shape."""
    policy: str
    seed: int
    budget: Budget
    model: str | None = None
    processes: int = 2
    command: str = ""
    built: Path | None = None
    """Where compiled kernels are kept; None: beside the record."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Checks whose cells have one shape, and so one choice."""

    space: TuningSpace
    checks: tuple[Check, ...]


def tune(wanted: Wanted, out: Path, say: Callable[[str], None]) -> TuningRecord:
    """Search every cell that is wanted; raises `InputError` where the op has no choices here."""
    if not hasattr(wanted.pack, "tuning_space"):
        raise InputError(f"pack {wanted.pack.name} declares no choices of its kernels (domain/tuning.py)")
    tunable = cast("TunablePack", wanted.pack)
    request = request_of(wanted.pack, wanted.policy, wanted.seed, is_full=True)
    implementation = "cpu" if request.machine.arch == "cpu" else "cute"
    groups = _groups(wanted, tunable, request, implementation)
    studies = []
    built = wanted.built or out / "built"
    built.mkdir(parents=True, exist_ok=True)
    for number, group in enumerate(groups):
        check = group.checks[0]
        if check.cell is None:
            raise AssertionError(f"{check.id} was planned without a cell")
        now = words_of(group.space.incumbent)
        say(f"{wanted.op} in {check.cell.label()} at {check.parameter('model')}: {now}")
        folder = out / f"study{number}"
        folder.mkdir(parents=True, exist_ok=True)
        ids = tuple(c.id for c in group.checks)

        def checks_of(seed: int, ids: tuple[str, ...] = ids) -> Sequence[Check]:
            fresh = request_of(wanted.pack, wanted.policy, seed, is_full=True)
            planned = {c.id: c for c in _checks(wanted, fresh, implementation)}
            return [planned[i] for i in ids]

        desk = Desk(wanted.pack, tunable, wanted.policy, folder, built, checks_of, say, wanted.processes)
        model = str(check.parameter("model"))
        study = search(desk, group.space, check.cell, model, wanted.seed, wanted.budget)
        say(f"{study.verdict}: {study.words}")
        studies.append(study)
    return TuningRecord(
        created=datetime.now(UTC).replace(microsecond=0), machine=_machine_words(request.machine),
        arch=request.machine.arch, harness=harness_digest(), pack=wanted.pack.name,
        pack_digest=pack_digest(wanted.pack), command=wanted.command, studies=tuple(studies),
    )  # fmt: skip


def table_after(table: TunedTable | None, record: TuningRecord) -> TunedTable:
    """The table with what a record's studies chose; a study that was not judged changes nothing."""
    after = table or TunedTable(arch=record.arch, machine=record.machine, entries=())
    for study in record.studies:
        if study.verdict != "not_judged":
            after = after.with_entry(_entry(study, record))
    return after.model_copy(update={"machine": record.machine})


def load_table(path: Path) -> TunedTable | None:
    """The table in a file; None where there is none; raises `InputError` where it is none."""
    if not path.is_file():
        return None
    try:
        return TunedTable.from_json(path.read_bytes())
    except ValueError as error:
        raise InputError(
            f"{path} is no tuned table ({str(error).splitlines()[0]}); remove it and tune"
        ) from error


def _groups(wanted: Wanted, tunable: TunablePack, request: PlanRequest, implementation: str) -> list[_Group]:
    """Cells that are wanted, by shape; the first of each is searched, all are tested with what was chosen."""
    found: dict[tuple[str, tuple[tuple[str, int], ...]], _Group] = {}
    labels = []
    for check in _checks(wanted, request, implementation):
        model = str(check.parameter("model"))
        if check.cell is None or (wanted.model is not None and model != wanted.model):
            continue
        labels.append(check.cell.label())
        space = tunable.tuning_space(wanted.op, implementation, check.cell, model)
        if space is None:
            continue
        known = found.get((model, space.shape))
        checks = (check,) if known is None else (*known.checks, check)
        found[(model, space.shape)] = _Group(space, checks)
    if not labels:
        raise InputError(f"no check of {wanted.op!r} runs here; `fasttrack kernels list` names the ops")
    if not found:
        raise InputError(f"{wanted.op} has no choices on {request.machine.arch}")
    groups = [g for group in found.values() if (g := _narrowed(group, wanted.cells))]
    if not groups:
        raise InputError(
            f"no cell of {wanted.op} holds {' or '.join(wanted.cells)}; there are "
            f"{', '.join(sorted(set(labels)))}"
        )
    return groups


def _checks(wanted: Wanted, request: PlanRequest, implementation: str) -> tuple[Check, ...]:
    """Checks of the op that are planned here, and its first one in each cell that is asked for in full."""
    planned = op_checks(request, wanted.op, implementation)
    known = {c.cell.label() for c in planned if c.cell is not None}
    asked = [cell for text in wanted.cells if text not in known and (cell := parse_label(text)) is not None]
    if outside := [cell.label() for cell in asked if not request.claim.envelope.admits(cell)]:
        raise InputError(
            f"the claim's envelope does not hold {', '.join(outside)}; nothing would dispatch it"
        )
    first = planned[:1] if wanted.model is None else [
        c for c in planned if c.parameter("model") == wanted.model
    ][:1]  # fmt: skip
    return (*planned, *(
        check.model_copy(update={"cell": cell, "id": check.id.rpartition("/")[0] + "/" + cell.label()})
        for cell in asked for check in first
    ))  # fmt: skip


def parse_label(label: str) -> Cell | None:
    """The cell that a whole label names; None for any other text."""
    found = LABEL.fullmatch(label)
    if found is None:
        return None
    numbers = {name: int(value) for name, value in found.groupdict().items() if value.isdigit()}
    words = {name: value for name, value in found.groupdict().items() if not value.isdigit()}
    try:
        return Cell.model_validate(words | numbers)
    except ValidationError as error:
        raise InputError(f"{label} is no cell: {str(error).splitlines()[2].strip()}") from error


def _narrowed(group: _Group, texts: tuple[str, ...]) -> _Group | None:
    """The group with a wanted cell in front; None where it has none."""
    if not texts:
        return group
    chosen = [c for c in group.checks if c.cell is not None and any(t in c.cell.label() for t in texts)]
    if not chosen:
        return None
    rest = [c for c in group.checks if c is not chosen[0]]
    return _Group(group.space, (chosen[0], *rest))


def _entry(study: TuningStudy, record: TuningRecord) -> TunedEntry:
    held_out = study.held_out if study.verdict == "improved" else None
    times = [t.timing.incumbent_us for t in study.trials if t.timing is not None]
    early = [t.early.incumbent_us for t in study.trials if t.early is not None]
    known = sorted(times or early)
    measured = held_out.other_us if held_out else known[len(known) // 2] if known else None
    if study.verdict == "not_judged":
        raise AssertionError("a study that was not judged has no entry")
    return TunedEntry(
        kernel=study.space.kernel, op=study.space.op, implementation=study.space.implementation,
        shape=study.space.shape, near=study.space.near, configuration=study.chosen, cell=study.cell.label(),
        model=study.model, verdict=study.verdict, measured_us=measured,
        gain=held_out.ratio if held_out else 1.0, trials=len(study.trials), record=record.digest(),
    )  # fmt: skip


def _machine_words(machine: Machine) -> str:
    gpus = ", ".join(gpu.name for gpu in machine.gpus)
    return gpus or f"{machine.cpu_model}, {machine.cpu_count} processors"
