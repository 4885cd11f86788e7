"""One compiled variant as rows, and rows kept beside its files, so that what was read is not read again.

Kept rows are good for one content of the variant's files, one description of it and one version of the
reader; anything else is read anew. Reading takes about as long as a third of compiling, so a set is read by
two processes.
"""

import gc
import json
import multiprocessing
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from harness.domain.check import SampleTable
from harness.domain.pack import KernelVariant
from harness.domain.record import Scalar, canonical_bytes, sha256_hex
from harness.stages.audit.artifacts import Compiled
from harness.stages.audit.cost import RESOURCE_COLUMNS, resource_row
from harness.stages.audit.cubin import KernelResources, parse_cubin
from harness.stages.audit.facts import (
    ACCESS_COLUMNS,
    PROGRAM_COLUMNS,
    AccessFact,
    Launch,
    Parameter,
    ProgramFact,
    as_row,
    read_facts,
    read_flow,
)
from harness.stages.audit.launches import LAUNCH_COLUMNS, launch_row
from harness.stages.audit.planted import mutants
from harness.stages.audit.program import Program, SourceLine
from harness.stages.audit.ptx import doubtful_lines, parse_ptx
from harness.stages.audit.rules import access_findings
from harness.stages.audit.sass import parse_sass, target_of

__all__ = ["Place", "is_kept", "kept_tables", "read_all", "read_variant"]

COMPILE_COLUMNS = ("error", "missing", "variant", "target")
MUTANT_COLUMNS = ("mutation", *ACCESS_COLUMNS)
MUTANT_ROWS = 3
"""Changed accesses kept of each mutant: one is enough for the rules."""
READERS = 2
WORTH_SHARING = 8
"""Variants from which a second process pays for its start."""
RECENT = 4
"""Texts of which a process remembers what it read: one kernel's on each architecture."""
TARGET = re.compile(r"^\s*\.target\s.*\n", re.MULTILINE)


class Place(NamedTuple):
    """Where a pack's sources lie: on disk, and in its repository."""

    root: Path
    prefix: str


class _Case(NamedTuple):
    """What is read of a variant's text beside the text itself."""

    parameters: tuple[tuple[str, str], ...]
    launches: tuple[tuple[str, Launch], ...]
    place: Place


class _Level(NamedTuple):
    """What was read of one text."""

    programs: tuple[ProgramFact, ...]
    accesses: tuple[AccessFact, ...]
    mutants: tuple[tuple[Scalar, ...], ...]
    subjects: tuple[tuple[str, str], ...]
    """Short stable names for kernels, by their own."""
    numbers: tuple[tuple[str, frozenset[int]], ...]
    """Ordinals of plain 8-byte parameters, by kernel."""


@dataclass(frozen=True, slots=True)
class _Read:
    """Everything read of one compiled variant."""

    programs: tuple[ProgramFact, ...]
    accesses: tuple[AccessFact, ...]
    mutants: tuple[tuple[Scalar, ...], ...]
    resources: tuple[tuple[Scalar, ...], ...]
    launches: tuple[tuple[Scalar, ...], ...]
    missing: str | None


def kept_tables(compiled: Compiled, variant: KernelVariant, place: Place) -> tuple[SampleTable, ...]:
    """The variant's tables: those kept beside its files where they are of the same content, else read now."""
    if compiled.folder is None:
        return read_variant(compiled, variant, place)
    kept = compiled.folder / f"rows-{_reading_digest(compiled, variant, place)}.json"
    try:
        return tuple(SampleTable.model_validate(t) for t in json.loads(kept.read_text()))
    except (OSError, ValueError):
        pass  # not read yet, or cut short: read it now
    tables = read_variant(compiled, variant, place)
    for old in compiled.folder.glob("rows-*.json*"):
        old.unlink(missing_ok=True)
    partial = kept.with_suffix(f".{os.getpid()}.part")
    partial.write_text(json.dumps([t.model_dump(mode="json") for t in tables]))
    partial.replace(kept)
    return tables


def is_kept(compiled: Compiled, variant: KernelVariant, place: Place) -> bool:
    """Whether the variant's tables lie beside its files."""
    folder = compiled.folder
    return folder is not None and (folder / f"rows-{_reading_digest(compiled, variant, place)}.json").exists()


def read_all(wanted: Sequence[tuple[Compiled, KernelVariant]], place: Place) -> None:
    """Read every variant whose rows are not kept yet, so that `kept_tables` finds them."""
    missing = [(c, v) for c, v in wanted if c.folder is not None and not is_kept(c, v, place)]
    missing.sort(key=lambda entry: entry[1].name)  # a variant's architectures behind each other
    if len(missing) < WORTH_SHARING:
        return
    context = multiprocessing.get_context("spawn")
    # Nearly nothing of what a reader makes is garbage that refers to itself; looking for it takes a fifth.
    with ProcessPoolExecutor(READERS, mp_context=context, initializer=gc.disable) as readers:
        for _ in readers.map(
            kept_tables, *zip(*((c, v, place) for c, v in missing), strict=True), chunksize=6
        ):
            pass


def read_variant(compiled: Compiled, variant: KernelVariant, place: Place) -> tuple[SampleTable, ...]:
    """Everything that the rules need of one variant, or why it did not compile."""
    if compiled.error is not None:
        row = (compiled.error, None, compiled.name, None)
        return (SampleTable(name="compile", columns=COMPILE_COLUMNS, rows=(row,)),)
    read = _read(compiled, variant, place)
    return (
        SampleTable(
            name="compile",
            columns=COMPILE_COLUMNS,
            rows=((None, read.missing, compiled.name, target_of(compiled.text(".sass") or "")),),
        ),
        SampleTable(name="programs", columns=PROGRAM_COLUMNS, rows=tuple(as_row(p) for p in read.programs)),
        SampleTable(name="accesses", columns=ACCESS_COLUMNS, rows=tuple(as_row(a) for a in read.accesses)),
        SampleTable(
            name="resources",
            columns=RESOURCE_COLUMNS,
            rows=read.resources,
        ),
        SampleTable(name="launches", columns=LAUNCH_COLUMNS, rows=read.launches),
        SampleTable(name="mutants", columns=MUTANT_COLUMNS, rows=read.mutants),
    )


@cache
def _reader_digest() -> str:
    """Of the code that turns files into rows."""
    folder = Path(__file__).resolve().parent
    return sha256_hex(b"".join(sha256_hex(p.read_bytes()).encode() for p in sorted(folder.glob("*.py"))))


def _reading_digest(compiled: Compiled, variant: KernelVariant, place: Place) -> str:
    files = {
        suffix: None if text is None else sha256_hex(text.encode())
        for suffix in (".ptx", ".sass", ".json")
        for text in (compiled.text(suffix),)
    }
    key: dict[str, Any] = {
        "reader": _reader_digest(),
        "files": files,
        "cubin": sha256_hex(compiled.cubin()),
        "variant": variant.model_dump(mode="json"),
        "place": [str(place.root), place.prefix],
    }
    return sha256_hex(canonical_bytes(key))[:24]


def _read(compiled: Compiled, variant: KernelVariant, place: Place) -> _Read:
    """Parse what the compile left and gather facts at both levels."""
    record = compiled.record()
    ptx, sass = compiled.text(".ptx") or "", compiled.text(".sass")
    launches = _launches(record.get("launches"))
    case = _Case(variant.parameters, tuple(launches.items()), place)
    resources = parse_cubin(compiled.cubin())
    missing = record.get("sass_missing")
    levels = [_read_ptx(TARGET.sub("", ptx), case)]
    if sass is not None:
        source = (doubtful_lines(ptx), levels[0].numbers)
        levels.append(_read_sass(TARGET.sub("", sass), resources, *source, case))
    subjects = dict(levels[-1].subjects)
    resources = tuple(sorted(resources, key=lambda r: _place_of(r.name, subjects)))
    return _Read(
        tuple(fact for level in levels for fact in level.programs),
        tuple(fact for level in levels for fact in level.accesses),
        tuple(row for level in levels for row in level.mutants),
        tuple(resource_row(r, _dynamic_bytes(ptx, launches.get(r.name, Launch()))) for r in resources),
        _launch_rows(record.get("launches"), subjects, variant),
        None if missing is None else str(missing),
    )


@lru_cache(maxsize=RECENT)
def _read_ptx(text: str, case: _Case) -> _Level:
    """One PTX module. Architectures often differ in its target line alone, which is left out."""
    programs = parse_ptx(text)
    numbers = tuple((p.name, _numbers(p, len(case.parameters))) for p in programs)
    return _read_level(programs, numbers, case)


@lru_cache(maxsize=RECENT)
def _read_sass(
    text: str,
    resources: tuple[KernelResources, ...],
    doubtful: frozenset[SourceLine],
    numbers: tuple[tuple[str, frozenset[int]], ...],
    case: _Case,
) -> _Level:
    """One disassembly; which parameters are plain numbers is known from the PTX."""
    return _read_level(parse_sass(text, {r.name: r for r in resources}, doubtful), numbers, case)


def _read_level(
    programs: tuple[Program, ...], numbers: tuple[tuple[str, frozenset[int]], ...], case: _Case
) -> _Level:
    launches, shown, plain = dict(case.launches), _placer(case.place), dict(numbers)
    parameters = tuple(Parameter(name, role) for name, role in case.parameters)
    facts: list[ProgramFact] = []
    accesses: list[AccessFact] = []
    planted: list[tuple[Scalar, ...]] = []
    named = dict.fromkeys([*plain, *(program.name for program in programs)])  # in the order of the PTX
    subjects = tuple((name, f"kernel{number}") for number, name in enumerate(named))
    short = dict(subjects)
    for program in programs:
        name, subject = program.name, short[program.name]
        own, launch = plain.get(name, frozenset()), launches.get(name, Launch())
        flow = read_flow(program)
        fact, found = read_facts(program, subject, parameters, launch, shown, own, flow)
        facts.append(fact)
        accesses += found
        planted += _mutant_rows(subject, program, found, mutants(program, parameters, launch, own, flow))
    return _Level(tuple(facts), tuple(accesses), tuple(planted), subjects, numbers)


def _mutant_rows(
    subject: str,
    program: Program,
    sound: Sequence[AccessFact],
    changes: Iterable[tuple[str, tuple[AccessFact, ...]]],
) -> list[tuple[Scalar, ...]]:
    """Of each planted change a few accesses that it changed, or one empty row."""
    same = {as_row(a) for a in sound}
    rows: list[tuple[Scalar, ...]] = []
    for mutation, changed in changes:
        name = f"{mutation}:{program.level.value}:{subject}"
        broken = [
            a for a in changed if (subject, *as_row(a)[1:]) not in same and a.roles not in ("", "weight")
        ]
        broken.sort(key=lambda a: not access_findings([], [a]))  # a counter made weak breaks no rule
        rows += [(name, *as_row(a)) for a in broken[:MUTANT_ROWS]] or [(name, *(None,) * len(ACCESS_COLUMNS))]
    return rows


def _place_of(kernel: str, subjects: Mapping[str, str]) -> int:
    """Where a kernel stands among the others; behind them where no text has it."""
    return list(subjects).index(kernel) if kernel in subjects else len(subjects)


def _launch_rows(
    records: object, subjects: Mapping[str, str], variant: KernelVariant
) -> tuple[tuple[Scalar, ...], ...]:
    """Launches in their order, by the short names of their kernels: their place in their own text."""
    names = [name for name, _ in variant.parameters]
    return tuple(
        launch_row(subjects.get(record["kernel"], record["kernel"]), record, names)
        for record in (records if isinstance(records, list) else [])
    )


def _numbers(program: Program, tensors: int) -> frozenset[int]:
    """Ordinals of plain 8-byte parameters, where a kernel has more wide parameters than declared tensors."""
    wide = [slot for slot in program.slots if slot.may_hold_pointer]
    return frozenset(s.ordinal for s in wide if not s.is_record) if len(wide) != tensors else frozenset()


def _dynamic_bytes(ptx: str, launch: Launch) -> int | None:
    """Dynamic shared memory of a launch: none where the module asks for none, else what the launch says."""
    return launch.dynamic_shared_bytes if ".extern .shared" in ptx else 0


def _launches(records: object) -> Mapping[str, Launch]:
    """Launches by kernel from the compile's record; several launches of one kernel count as the loosest."""
    found: dict[str, Launch] = {}
    for record in records if isinstance(records, list) else []:
        x, y, z = record["cluster"]
        block, dynamic = record["block"], record.get("dynamic_shared_bytes")
        threads = None if None in block else block[0] * block[1] * block[2]
        known = found.get(record["kernel"], Launch(False, 1, threads, dynamic))
        found[record["kernel"]] = Launch(
            is_dependent=bool(known.is_dependent) or record["is_dependent"],
            cluster_blocks=max(known.cluster_blocks, x * y * z),
            threads=threads,
            dynamic_shared_bytes=None
            if dynamic is None or known.dynamic_shared_bytes is None
            else max(dynamic, known.dynamic_shared_bytes),
        )
    return found


def _placer(place: Place) -> Callable[[SourceLine], str]:
    """Repository path of a source line; the bare file name for anything outside the pack."""

    def shown(line: SourceLine) -> str:
        path = Path(line.file)
        if path.is_relative_to(place.root):
            return place.prefix + path.relative_to(place.root).as_posix()
        return path.name

    return shown
