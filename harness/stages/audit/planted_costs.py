"""The control of the rules over costs: kernels that cost more than their limit by one, and twins that do not.

They are rows as the reader makes them, and go through the same sums and the same comparison as real ones.
"""

from dataclasses import replace
from typing import Any, NamedTuple

from harness.domain.check import Samples, SampleTable
from harness.domain.machine import Tier
from harness.domain.record import Scalar
from harness.stages.audit.cost import RESOURCE_COLUMNS, costs
from harness.stages.audit.facts import AccessFact, ProgramFact
from harness.stages.audit.planted import planted_facts
from harness.stages.audit.rules import program_findings

__all__ = ["planted_costs"]


class _Case(NamedTuple):
    rule: str
    fault: dict[str, int]
    """What of the sound kernel is different; the limit is what the sound one costs."""
    name: str = ""
    """Of the case, where it is not the rule's."""
    array_bytes: int = 0
    """Of an array that a second kernel beside it declares, none without one."""


CASES = (
    _Case("registers", {"registers": 65}),
    _Case("shared_memory", {"dynamic_shared_bytes": 16384 + 1}),
    _Case("spill", {"frame_bytes": 4}),
    _Case("spill", {"frame_bytes": 4}, "spill_beside_an_array", 64),
    _Case("cluster", {"cluster_blocks": 8}),
    _Case("block_size", {"threads": 1056}),
    _Case("multicast", {"multicast": 1}),
    _Case("wide_loads", {"width_bytes": 8}),
)
LIMITS = {
    "registers": 64, "shared_memory": 16384 + 1024, "spill": 0, "cluster": 7, "block_size": 1024,
    "multicast": 0, "wide_loads": 100,
}  # fmt: skip
RESOURCES: dict[str, Scalar] = {
    "registers": 64, "frame_bytes": 0, "shared_bytes": 1024, "dynamic_shared_bytes": 16384,
    "named_barriers": 1, "mbarriers": 0, "threads": 1024,
}  # fmt: skip


def planted_costs(architecture: str) -> tuple[tuple[Scalar, ...], ...]:
    """Every case as rows of the control's table."""
    rows: list[tuple[Scalar, ...]] = []
    for case in CASES:
        for name, changes, expected in (("fault", case.fault, case.rule), ("fixed", {}, "clean")):
            said = _said(architecture, changes, case.array_bytes)
            rows.append((f"costly_{case.name or case.rule}.{name}", "cost", expected, said, said == expected))
    return tuple(rows)


def _said(architecture: str, changes: dict[str, Any], array_bytes: int) -> str:
    program, accesses = _sound(architecture)
    own = {name: value for name, value in changes.items() if name in program.__slots__}
    program = replace(program, **own)
    widths = {name: value for name, value in changes.items() if name == "width_bytes"}
    accesses = tuple(replace(access, **widths) for access in accesses)
    resources = {**RESOURCES, **{n: v for n, v in changes.items() if n in RESOURCE_COLUMNS}}
    kernels, programs = [resources], [program]
    if array_bytes:
        kernels.append({**RESOURCES, "frame_bytes": array_bytes})
        programs.append(replace(program, subject="kernel1", local_bytes=array_bytes))
    rows = tuple(tuple(kernel[name] for name in RESOURCE_COLUMNS) for kernel in kernels)
    table = SampleTable(name="resources", columns=RESOURCE_COLUMNS, rows=rows)
    samples = Samples(check="audit/planted/costs", tier=Tier.SMOKE, tables=(table,), duration_s=0.0)
    both = tuple(replace(p, level=level) for p in programs for level in ("ptx", "sass"))
    found = program_findings(costs(samples, both, accesses), LIMITS)
    return ", ".join(f.rule for f in found) or "clean"


def _sound(architecture: str) -> tuple[ProgramFact, tuple[AccessFact, ...]]:
    """A planted kernel without a fault, launched as large as it may be."""
    sound = next(p for p in planted_facts(architecture) if p.name == f"hoisted_load.fixed.{architecture}")
    program = replace(sound.program, subject="kernel0", cluster_blocks=7, threads=1024, local_accesses=2)
    return program, sound.accesses
