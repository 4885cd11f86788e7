"""Skinny products `x @ weight.T` that read every weight byte once, straight from device memory into mma
operands.

`row_product` runs it for the ops, which own their outputs and epilogues.

A warp owns `row_tiles` x 8 weight rows and a slice of K, in steps of 32: lane (g, t) = (lane // 4, lane %
4) reads the 16 bytes of row g at K offset 8t of the step, and the same 16 bytes of token g. These are the
B and the A operand of two `m16n8k16` products once K is renumbered (word pairs 0,1 and 2,3 of each lane),
so weights keep their natural row-major layout and pass through no shared memory. Weight loads run `depth`
steps ahead of the products; the first `depth` steps are issued before the wait on the previous kernel,
since weights are constant.

Partial sums meet in a fixed order: within a warp along K, then over the warps of a block, then over the
blocks of a cluster (each block finishes a share of the row pairs and receives the others' sums by
`st.async`). A result therefore depends on the plan alone, not on timing. Tokens and rows past the end
repeat the last one and are never stored.

The steps stand one behind the other in the code. Of a rolled plan most are turns of a loop instead, in the
same order: 132 steps of 64 tokens take the compiler half a minute, and more instructions than a
multiprocessor keeps.
"""

import copy
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from k3_decode.cute import instructions as ins
from k3_decode.cute.row_plan import CARVEOUT, STEP, Place, Plan, Segments, row_addresses

__all__ = ["CARVEOUT", "Stream", "Sums", "keep", "resume", "turn"]

LOOPED_IN_RUNS = 32
"""Most tokens of a loop whose runs of steps are added up apart: of 64 it would spill 192 bytes."""
TOKENS_AHEAD = 2
"""Steps of activations in flight: they come from L2, so one step of weights covers their latency."""

Sums = list[list[tuple[Float32, ...]]]
"""Accumulators by tile of 8 rows and tile of 16 tokens: 4 fp32 of the mma's layout."""


class _Rows(NamedTuple):
    """A warp's weight rows: one address a tile, at the start of its K slice."""

    addresses: list[Int64]
    first_step: Int32
    is_short: Any
    """Int32 1 where the slice lacks the last step; None for even plans."""


class Stream:
    """A warp's products under way: weights and activations in flight, and the sums so far."""

    def __init__(
        self,
        plan: Plan,
        place: Place,
        segments: Segments,
        x: cute.Tensor,
        norm_weight: cute.Tensor | None = None,
        chain: int | None = None,
    ) -> None:
        """Lets the next kernel start at once, then waits for the previous one before the first activation is
        read.

        After every `chain` steps the matrix unit starts from zero again and its sum is added in fp32: the
        unit drops low bits at each addition, which an fp32 output would show (9e-7 of the row over 28 steps,
        2e-7 over 4).
        """
        self.plan, self.chain = plan, chain
        self.period = math.lcm(plan.depth, TOKENS_AHEAD, chain or 1)
        can_loop = plan.is_rolled and (chain is None or plan.tokens <= LOOPED_IN_RUNS)
        room = plan.steps - 1 - max(plan.depth, TOKENS_AHEAD)
        self.turns = max(0, room) // self.period if can_loop else 0
        """Turns of `period` steps that a loop makes; it asks for no step beyond the last but one."""
        self.passed = 0
        """Steps that lie behind the addresses."""
        self.sums, self.squares = _zero_sums(plan), [Float32(0.0)] * plan.halves
        self.totals = _zero_sums(plan) if chain is not None and self.turns else None
        self.rows = _open_rows(plan, place, segments)
        first = Int64(self.rows.first_step) * (STEP * 2) + Int64(place.quad) * 16
        self.norm_at = None if norm_weight is None else ins.byte_address(norm_weight) + first
        if not plan.is_late:
            cute.arch.griddepcontrol_launch_dependents()
        self.ring = [_fetch(plan, self.rows, step, 0) for step in range(min(plan.depth, plan.steps))]
        cute.arch.griddepcontrol_wait()
        self.tokens = _Tokens(plan, place, self.rows, x)

    def run(self, first: int, last: int) -> None:
        """The products of steps `first` to `last`, exclusively, one behind the other."""
        for step in range(first, last):
            self._step(step)

    def addresses(self) -> list[Int64]:
        """Where it reads: the weights' rows, the tokens, and the norm's weight where there is one."""
        norm = [] if self.norm_at is None else [self.norm_at]
        return [*self.rows.addresses, *self.tokens.addresses, *norm]

    def words(self) -> list[Int32]:
        """Everything in flight."""
        return [word for ahead in (self.ring, self.tokens.near) for step in ahead for w in step for word in w]

    def values(self) -> list[Float32]:
        """Everything summed so far; a turn ends with its sums added up, where they are not chained."""
        sums = self.sums if self.totals is None else self.totals
        return [v for row in sums for tile in row for v in tile] + self.squares

    def take(
        self, words: Iterator[Int32], values: Iterator[Float32], addresses: Iterator[Int64], passed: int
    ) -> None:
        """Go on from what is kept; `addresses` lie `passed` steps further on than at the beginning."""
        self.passed = self.tokens.passed = passed
        self.rows = self.tokens.rows = self.rows._replace(
            addresses=[next(addresses) for _ in self.rows.addresses]
        )
        self.tokens.addresses = [next(addresses) for _ in self.tokens.addresses]
        self.norm_at = None if self.norm_at is None else next(addresses)
        plan, near = self.plan, len(self.tokens.near)
        self.ring = [[_next4(words) for _ in range(plan.row_tiles)] for _ in range(plan.depth)]
        self.tokens.near = [[_next4(words) for _ in range(plan.halves)] for _ in range(near)]
        sums = [[_next4(values) for _ in row] for row in self.sums]
        self.sums, self.totals = (sums, None) if self.totals is None else (_zero_sums(plan), sums)
        self.squares = [next(values) for _ in self.squares]

    def finished(self) -> tuple[Sums, list[Float32]]:
        """Products of the warp's slice, and per group of 8 tokens the lane's sum of squares of x (for a
        norm).
        """
        return _add_sums(self.totals, self.sums), self.squares

    def _step(self, step: int) -> None:
        plan = self.plan
        tokens = self.tokens.step(step)
        if self.norm_at is not None:
            back = Int64(0)
            if not plan.is_even and step == plan.steps - 1:
                back = Int64(self.rows.is_short) * (STEP * 2)
            ahead = (step - self.passed) * (STEP * 2)
            norms = _floats_of(ins.load_weight(self.norm_at + ahead - back))
            pairs = zip(tokens, self.squares, strict=True)
            scaled = [_scale_tokens(words, norms, square) for words, square in pairs]
            tokens, self.squares = [words for words, _ in scaled], [square for _, square in scaled]
        is_first = step in (0, self.turns * self.period)
        if self.chain is not None and not is_first and step % self.chain == 0:
            self.totals, self.sums = _add_sums(self.totals, self.sums), _zero_sums(plan)
        _multiply(plan, self.sums, self.ring[step % plan.depth], tokens)
        if step + plan.depth < plan.steps:
            self.ring[step % plan.depth] = _fetch(plan, self.rows, step + plan.depth, self.passed)


Kept = tuple[cute.Tensor, cute.Tensor, cute.Tensor]
"""Registers that hold a stream from one turn of a loop to the next: words, values and addresses."""


def keep(stream: Stream) -> Kept:
    """A stream's state in registers of a loop. The addresses move with it, so that no turn adds to them what
    registers would hold beside them.
    """
    counts = len(stream.words()), len(stream.values()), len(stream.addresses())
    kinds = (Int32, Float32, Int64)
    words, values, places = (cute.make_rmem_tensor((n,), kind) for n, kind in zip(counts, kinds, strict=True))
    _write(stream, (words, values, places))
    return words, values, places


def turn(stream: Stream, kept: Kept) -> None:
    """One turn of a rolled plan's loop, over what is kept."""
    moving = copy.copy(stream)
    moving.tokens = copy.copy(stream.tokens)
    _read(moving, kept, 0)
    moving.run(0, stream.period)
    if moving.totals is not None:
        moving.totals = _add_sums(moving.totals, moving.sums)
    _write(moving, kept, stream.period * STEP * 2)


def resume(stream: Stream, kept: Kept) -> None:
    """Behind the loop: the stream goes on from what is kept."""
    _read(stream, kept, stream.turns * stream.period)


def _read(stream: Stream, kept: Kept, passed: int) -> None:
    words, values, places = kept
    stream.take(
        _elements(words, len(stream.words())),
        _elements(values, len(stream.values())),
        _elements(places, len(stream.addresses())),
        passed,
    )


def _write(stream: Stream, kept: Kept, passed_bytes: int = 0) -> None:
    words, values, places = kept
    for i, word in enumerate(stream.words()):
        words[i] = word
    for i, value in enumerate(stream.values()):
        values[i] = value
    for i, address in enumerate(stream.addresses()):
        places[i] = ins.advanced(address, passed_bytes) if passed_bytes else address


def _elements(kept: cute.Tensor, count: int) -> Iterator[Any]:
    return iter([kept[i] for i in range(count)])


def _next4(source: Iterator[Any]) -> tuple[Any, Any, Any, Any]:
    return next(source), next(source), next(source), next(source)


def _open_rows(plan: Plan, place: Place, segments: Segments) -> _Rows:
    """Addresses of the warp's rows in `segments`."""
    part = place.rank * plan.k_warps + place.k_warp
    whole = plan.k // STEP
    first = part * plan.steps if plan.is_even else part * whole // plan.parts
    is_short = None if plan.is_even else Int32((part + 1) * whole // plan.parts - first < plan.steps)
    row = place.first_row + place.row_warp * (8 * plan.row_tiles) + place.group
    offset = Int64(first) * (STEP * 2) + Int64(place.quad) * 16
    rows = [row + tile * 8 for tile in range(plan.row_tiles)]
    return _Rows([address + offset for address in row_addresses(plan, rows, segments)], first, is_short)


def _fetch(plan: Plan, rows: _Rows, step: int, passed: int) -> list[ins.Words]:
    """Issue the loads of one step of weights, by addresses that lie `passed` steps further on."""
    offset = (step - passed) * (STEP * 2)
    if plan.is_even or step < plan.steps - 1:
        return [ins.load_weight(address + offset) for address in rows.addresses]
    back = Int64(rows.is_short) * (STEP * 2)
    return [_keep(rows, ins.load_weight(address + offset - back)) for address in rows.addresses]


def _keep(rows: _Rows, words: ins.Words) -> ins.Words:
    """The words of the last step, or zeros where the slice lacks it."""
    mask = rows.is_short - 1
    return tuple(word & mask for word in words)


class _Tokens:
    """Activations that each warp reads from L2 into registers, `TOKENS_AHEAD` steps ahead of their use."""

    def __init__(self, plan: Plan, place: Place, rows: _Rows, x: cute.Tensor) -> None:
        self.plan, self.rows, self.passed = plan, rows, 0
        offset = ins.byte_address(x) + Int64(rows.first_step) * (STEP * 2) + Int64(place.quad) * 16
        last = x.shape[0] - 1
        tokens = [ins.at_most(place.group + half * 8, last) for half in range(plan.halves)]
        self.addresses = [offset + Int64(token) * x.stride[0] * 2 for token in tokens]
        self.near = [self._fetch(step) for step in range(min(TOKENS_AHEAD, plan.steps))]

    def step(self, step: int) -> list[ins.Words]:
        """The step's words by group of 8 tokens; asks for a later step's."""
        words = self.near[step % TOKENS_AHEAD]
        if step + TOKENS_AHEAD < self.plan.steps:
            self.near[step % TOKENS_AHEAD] = self._fetch(step + TOKENS_AHEAD)
        return words

    def _fetch(self, step: int) -> list[ins.Words]:
        offset = (step - self.passed) * (STEP * 2)
        if self.plan.is_even or step < self.plan.steps - 1:
            return [ins.load_activation(address + offset) for address in self.addresses]
        back = Int64(self.rows.is_short) * (STEP * 2)
        return [_keep(self.rows, ins.load_activation(address + offset - back)) for address in self.addresses]


def _multiply(plan: Plan, sums: Sums, weights: list[ins.Words], x: list[ins.Words]) -> None:
    """Add one step's products to the sums."""
    zeros = (Int32(0),) * 4
    for tile, words in enumerate(weights):
        for m in range(len(sums[tile])):
            low, high = x[2 * m], x[2 * m + 1] if plan.halves > 1 else zeros
            value = ins.mma_bf16((low[0], high[0], low[1], high[1]), words[0:2], sums[tile][m])
            sums[tile][m] = ins.mma_bf16((low[2], high[2], low[3], high[3]), words[2:4], value)


def _floats_of(words: ins.Words) -> list[Float32]:
    return [half for word in words for half in (ins.low_half(word), ins.high_half(word))]


def _scale_tokens(words: ins.Words, norms: list[Float32], square: Float32) -> tuple[ins.Words, Float32]:
    """The activations times the norm weight, rounded to bf16, and the running sum of their squares."""
    values = _floats_of(words)
    for value in values:
        square = square + value * value
    scaled = [value * norm for value, norm in zip(values, norms, strict=True)]
    packed = tuple(ins.pack_halves(scaled[i], scaled[i + 1]) for i in range(0, 8, 2))
    return packed, square


def _zero_sums(plan: Plan) -> Sums:
    return [[(Float32(0.0),) * 4] * max(1, plan.halves // 2) for _ in range(plan.row_tiles)]


def _add_sums(left: Sums | None, right: Sums) -> Sums:
    """The sum, element by element; `right` where there is no left."""
    if left is None:
        return right
    return [
        [tuple(a + b for a, b in zip(p, q, strict=True)) for p, q in zip(row, other, strict=True)]
        for row, other in zip(left, right, strict=True)
    ]
