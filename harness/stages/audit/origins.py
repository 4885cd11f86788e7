"""Trace every address back to the kernel parameters that it may come from.

A forward dataflow over the control-flow graph: each register holds the set of origins of any value it may
have there. An empty set is a plain number. Sets are joined where paths meet, and a predicated write keeps
what was there, so the answer is an upper bound: an origin may be listed that cannot occur, none that can
occur is missing, as far as the arithmetic of addresses goes through registers. A pointer that went through
memory counts as loaded. What was written under a predicate is also known by itself, for instructions under
the same predicate, until that may have changed: compilers merge short branches that way.
"""

from collections import defaultdict
from collections.abc import Mapping
from heapq import heappop, heappush
from typing import NamedTuple

from harness.stages.audit.program import Instruction, Origin, OriginKind, Program, blocks_of

__all__ = ["trace_addresses"]

State = dict[str, frozenset[Origin]]
LOADED = frozenset({Origin(OriginKind.LOADED)})
NONE: frozenset[Origin] = frozenset()
MAX_FACTOR = 2**31
MAX_PARAMETER_BYTES = 32764
"""Most bytes of parameters that a kernel can have (CUDA 12.1 and later)."""


class _Guarded(NamedTuple):
    """Names in a state of what registers hold under a predicate, such as `P1 R46`."""

    of_register: Mapping[str, tuple[str, ...]]
    of_predicate: Mapping[str, tuple[str, ...]]


def trace_addresses(program: Program) -> dict[int, frozenset[Origin]]:
    """Origins of the address of each access, by instruction index; unreachable accesses come from nowhere and
    are opaque.
    """
    blocks, guarded = blocks_of(program), _guarded(program)
    by_leader = {block.start: number for number, block in enumerate(blocks)}
    entering: dict[int, State] = {0: dict(program.symbols)} if blocks else {}
    # In text order, nearly that of execution: a block waits until most of what leads to it is known.
    todo = [0] if blocks else []
    while todo:
        number = heappop(todo)
        if todo and todo[0] == number:
            continue  # queued twice
        state = dict(entering[number])
        block = blocks[number]
        for index in block:
            _step(program.instructions[index], state, guarded)
        for target in program.instructions[block[-1]].follows:
            if target in by_leader and _join(entering, by_leader[target], state):
                heappush(todo, by_leader[target])
    traced: dict[int, frozenset[Origin]] = {}
    for number, block in enumerate(blocks):
        state = dict(entering.get(number, {}))
        for index in block:
            instruction = program.instructions[index]
            if instruction.access is not None:
                reached = number in entering
                found = _origins(instruction.access.address, state, instruction.guard) if reached else LOADED
                traced[index] = frozenset(_resolved(origin, program) for origin in found)
            _step(instruction, state, guarded)
    return traced


def _guarded(program: Program) -> _Guarded:
    """Every name that the program's predicated writes may need."""
    of_register: defaultdict[str, dict[str, None]] = defaultdict(dict)
    of_predicate: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for instruction in program.instructions:
        if instruction.guard:
            for register in instruction.writes:
                name = f"{instruction.guard} {register}"
                of_register[register][name] = None
                for predicate in (instruction.guard.lstrip("!"), "PR"):
                    of_predicate[predicate][name] = None
    return _Guarded(
        {k: tuple(v) for k, v in of_register.items()}, {k: tuple(v) for k, v in of_predicate.items()}
    )


def _step(instruction: Instruction, state: State, guarded: _Guarded) -> None:
    """The effect of one instruction on the origins of registers."""
    if instruction.writes:
        _write(instruction, state, guarded)
    for predicate in (*instruction.sets, *instruction.writes):
        for name in guarded.of_predicate.get(predicate, ()):
            state.pop(name, None)


def _write(instruction: Instruction, state: State, guarded: _Guarded) -> None:
    guard = instruction.guard
    value = LOADED
    if not instruction.is_opaque:
        value = _moved(_origins(instruction.reads, state, guard), instruction.adds)
    if instruction.is_bounded:
        value = frozenset(o for o in value if o.kind not in (OriginKind.LOADED, OriginKind.PRODUCT))
    elif instruction.is_masked:
        value = frozenset(o for o in value if o.kind is not OriginKind.PRODUCT)
    elif instruction.factor is not None and LOADED & value:
        value = _multiplied(value, instruction, state)
    seeds = dict(instruction.seeds)
    for register in instruction.writes:
        new = seeds.get(register, NONE) | value
        opposite = guard.removeprefix("!") if guard.startswith("!") else f"!{guard}"
        for name in guarded.of_register.get(register, ()):
            if not guard or name != f"{opposite} {register}":
                state.pop(name, None)
        if guard:
            state[f"{guard} {register}"] = new
            new = new | state.get(register, NONE)
        if new:
            state[register] = new
        else:
            state.pop(register, None)


def _moved(origins: frozenset[Origin], adds: int | None) -> frozenset[Origin]:
    """Origins after arithmetic: only a known sum keeps its place in the parameter space."""
    if not any(o.kind is OriginKind.PARAMETER_SPACE for o in origins):
        return origins
    return frozenset(
        o
        if o.kind is not OriginKind.PARAMETER_SPACE
        else Origin(OriginKind.LOADED)
        if adds is None or not 0 <= o.parameter + adds <= MAX_PARAMETER_BYTES
        else Origin(OriginKind.PARAMETER_SPACE, o.parameter + adds)
        for o in origins
    )


def _multiplied(value: frozenset[Origin], instruction: Instruction, state: State) -> frozenset[Origin]:
    """Origins of a 32-bit multiple of a number from memory. Constants that multiply one after another were
    made one by the compiler, so the largest alone counts.
    """
    factor = instruction.factor or 0
    if not factor:
        sides = [state.get(r, NONE) for r in instruction.reads[:2]]
        handed = [any(o.kind is OriginKind.NUMBER for o in s) and not LOADED & s for s in sides]
        read = [bool(LOADED & s) for s in sides]
        if not (len(sides) == 2 and ((read[0] and handed[1]) or (read[1] and handed[0]))):
            return value  # of two computed numbers; what bounds them is not in the text
    known = [o.parameter for o in value if o.kind is OriginKind.PRODUCT]
    total = 0 if not factor or 0 in known else min(max(factor, *known), MAX_FACTOR) if known else factor
    rest = frozenset(o for o in value if o.kind is not OriginKind.PRODUCT)
    return rest | {Origin(OriginKind.PRODUCT, total)}


def _resolved(origin: Origin, program: Program) -> Origin:
    """An address in the parameter space as the parameter that lies there."""
    if origin.kind is not OriginKind.PARAMETER_SPACE:
        return origin
    for slot in program.slots:
        if slot.offset <= origin.parameter < slot.offset + slot.size_bytes:
            return Origin(OriginKind.DESCRIPTOR, slot.ordinal)
    return Origin(OriginKind.LOADED)


def _origins(registers: tuple[str, ...], state: State, guard: str) -> frozenset[Origin]:
    found = NONE
    for register in registers:
        held = state.get(f"{guard} {register}") if guard else None
        found = found | (state.get(register, NONE) if held is None else held)
    return found


def _join(entering: dict[int, State], number: int, state: State) -> bool:
    """Merge a state into a block's entry; whether that changed it."""
    if number not in entering:
        entering[number] = dict(state)
        return True
    known = entering[number]
    changed = False
    for name in [n for n in known if " " in n and n not in state]:
        del known[name]  # not known by itself on one of the paths
        changed = True
    for register, origins in state.items():
        if " " in register and register not in known:
            continue
        before = known.get(register, NONE)
        if origins is not before and not origins <= before:
            known[register] = before | origins
            changed = True
    return changed
