"""Compile what is missing of the set and read one variant into rows.

The first check of a set compiles and reads all of it in child processes; later checks find their rows in the
cache. Of all variants it is those of the check's op, so that `--full --only OP` costs no more than the op.
"""

import time

from harness.domain.check import Check, Samples, SampleTable
from harness.domain.pack import KernelVariant
from harness.domain.record import Scalar
from harness.domain.stage import StageContext
from harness.stages.audit.artifacts import Compiled, compile_missing, find_compiled, one_at_a_time
from harness.stages.audit.launches import planted_launches
from harness.stages.audit.planning import chosen_variants
from harness.stages.audit.planted import planted_facts, verdict
from harness.stages.audit.planted_costs import planted_costs
from harness.stages.audit.reading import Place, is_kept, kept_tables, read_all

__all__ = ["sample"]

CONTROL_COLUMNS = ("name", "level", "expected", "observed", "is_right")


def sample(check: Check, context: StageContext) -> Samples:
    """Compile what is missing of the set and read this check's variant."""
    begun = time.monotonic()
    name = check.parameter("variant")
    tables: tuple[SampleTable, ...] = ()
    if name is not None and check.cell is not None:
        architecture = check.cell.arch
        variant = next(v for v in context.pack.variants() if v.name == name)
        compiled = _compiled(context, variant, architecture, is_full=check.parameter("set") == "full")
        tables = (*kept_tables(compiled, variant, _place(context)), _control_table(architecture))
    return Samples(check=check.id, tier=context.tier, tables=tables, duration_s=time.monotonic() - begun)


def _compiled(context: StageContext, variant: KernelVariant, architecture: str, *, is_full: bool) -> Compiled:
    """The variant's files; compiles and reads its set where this one is missing or was not read."""
    found = find_compiled(context, variant, architecture)
    if found is not None and is_kept(found, variant, _place(context)):
        return found
    named = [a.arch for a in context.claim.envelope.architectures if a.arch != "cpu"]
    variants = context.pack.variants()
    own = tuple(v for v in variants if v.op == variant.op) if is_full else variants
    chosen = chosen_variants(own, is_full)
    errors = compile_missing(context, [(v, a) for a in named for v in chosen if a in v.architectures])
    found = find_compiled(context, variant, architecture)
    context.progress("reading compiled kernels")
    entries = [(find_compiled(context, v, a), v) for a in named for v in chosen if a in v.architectures]
    with one_at_a_time(context.cache / "audit" / "reading"):  # else two lanes would read the same twice
        read_all([(c, v) for c, v in entries if c is not None], _place(context))
    return found or Compiled(
        None, variant.name, errors.get((variant.name, architecture), "it was not compiled")
    )


def _place(context: StageContext) -> Place:
    return Place(context.pack.root, context.pack.repository_prefix)


def _control_table(architecture: str) -> SampleTable:
    rows: list[tuple[Scalar, ...]] = []
    for planted in planted_facts(architecture):
        is_right, said = verdict(planted)
        rows.append((planted.name, planted.program.level, planted.expect, said, is_right))
    rows += [*planted_launches(), *planted_costs(architecture)]
    return SampleTable(name="control", columns=CONTROL_COLUMNS, rows=tuple(rows))
