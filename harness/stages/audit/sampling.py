"""Compile what is missing of the set and read one variant into rows.

The first check of a set compiles all of it in child processes; later checks find their files in the cache.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.domain.check import Check, Samples, SampleTable
from harness.domain.pack import KernelVariant, Pack
from harness.domain.record import Scalar
from harness.domain.stage import StageContext
from harness.stages.audit.artifacts import Compiled, compile_missing, find_compiled
from harness.stages.audit.cost import RESOURCE_COLUMNS, resource_row
from harness.stages.audit.cubin import parse_cubin
from harness.stages.audit.facts import (
    ACCESS_COLUMNS,
    PROGRAM_COLUMNS,
    AccessFact,
    Launch,
    Parameter,
    ProgramFact,
    as_row,
    read_facts,
)
from harness.stages.audit.planning import chosen_variants
from harness.stages.audit.planted import mutants, planted_facts, verdict
from harness.stages.audit.program import Level, Program, SourceLine
from harness.stages.audit.ptx import doubtful_lines, parse_ptx
from harness.stages.audit.sass import parse_sass, target_of

__all__ = ["MUTANT_COLUMNS", "sample"]

COMPILE_COLUMNS = ("error", "missing", "variant", "target")
CONTROL_COLUMNS = ("name", "level", "expected", "observed", "is_right")
MUTANT_COLUMNS = ("mutation", *ACCESS_COLUMNS)
MUTANT_ROWS = 3
"""Changed accesses kept of each mutant: one is enough for the rules."""


@dataclass(frozen=True, slots=True)
class _Read:
    """Everything read of one compiled variant."""

    programs: tuple[ProgramFact, ...]
    accesses: tuple[AccessFact, ...]
    mutants: tuple[tuple[Scalar, ...], ...]
    resources: tuple[tuple[Scalar, ...], ...]
    missing: str | None


def sample(check: Check, context: StageContext) -> Samples:
    """Compile what is missing of the set and read this check's variant."""
    begun = time.monotonic()
    name = check.parameter("variant")
    tables: tuple[SampleTable, ...] = ()
    if name is not None and check.cell is not None:
        architecture = check.cell.arch
        variant = next(v for v in context.pack.variants() if v.name == name)
        compiled = _compiled(context, variant, architecture, is_full=check.parameter("set") == "full")
        tables = (*_tables(compiled, variant, context.pack), _control_table(architecture))
    return Samples(check=check.id, tier=context.tier, tables=tables, duration_s=time.monotonic() - begun)


def _compiled(context: StageContext, variant: KernelVariant, architecture: str, *, is_full: bool) -> Compiled:
    """The variant's files; compiles the whole set where this one is missing."""
    found = find_compiled(context, variant, architecture)
    if found is not None:
        return found
    named = [a.arch for a in context.claim.envelope.architectures if a.arch != "cpu"]
    chosen = chosen_variants(context.pack.variants(), is_full)
    errors = compile_missing(context, [(v, a) for a in named for v in chosen if a in v.architectures])
    found = find_compiled(context, variant, architecture)
    return found or Compiled(
        None, variant.name, errors.get((variant.name, architecture), "it was not compiled")
    )


def _tables(compiled: Compiled, variant: KernelVariant, pack: Pack) -> tuple[SampleTable, ...]:
    if compiled.error is not None:
        row = (compiled.error, None, compiled.name, None)
        return (SampleTable(name="compile", columns=COMPILE_COLUMNS, rows=(row,)),)
    read = _read(compiled, variant, pack)
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
        SampleTable(name="mutants", columns=MUTANT_COLUMNS, rows=read.mutants),
    )


def _read(compiled: Compiled, variant: KernelVariant, pack: Pack) -> _Read:
    """Parse what the compile left and gather facts at both levels."""
    record = compiled.record()
    ptx, sass = compiled.text(".ptx") or "", compiled.text(".sass")
    resources = parse_cubin(compiled.cubin())
    programs = parse_ptx(ptx)
    if sass is not None:
        programs += parse_sass(sass, {r.name: r for r in resources}, doubtful_lines(ptx))
    launches = _launches(record.get("launches"))
    parameters = tuple(Parameter(name, role) for name, role in variant.parameters)
    place = _placer(pack)
    numbers = {p.name: _numbers(p, len(parameters)) for p in programs if p.level is Level.PTX}
    program_facts: list[ProgramFact] = []
    access_facts: list[AccessFact] = []
    planted: list[tuple[Scalar, ...]] = []
    for subject, program in _subjects(programs):
        launch = launches.get(program.name, Launch())
        plain = numbers.get(program.name, frozenset())
        fact, accesses = read_facts(program, subject, parameters, launch, place, plain)
        program_facts.append(fact)
        access_facts += accesses
        for mutation, _, changed in mutants(program, parameters, launch, plain):
            same = {as_row(a) for a in accesses}
            broken = [
                a for a in changed if (subject, *as_row(a)[1:]) not in same and a.roles not in ("", "weight")
            ]
            planted += [
                (f"{mutation}:{program.level.value}:{subject}", *as_row(a)) for a in broken[:MUTANT_ROWS]
            ]
            if not broken:
                planted.append(
                    (f"{mutation}:{program.level.value}:{subject}", *(None,) * len(ACCESS_COLUMNS))
                )
    missing = record.get("sass_missing")
    return _Read(
        tuple(program_facts),
        tuple(access_facts),
        tuple(planted),
        tuple(resource_row(r, _dynamic_bytes(ptx, launches.get(r.name, Launch()))) for r in resources),
        None if missing is None else str(missing),
    )


def _subjects(programs: tuple[Program, ...]) -> Iterator[tuple[str, Program]]:
    """Short stable names for kernels: their place in their own text."""
    for level in Level:
        own = [p for p in programs if p.level is level]
        yield from ((f"kernel{number}", program) for number, program in enumerate(own))


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


def _placer(pack: Pack) -> Callable[[SourceLine], str]:
    """Repository path of a source line; the bare file name for anything outside the pack."""

    def place(line: SourceLine) -> str:
        path = Path(line.file)
        if path.is_relative_to(pack.root):
            return pack.repository_prefix + path.relative_to(pack.root).as_posix()
        return path.name

    return place


def _control_table(architecture: str) -> SampleTable:
    rows: list[tuple[Scalar, ...]] = []
    for planted in planted_facts(architecture):
        is_right, said = verdict(planted)
        rows.append((planted.name, planted.program.level, planted.expect, said, is_right))
    return SampleTable(name="control", columns=CONTROL_COLUMNS, rows=tuple(rows))
