"""Compile what is missing of the plan's kernels and read one of them into rows.

The first check of a plan compiles and reads the kernels of all its audits in child processes; later checks
find their rows in the cache. That work, and waiting for whoever does it, is marked as shared.
"""

import time
from collections.abc import Mapping
from typing import NamedTuple

from harness.domain.check import Check, Samples, SampleTable, StageName
from harness.domain.pack import KernelVariant
from harness.domain.record import Scalar
from harness.domain.stage import StageContext
from harness.executors.marks import SHARED, stretch
from harness.stages.audit.artifacts import Compiled, compile_missing, find_compiled, one_at_a_time
from harness.stages.audit.launches import planted_launches
from harness.stages.audit.limits import base_files, base_limits, lost_limits
from harness.stages.audit.planted import planted_facts, verdict
from harness.stages.audit.planted_costs import planted_costs
from harness.stages.audit.reading import Place, is_kept, kept_tables, read_all

__all__ = ["sample"]

CONTROL_COLUMNS = ("name", "level", "expected", "observed", "is_right")


class _Wanted(NamedTuple):
    """One variant for one architecture."""

    variant: KernelVariant
    architecture: str


def sample(check: Check, context: StageContext) -> Samples:
    """Compile what is missing of the plan and read this check's variant."""
    begun = time.monotonic()
    tables: tuple[SampleTable, ...] = ()
    wanted = _wanted(check, _variants(context))
    if wanted is not None:
        compiled = _compiled(context, wanted)
        tables = (
            *kept_tables(compiled, wanted.variant, _place(context)),
            *_limits_table(context, wanted),
            _control_table(wanted.architecture),
        )
    return Samples(check=check.id, tier=context.tier, tables=tables, duration_s=time.monotonic() - begun)


def _variants(context: StageContext) -> Mapping[str, KernelVariant]:
    return {variant.name: variant for variant in context.pack.variants()}


def _wanted(check: Check, variants: Mapping[str, KernelVariant]) -> _Wanted | None:
    """What a check needs compiled; None where it is no audit of a kernel of this pack."""
    name = check.parameter("variant") if check.stage is StageName.AUDIT else None
    variant = variants.get(str(name))
    if variant is None or check.cell is None or check.unavailable is not None:
        return None
    return _Wanted(variant, check.cell.arch)


def _compiled(context: StageContext, own: _Wanted) -> Compiled:
    """The variant's files; compiles and reads the plan's kernels where this one is missing or was not
    read.
    """
    found = find_compiled(context, *own)
    if found is not None and is_kept(found, own.variant, _place(context)):
        return found
    variants = _variants(context)
    planned = (_wanted(check, variants) for check in context.checks)
    others = [wanted for wanted in planned if wanted is not None and wanted != own]
    with stretch(context.mark, SHARED):
        errors = compile_missing(context, own, others)
        context.progress("reading compiled kernels")
        entries = [(c, w.variant) for w in (own, *others) if (c := find_compiled(context, *w)) is not None]
        with one_at_a_time(context.cache / "audit" / "reading"):  # else two lanes would read the same twice
            read_all(entries, _place(context))
    return find_compiled(context, *own) or Compiled(
        None, own.variant.name, errors.get((own.variant.name, own.architecture), "it was not compiled")
    )


def _place(context: StageContext) -> Place:
    return Place(context.pack.root, context.pack.repository_prefix)


def _limits_table(context: StageContext, wanted: _Wanted) -> tuple[SampleTable, ...]:
    """What the base held the kernel to, and what limits are lost with a new one; nothing where no repository
    is there, or neither side has a file of limits.
    """
    file, proof = wanted.variant.limits_file, context.policy.proof(StageName.AUDIT)
    if context.tree is None:
        return ()
    prefix = context.pack.repository_prefix
    files = base_files(context.tree, prefix, file)  # type: ignore[arg-type]  # a protocol says no hash
    if not files and not file:
        return ()
    here = context.pack.root / file.removeprefix(prefix)
    head = here.read_bytes() if here.is_file() else None
    fixed = [name for name, _ in proof.thresholds] if proof else []
    held = base_limits(files, head, wanted.variant.name, wanted.architecture, fixed)
    lost = lost_limits(files, wanted.variant, context.pack.variants(), wanted.architecture, fixed)
    return (held,) if lost is None else (held, lost)


def _control_table(architecture: str) -> SampleTable:
    rows: list[tuple[Scalar, ...]] = []
    for planted in planted_facts(architecture):
        is_right, said = verdict(planted)
        rows.append((planted.name, planted.program.level, planted.expect, said, is_right))
    rows += [*planted_launches(), *planted_costs(architecture)]
    return SampleTable(name="control", columns=CONTROL_COLUMNS, rows=tuple(rows))
