"""What was read in a kernel, as rows: one for each program, one for each access. Rules judge these rows and
nothing else.

Rows travel in samples, so they hold no host paths and no code, only opcodes. An access whose address cannot
be traced to a parameter has no role; it is counted, never dropped.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import NamedTuple

from harness.domain.record import Scalar
from harness.stages.audit.handover import Guard, guards
from harness.stages.audit.origins import trace_addresses
from harness.stages.audit.program import (
    Instruction,
    Level,
    Order,
    Origin,
    OriginKind,
    Program,
    SourceLine,
    in_cycles,
    loops_of,
    reached_without_wait,
)

__all__ = [
    "ACCESS_COLUMNS",
    "EXCHANGED",
    "PROGRAM_COLUMNS",
    "AccessFact",
    "Flow",
    "Launch",
    "Parameter",
    "ProgramFact",
    "as_row",
    "read_accesses",
    "read_facts",
    "read_flow",
]

TENSOR_CORE = (
    "mma",
    "wgmma",
    "tcgen05",
    "HMMA",
    "IMMA",
    "QMMA",
    "OMMA",
    "DMMA",
    "HGMMA",
    "IGMMA",
    "QGMMA",
    "UTCHMMA",
    "UTCIMMA",
    "UTCQMMA",
    "UTCOMMA",
    "UTCMMA",
)
LOCAL_MEMORY = ("STL", "LDL")
EXCHANGED = frozenset({"mailbox", "flag"})
"""Roles of memory that other ranks or blocks write while this kernel runs."""
MULTICAST = ("multicast", "multimem", "MULTICAST", "LDGMC", "REDGMC")


class Parameter(NamedTuple):
    """A kernel's tensor parameter as its author declared it."""

    name: str
    role: str


class Flow(NamedTuple):
    """What a program's planted changes leave as it is."""

    traced: Mapping[int, frozenset[Origin]]
    repeated: frozenset[int]


@dataclass(frozen=True, slots=True)
class Launch:
    """How the host launches a kernel; None where it is not known."""

    is_dependent: bool | None = None
    cluster_blocks: int = 1
    threads: int | None = None
    dynamic_shared_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class AccessFact:
    """One access to global memory."""

    subject: str
    """The kernel, or the planted kernel's name."""
    level: str
    kind: str
    opcode: str
    roles: str
    """Roles of the parameters that the address may come from, joined by `+`; empty: unclassed."""
    parameters: str
    is_before_wait: bool
    is_non_coherent: bool
    order: str
    """`weak`, `relaxed`, `acquire`, `release` or `acq_rel`; strong only where it is so for the whole GPU."""
    guard: str
    """What every path to it has done before: `none`, `polled`, `handed_over` or `acquired`."""
    is_repeated: bool
    """Whether it stands in a loop."""
    narrow_factor: int | None
    """Factor of the largest 32-bit multiple of a number read from memory in its address, 0 where the kernel
    was handed the factor; None for no such multiple (and at SASS level, where 64-bit products are made of
    32-bit ones).
    """
    width_bytes: int | None
    path: str
    line: int | None


class _Place(NamedTuple):
    """What the flow of control says of an access."""

    is_before_wait: bool
    guard: Guard
    is_repeated: bool
    narrow_factor: int | None


@dataclass(frozen=True, slots=True)
class ProgramFact:
    """One kernel at one level."""

    subject: str
    level: str
    instructions: int
    is_dependent: bool | None
    has_wait: bool
    has_matched_roles: bool
    """Whether declared parameters and the kernel's could be put side by side."""
    unresolved: int
    """Branches and calls whose targets are not known."""
    tensor_core: int
    matrix_opcode: str | None
    """The most frequent of them; None where there is none."""
    loop_instructions: int
    """Of the main loop: the shortest of those with most matrix instructions, or else most accesses; 0 where
    there is no loop.
    """
    loop_tensor_core: int
    loop_accesses: int
    local_accesses: int
    multicast: int
    local_bytes: int
    cluster_blocks: int
    threads: int | None


class _Loop(NamedTuple):
    """What a loop holds."""

    tensor_core: int
    accesses: int
    instructions: int

    def rank(self) -> tuple[int, int, int]:
        """Greatest for the main loop: most matrix instructions, without any most accesses; the shortest."""
        return self.tensor_core, 0 if self.tensor_core else self.accesses, -self.instructions


ACCESS_COLUMNS = tuple(f.name for f in fields(AccessFact))
PROGRAM_COLUMNS = tuple(f.name for f in fields(ProgramFact))


def read_facts(
    program: Program,
    subject: str,
    parameters: Sequence[Parameter],
    launch: Launch,
    place: Callable[[SourceLine], str],
    numbers: frozenset[int] = frozenset(),
    flow: Flow | None = None,
) -> tuple[ProgramFact, tuple[AccessFact, ...]]:
    """Everything the rules need of one program.

    `place` gives the repository path of a source line; `numbers` are ordinals of 8-byte parameters that are
    no tensors; `flow` is what `read_flow` gave for the same arithmetic and branches.
    """
    is_matched = _match_parameters(program, parameters, numbers) is not None
    accesses = read_accesses(program, subject, parameters, place, numbers, flow or read_flow(program))
    return _program_fact(program, subject, is_matched, launch), accesses


def read_accesses(
    program: Program,
    subject: str,
    parameters: Sequence[Parameter],
    place: Callable[[SourceLine], str],
    numbers: frozenset[int],
    flow: Flow,
) -> tuple[AccessFact, ...]:
    """The accesses alone; arguments as of `read_facts`."""
    matched = _match_parameters(program, parameters, numbers)
    classed = {index: _classed(origins, matched or {}, numbers) for index, origins in flow.traced.items()}
    exchanged = {
        index: any(p.role in EXCHANGED for p in found)
        for index, found in classed.items()
        if found is not None
    }
    early, guarded = reached_without_wait(program), guards(program, exchanged)
    return tuple(
        _access_fact(
            program.instructions[index],
            program.level,
            subject,
            found,
            _Place(
                is_before_wait=index in early,
                guard=guarded[index],
                is_repeated=index in flow.repeated,
                narrow_factor=_narrow_factor(flow.traced[index]),
            ),
            place,
        )
        for index, found in sorted(classed.items())
        if found is not None
    )


def read_flow(program: Program) -> Flow:
    """What follows from a program's arithmetic of addresses and its branches alone."""
    return Flow(trace_addresses(program), in_cycles(program))


def as_row(fact: AccessFact | ProgramFact) -> tuple[Scalar, ...]:
    """The fact as a row of its sample table."""
    return tuple(getattr(fact, f.name) for f in fields(fact))


def _match_parameters(
    program: Program, parameters: Sequence[Parameter], numbers: frozenset[int]
) -> dict[int, Parameter] | None:
    """Declared tensors by ordinal: the parameters that may hold an address, in order; None when counts
    differ.
    """
    wide = [s.ordinal for s in program.slots if s.may_hold_pointer and s.ordinal not in numbers]
    return dict(zip(wide, parameters, strict=True)) if len(wide) == len(parameters) else None


def _classed(
    origins: frozenset[Origin], matched: dict[int, Parameter], numbers: frozenset[int]
) -> list[Parameter] | None:
    """Parameters that an address may come from: empty where one of them is not known, None for memory on the
    chip.
    """
    named = {o.parameter for o in origins if o.kind in (OriginKind.POINTER, OriginKind.DESCRIPTOR)}
    ordinals = sorted(named - numbers)
    if not ordinals and any(o.kind is OriginKind.ON_CHIP for o in origins):
        return None
    found = [matched[o] for o in ordinals if o in matched]
    return found if len(found) == len(ordinals) else []


def _narrow_factor(origins: frozenset[Origin]) -> int | None:
    factors = [o.parameter for o in origins if o.kind is OriginKind.PRODUCT]
    return None if not factors else 0 if 0 in factors else max(factors)


def _access_fact(
    instruction: Instruction,
    level: Level,
    subject: str,
    found: list[Parameter],
    where: _Place,
    place: Callable[[SourceLine], str],
) -> AccessFact:
    access = instruction.access
    if access is None:
        raise AssertionError(f"{instruction.text!r} was traced without an access")
    line = instruction.line
    return AccessFact(
        subject=subject,
        level=level.value,
        kind=access.kind.value,
        opcode=instruction.opcode,
        roles="+".join(sorted({p.role for p in found})),
        parameters="+".join(p.name for p in found),
        is_before_wait=where.is_before_wait,
        is_non_coherent=access.is_non_coherent,
        order=access.order.value if access.is_wide_scope else Order.WEAK.value,
        guard=where.guard.name.lower(),
        is_repeated=where.is_repeated,
        narrow_factor=where.narrow_factor,
        width_bytes=access.width_bytes,
        path="" if line is None else place(line),
        line=None if line is None else line.line,
    )


def _program_fact(program: Program, subject: str, is_matched: bool, launch: Launch) -> ProgramFact:
    families = Counter(i.opcode for i in program.instructions)
    parts = [(opcode.split("."), count) for opcode, count in families.items()]
    matrix = {opcode: n for opcode, n in families.items() if _is_tensor_core(opcode.split("."))}
    loop = _main_loop(program, frozenset(matrix))
    return ProgramFact(
        subject=subject,
        level=program.level.value,
        instructions=len(program.instructions),
        is_dependent=launch.is_dependent,
        has_wait=program.has_wait(),
        has_matched_roles=is_matched,
        unresolved=len(program.unresolved),
        tensor_core=sum(matrix.values()),
        matrix_opcode=max(matrix, key=lambda opcode: matrix[opcode]) if matrix else None,
        loop_instructions=loop.instructions,
        loop_tensor_core=loop.tensor_core,
        loop_accesses=loop.accesses,
        local_accesses=sum(count for words, count in parts if words[0] in LOCAL_MEMORY),
        multicast=sum(count for words, count in parts if any(w.startswith(MULTICAST) for w in words)),
        local_bytes=program.local_bytes,
        cluster_blocks=launch.cluster_blocks,
        threads=launch.threads,
    )


def _main_loop(program: Program, matrix: frozenset[str]) -> _Loop:
    code = program.instructions
    products = list(accumulate((i.opcode in matrix for i in code), initial=0))
    accesses = list(accumulate((i.access is not None for i in code), initial=0))
    loops = [
        _Loop(
            products[loop.stop] - products[loop.start],
            accesses[loop.stop] - accesses[loop.start],
            len(loop),
        )
        for loop in loops_of(program)
    ]
    busy = [loop for loop in loops if loop.tensor_core or loop.accesses]
    return max(busy, key=_Loop.rank, default=_Loop(0, 0, 0))


def _is_tensor_core(parts: list[str]) -> bool:
    """Whether an opcode multiplies matrices; `tcgen05` and `wgmma` also move data and wait, which does not
    count.
    """
    if parts[0] in ("wgmma", "tcgen05"):
        return len(parts) > 1 and parts[1].startswith("mma")
    return parts[0] in TENSOR_CORE
