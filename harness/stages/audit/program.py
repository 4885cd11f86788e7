"""One compiled kernel as the rules see it, whatever text it was read from: instructions, edges, accesses to
memory.

PTX and SASS are parsed into the same records, so that one tracer and one set of rules serve both. Invariant:
an instruction whose effect on addresses is not known is opaque: what it writes counts as loaded from memory,
never as a known pointer.
"""

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

__all__ = [
    "Access",
    "AccessKind",
    "Instruction",
    "Level",
    "Order",
    "Origin",
    "OriginKind",
    "Program",
    "Slot",
    "SourceLine",
    "blocks_of",
    "in_cycles",
    "loops_of",
    "reached_without_wait",
]


class Level(StrEnum):
    """What text a program was read from."""

    PTX = "ptx"
    SASS = "sass"


class AccessKind(StrEnum):
    """What an access does to global memory."""

    LOAD = "load"
    STORE = "store"
    ATOMIC = "atomic"
    PREFETCH = "prefetch"


class Order(StrEnum):
    """How an access is ordered with others (PTX ISA 8.8, "Memory Consistency Model").

    SASS does not tell an acquire from a relaxed load: there both are `relaxed`, and the acquiring part is an
    instruction of its own.
    """

    WEAK = "weak"
    RELAXED = "relaxed"
    """Relaxed, volatile or mmio: the compiler may neither drop, repeat nor merge it."""
    ACQUIRE = "acquire"
    RELEASE = "release"
    ACQ_REL = "acq_rel"


class OriginKind(StrEnum):
    """Where an address may come from."""

    POINTER = "pointer"
    """The pointer that a kernel parameter holds."""
    DESCRIPTOR = "descriptor"
    """The address of a kernel parameter itself: a tensor map handed by value."""
    LOADED = "loaded"
    """A value that was read from memory or made in a way that is not traced."""
    PARAMETER_SPACE = "parameter_space"
    """The address of a byte of the parameter space; `parameter` is its offset until it is resolved to a
    descriptor.
    """
    ON_CHIP = "on_chip"
    """Shared or local memory."""
    NUMBER = "number"
    """A plain number that the kernel was handed, such as a stride (PTX only)."""
    PRODUCT = "product"
    """No address: a 32-bit multiple of a number that was read from memory; `parameter` is the factor, 0 for
    one that was handed over (PTX only).
    """


class Origin(NamedTuple):
    """One source of an address; `parameter` is the ordinal, -1 where there is none."""

    kind: OriginKind
    parameter: int = -1


class SourceLine(NamedTuple):
    """Place in the kernel's Python source, as the compiler noted it."""

    file: str
    line: int


class Slot(NamedTuple):
    """One kernel parameter in the constant bank or the parameter space."""

    ordinal: int
    offset: int
    size_bytes: int
    is_record: bool = True
    """Whether it is a record, as tensors and tensor maps are; False for a plain number or pointer (PTX
    tells).
    """

    @property
    def may_hold_pointer(self) -> bool:
        """Whether it is wide enough for an address: a tensor's record, a pointer or a tensor map."""
        return self.size_bytes >= 8


@dataclass(frozen=True, slots=True)
class Access:
    """One access to global memory. `address` names the registers that its address is made of."""

    kind: AccessKind
    address: tuple[str, ...]
    width_bytes: int | None
    """Bytes a thread moves; None for copies whose size is a register."""
    is_non_coherent: bool = False
    is_generic: bool = False
    """Whether the text does not say that the space is global."""
    order: Order = Order.WEAK
    is_wide_scope: bool = False
    """Whether a strong access is ordered for the whole GPU or system, not only within a block or cluster."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction. Edges go by index into the program."""

    text: str
    opcode: str
    line: SourceLine | None
    guard: str = ""
    """The predicate under which it runs, such as `P1` or `!P1`; empty: always."""
    sets: tuple[str, ...] = ()
    """Predicates that it may write; `PR` for all (SASS only: in PTX they are among what it writes)."""
    writes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    seeds: tuple[tuple[str, frozenset[Origin]], ...] = ()
    """Origins that a written register gets from the parameter space."""
    adds: int | None = None
    """The number that a result exceeds its source by, where the instruction does nothing else to it."""
    is_opaque: bool = False
    is_wait: bool = False
    """Waits for the grids that this launch depends on."""
    is_acquire_fence: bool = False
    """Orders what follows after what was read before, for the whole GPU or system."""
    is_block_barrier: bool = False
    """Threads of a block meet here."""
    factor: int | None = None
    """Its result is a 32-bit multiple of what it reads, by this much; 0 where the factor is a register."""
    is_bounded: bool = False
    """Its result is small whatever it reads: a minimum, remainder or mask by a small constant."""
    is_masked: bool = False
    """Its result has some low bits of what it reads, which are right where a product was too large."""
    access: Access | None = None
    follows: tuple[int, ...] = ()

    @property
    def is_predicated(self) -> bool:
        """Whether some threads may pass over it."""
        return bool(self.guard)


@dataclass(frozen=True, slots=True)
class Program:
    """One kernel at one level."""

    name: str
    level: Level
    slots: tuple[Slot, ...]
    instructions: tuple[Instruction, ...]
    symbols: dict[str, frozenset[Origin]] = field(default_factory=dict)
    """Names that stand for an address: parameters, shared and local variables."""
    local_bytes: int = 0
    """Local memory that the source itself asks for (PTX only)."""
    unresolved: tuple[str, ...] = ()
    """Instructions whose successors could not be told: indirect branches, calls of other functions."""

    def has_wait(self) -> bool:
        """Whether any instruction waits for preceding grids."""
        return any(i.is_wait for i in self.instructions)


def reached_without_wait(program: Program) -> frozenset[int]:
    """Indices of instructions that some path from the entry reaches before any wait that surely executes."""
    if not program.instructions:
        return frozenset()
    seen: set[int] = set()
    todo = [0]
    while todo:
        index = todo.pop()
        if index in seen or index >= len(program.instructions):
            continue
        seen.add(index)
        instruction = program.instructions[index]
        if not (instruction.is_wait and not instruction.is_predicated):
            todo += instruction.follows
    return frozenset(seen)


def blocks_of(program: Program) -> tuple[range, ...]:
    """Basic blocks in text order: only the last instruction of each may branch, only the first be branched
    to.
    """
    count = len(program.instructions)
    leaders = {0} if count else set()
    for index, instruction in enumerate(program.instructions):
        if instruction.follows != (index + 1,):
            leaders.update(f for f in instruction.follows if f < count)
            leaders.add(index + 1)
    edges = sorted(leader for leader in leaders if leader < count)
    return tuple(range(a, b) for a, b in zip(edges, [*edges[1:], count], strict=True))


def loops_of(program: Program) -> tuple[range, ...]:
    """Stretches of instructions between a branch back and where it goes, in text order."""
    return tuple(
        range(target, index + 1)
        for index, instruction in enumerate(program.instructions)
        for target in instruction.follows
        if target <= index
    )


def in_cycles(program: Program) -> frozenset[int]:
    """Indices of instructions that may run again after themselves."""
    # Here, as planning and workers load this module too, and workers have no scipy.
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    count = len(program.instructions)
    edges = [(i, f) for i, code in enumerate(program.instructions) for f in code.follows if f < count]
    if not edges:
        return frozenset()
    sources, targets = zip(*edges, strict=True)
    graph = coo_array(([1] * len(edges), (sources, targets)), shape=(count, count))
    _, part_of = connected_components(graph, connection="strong")
    sizes = Counter(part_of.tolist())
    itself = {i for i, f in edges if i == f}
    return frozenset(i for i, part in enumerate(part_of.tolist()) if sizes[part] > 1 or i in itself)
