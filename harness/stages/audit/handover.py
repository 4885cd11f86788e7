"""What stands between an access and memory that others write while the kernel runs: was their flag read, and
was that read an acquire.

A forward dataflow over the control-flow graph: at each instruction the set of what may have happened on the
paths to it, of which the weakest counts. Reading a flag strongly is `polled`; an acquiring read, or a polled
flag and then a fence, is `acquired`. At a barrier of the block, threads that arrive without having acquired
take over from those that have: `handed_over`. It cannot tell a branch that only some threads take from one
that whole blocks take, so a block that skips the flag altogether looks like threads that wait for others.
One flag counts for all mailboxes of a kernel.
"""

from collections.abc import Mapping
from enum import IntEnum

from harness.stages.audit.program import AccessKind, Instruction, Order, Program, blocks_of

__all__ = ["Guard", "guards"]

ACQUIRING = frozenset({Order.ACQUIRE, Order.ACQ_REL})


class Guard(IntEnum):
    """How far a path has come before it may read what others wrote; more is stronger."""

    NONE = 0
    POLLED = 1
    HANDED_OVER = 2
    ACQUIRED = 3


State = frozenset[Guard]


def guards(program: Program, is_flag: Mapping[int, bool]) -> dict[int, Guard]:
    """The weakest guard on any path to each access.

    `is_flag` says of each access, by instruction index, whether its address may be a flag's or a mailbox's.
    """
    if not any(is_flag.values()):
        return dict.fromkeys((i for i, code in enumerate(program.instructions) if code.access), Guard.NONE)
    blocks = blocks_of(program)
    by_leader = {block.start: number for number, block in enumerate(blocks)}
    entering: dict[int, State] = {0: frozenset({Guard.NONE})} if blocks else {}
    todo = [0] if blocks else []
    while todo:
        number = todo.pop()
        state = entering[number]
        for index in blocks[number]:
            state = _after(program.instructions[index], is_flag.get(index, False), state)
        for target in program.instructions[blocks[number][-1]].follows:
            if target not in by_leader:
                continue
            following = by_leader[target]
            joined = entering.get(following, frozenset()) | state
            if joined != entering.get(following):
                entering[following] = joined
                todo.append(following)
    found: dict[int, Guard] = {}
    for number, block in enumerate(blocks):
        state = entering.get(number, frozenset({Guard.NONE}))
        for index in block:
            instruction = program.instructions[index]
            if instruction.access is not None:
                found[index] = min(state)
            state = _after(instruction, is_flag.get(index, False), state)
    return found


def _after(instruction: Instruction, is_flag: bool, state: State) -> State:
    if instruction.is_block_barrier and max(state) >= Guard.HANDED_OVER:
        return frozenset(max(g, Guard.HANDED_OVER) for g in state)
    if instruction.is_acquire_fence:
        return frozenset(Guard.ACQUIRED if g is Guard.POLLED else g for g in state)
    access = instruction.access
    if access is None or not is_flag or instruction.is_predicated:
        return state
    if access.kind not in (AccessKind.LOAD, AccessKind.ATOMIC) or not access.is_wide_scope:
        return state
    if access.order in ACQUIRING:
        return frozenset({Guard.ACQUIRED})
    if access.order is Order.RELAXED:
        return frozenset(max(g, Guard.POLLED) for g in state)
    return state
