"""Skinny products `x @ weight.T` that read every weight byte once, straight from device memory into mma
operands.

The shared body of `projection`, `moe_front` and `latent_tail`; those modules own launches, outputs and
epilogues.

A warp owns `row_tiles` x 8 weight rows and a slice of K, in steps of 32: lane (g, t) = (lane // 4, lane %
4) reads the 16 bytes of row g at K offset 8t of the step, and the same 16 bytes of token g. These are the
B and the A operand of two `m16n8k16` products once K is renumbered (word pairs 0,1 and 2,3 of each lane),
so weights keep their natural row-major layout and pass through no shared memory. Weight loads run `depth`
steps ahead of the products; the first `depth` steps, and an L2 prefetch of what follows, are issued before
the wait on the previous kernel, since weights are constant.

Partial sums meet in a fixed order: within a warp along K, then over the warps of a block, then over the
blocks of a cluster (each block finishes a share of the row pairs and receives the others' sums by
`st.async`). A result therefore depends on the plan alone, not on timing. Tokens and rows past the end
repeat the last one and are never stored.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from k3_decode.cute import instructions as ins

__all__ = [
    "STEP",
    "Finished",
    "Place",
    "Plan",
    "Rows",
    "arm_barrier",
    "finish",
    "locate",
    "open_rows",
    "prefetch_rows",
    "shared_layout",
    "stream",
]

STEP = 32
"""K elements a warp consumes at once: 64 bytes of a row, four lanes of 16 bytes."""
CARVEOUT = 100
"""Share of L1 kept as shared memory, in percent; equal for all kernels of a step, because a multiprocessor
that has to change it drains first, and then the next kernel cannot start early."""
STAGE_STEPS = 2
"""Steps of activations in a stage: a 128-byte line a token."""
STAGE_BYTES = STAGE_STEPS * STEP * 2
TOKENS_AHEAD = 2
"""Steps of activations in flight: they come from L2, so one step of weights covers their latency."""

Sums = list[list[tuple[Float32, ...]]]
"""Accumulators by tile of 8 rows and tile of 16 tokens: 4 fp32 of the mma's layout."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How one product is laid over the device; compile-time constants, so equal plans share a compilation."""

    rows: int
    """Weight rows in all."""
    k: int
    """Row length, a multiple of 32."""
    tokens: int
    """Capacity: 8, 16, 32 or 64 tokens."""
    row_tiles: int
    """Tiles of 8 rows a warp owns."""
    row_warps: int
    """Warps of a block along the rows."""
    k_warps: int
    """Warps of a block along K."""
    cluster: int
    """Blocks that share a row group and divide K."""
    depth: int
    """Steps of weights in flight per warp."""
    ahead: int = 0
    """Lines (128 bytes) of each row after those steps that are asked into L2 before the wait."""
    blocks_per_sm: int = 1
    """Blocks that the compiler must leave registers for on one multiprocessor."""
    stages: int = 0
    """Shared-memory stages of two steps of activations, for all row warps; 0: every warp reads its own."""
    slots: int = 0
    """Places of a warp's ring in shared memory, each 8 rows of `depth` steps; 0: registers hold the weights."""

    def __post_init__(self) -> None:
        if self.k % STEP or self.tokens not in (8, 16, 32, 64):
            raise ValueError(f"row stream: k {self.k} is no multiple of {STEP}, or {self.tokens} no capacity")
        if self.slots and (not self.is_even or self.steps % self.depth or self.row_warps > 1):
            raise ValueError(
                f"row stream: a ring needs equal slices that its depth divides, in one row warp: {self}"
            )
        copies = self.k_warps * self.tokens * 8
        if self.stages and (not self.is_even or self.steps % STAGE_STEPS or copies % self.threads):
            raise ValueError(
                f"row stream: staged tokens need equal slices of an even number of steps: {self}"
            )

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.row_warps * self.k_warps

    @property
    def group_rows(self) -> int:
        """Rows of a cluster."""
        return 8 * self.row_tiles * self.row_warps

    @property
    def groups(self) -> int:
        """Clusters in the grid."""
        return -(-self.rows // self.group_rows)

    @property
    def parts(self) -> int:
        """Slices that K is divided into."""
        return self.k_warps * self.cluster

    @property
    def steps(self) -> int:
        """Most steps of one slice."""
        return -(-(self.k // STEP) // self.parts)

    @property
    def is_even(self) -> bool:
        """Whether every slice has `steps` steps; otherwise some lack the last one."""
        return self.k // STEP % self.parts == 0

    @property
    def halves(self) -> int:
        """Groups of 8 tokens."""
        return self.tokens // 8

    @property
    def copies(self) -> int:
        """16-byte copies a thread makes for one stage of activations."""
        return self.k_warps * self.tokens * 8 // self.threads

    @property
    def slot_pitch(self) -> int:
        """Bytes between two rows of a slot: an odd multiple of 64, so that no bank is hit twice."""
        return self.depth * STEP * 2 + (0 if self.depth % 2 else 64)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot: 8 rows."""
        return 8 * self.slot_pitch

    @property
    def pairs(self) -> int:
        """Row pairs of a cluster."""
        return self.group_rows // 2

    @property
    def share(self) -> int:
        """Row pairs that one block of the cluster finishes, at most."""
        return -(-self.pairs // self.cluster)

    @property
    def pitch(self) -> int:
        """Floats between two tokens' partial sums: an odd multiple of 8, so that no bank is hit twice."""
        return self.group_rows + (0 if self.group_rows // 8 % 2 else 8)

    @property
    def name(self) -> str:
        """The constants in short, for a variant's name."""
        shape = f"m{self.rows}_k{self.k}_b{self.tokens}"
        tiling = f"r{self.row_tiles}x{self.row_warps}_w{self.k_warps}_c{self.cluster}_d{self.depth}"
        return f"{shape}_{tiling}_a{self.ahead}_o{self.blocks_per_sm}_s{self.stages}_q{self.slots}"


class Layout(NamedTuple):
    """Byte offsets in a block's shared memory; the barrier lies at 0."""

    squares: int
    received_squares: int
    partials: int
    """Also stages and rings, which are done with when the first partial sum is written."""
    received: int
    size: int


def shared_layout(plan: Plan) -> Layout:
    """Where sums of squares, partial sums and received sums lie, and the bytes in all."""
    is_alone = plan.cluster == 1
    squares = 16 + plan.k_warps * plan.slots * 8
    squares += -squares % 16
    received_squares = squares + plan.k_warps * plan.tokens * 4
    partials = received_squares + (0 if is_alone else plan.cluster * plan.tokens * 4)
    partials += -partials % STAGE_BYTES
    staged = plan.stages * plan.k_warps * plan.tokens * STAGE_BYTES
    rings = plan.k_warps * plan.slots * plan.slot_bytes
    received = partials + max(staged, rings, plan.k_warps * plan.tokens * plan.pitch * 4)
    size = received + (0 if is_alone else plan.cluster * plan.tokens * plan.share * 8)
    return Layout(squares, received_squares, partials, received, size)


class Place(NamedTuple):
    """Where a thread stands in a plan."""

    tid: Int32
    lane: Int32
    group: Int32
    """lane // 4: row within a tile, and token within a group of 8."""
    quad: Int32
    """lane % 4: which 16 bytes of a step."""
    row_warp: Int32
    k_warp: Int32
    rank: Int32
    """Block within its cluster."""
    first_row: Int32
    """First weight row of the cluster."""
    is_first: Any
    """Whether this is the one thread of the grid that counts the launch."""
    shared: Int32
    """Address of the block's shared memory."""


class Rows(NamedTuple):
    """A warp's weight rows: one address a tile, at the start of its K slice."""

    addresses: list[Int64]
    first_step: Int32
    is_short: Any
    """Int32 1 where the slice lacks the last step; None for even plans."""


def locate(plan: Plan) -> Place:
    """This thread's place."""
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    lane = tid % 32
    warp = cute.arch.make_warp_uniform(tid // 32)
    return Place(
        tid=tid,
        lane=lane,
        group=lane // 4,
        quad=lane % 4,
        row_warp=warp // plan.k_warps,
        k_warp=warp % plan.k_warps,
        rank=bid % plan.cluster,
        first_row=bid // plan.cluster * plan.group_rows,
        is_first=tid + bid == 0,
        shared=cute.arch.get_dyn_smem(Int32, alignment=128).toint(),
    )


def open_rows(plan: Plan, place: Place, segments: list[tuple[Int64, int]]) -> Rows:
    """Addresses of the warp's rows in `segments`: (device address, rows) of weights in order."""
    part = place.rank * plan.k_warps + place.k_warp
    whole = plan.k // STEP
    first = part * plan.steps if plan.is_even else part * whole // plan.parts
    is_short = None if plan.is_even else Int32((part + 1) * whole // plan.parts - first < plan.steps)
    row = place.first_row + place.row_warp * (8 * plan.row_tiles) + place.group
    offset = Int64(first) * (STEP * 2) + Int64(place.quad) * 16
    if len(segments) == 1 and plan.rows % plan.group_rows == 0:
        base = segments[0][0] + Int64(row) * (plan.k * 2) + offset
        return Rows([base + tile * 8 * plan.k * 2 for tile in range(plan.row_tiles)], first, is_short)
    addresses = []
    for tile in range(plan.row_tiles):
        at = ins.at_most(row + tile * 8, Int32(plan.rows - 1))
        base, start = segments[0][0], 0
        for (_, length), (address, _) in pairwise(segments):
            start += length
            base = ins.choose_address(at - start, base, address - Int64(start * plan.k * 2))
        addresses.append(base + Int64(at) * (plan.k * 2) + offset)
    return Rows(addresses, first, is_short)


def prefetch_rows(plan: Plan, place: Place, rows: Rows) -> None:
    """Ask the warp's next `ahead` lines of each row into L2; quad q of a row takes lines q, q + 4, ..."""
    lines = min(plan.ahead, (plan.steps - plan.depth) // 2)
    shift = Int64(place.quad) * (128 - 16)
    for line in range(0, lines, 4):
        is_wanted = Int32(place.quad < lines - line)
        for address in rows.addresses:
            ins.prefetch_line_if(address + shift + (plan.depth * STEP * 2 + line * 128), is_wanted)


def _fetch(plan: Plan, rows: Rows, step: int) -> list[ins.Words]:
    """Issue the loads of one step of weights."""
    offset = step * (STEP * 2)
    if plan.is_even or step < plan.steps - 1:
        return [ins.load_weight(address + offset) for address in rows.addresses]
    back = Int64(rows.is_short) * (STEP * 2)
    return [_keep(rows, ins.load_weight(address + offset - back)) for address in rows.addresses]


def _keep(rows: Rows, words: ins.Words) -> ins.Words:
    """The words of the last step, or zeros where the slice lacks it."""
    mask = rows.is_short - 1
    return tuple(word & mask for word in words)


class _Direct:
    """Activations that each warp reads from L2 into registers, `TOKENS_AHEAD` steps ahead of their use."""

    def __init__(
        self, plan: Plan, place: Place, rows: Rows, x: cute.Tensor, ahead: int = TOKENS_AHEAD
    ) -> None:
        self.plan, self.rows = plan, rows
        offset = ins.byte_address(x) + Int64(rows.first_step) * (STEP * 2) + Int64(place.quad) * 16
        last = x.shape[0] - 1
        tokens = [ins.at_most(place.group + half * 8, last) for half in range(plan.halves)]
        self.addresses = [offset + Int64(token) * x.stride[0] * 2 for token in tokens]
        self.near = [self.fetch(step) for step in range(min(ahead, plan.steps))]

    def step(self, step: int) -> list[ins.Words]:
        """The step's words by group of 8 tokens; asks for a later step's."""
        words = self.near[step % TOKENS_AHEAD]
        if step + TOKENS_AHEAD < self.plan.steps:
            self.near[step % TOKENS_AHEAD] = self.fetch(step + TOKENS_AHEAD)
        return words

    def fetch(self, step: int) -> list[ins.Words]:
        """Issue the loads of a step by group of 8 tokens."""
        offset = step * (STEP * 2)
        if self.plan.is_even or step < self.plan.steps - 1:
            return [ins.load_activation(address + offset) for address in self.addresses]
        back = Int64(self.rows.is_short) * (STEP * 2)
        return [_keep(self.rows, ins.load_activation(address + offset - back)) for address in self.addresses]


class _Staged:
    """Activations that a block copies to shared memory once, a line (two steps) a token and K warp at a time.

    Odd tokens swap the halves of their line, so that the 8 lanes of two tokens reading at once hit all banks.
    """

    def __init__(self, plan: Plan, place: Place, x: cute.Tensor) -> None:
        self.plan = plan
        self.base = place.shared + shared_layout(plan).partials
        self.sources, self.targets = [], []
        for turn in range(plan.copies):
            index = place.tid + turn * plan.threads
            piece, line = index % 8, index // 8
            token, part = line % plan.tokens, place.rank * plan.k_warps + line // plan.tokens
            row = Int64(ins.at_most(token, x.shape[0] - 1)) * x.stride[0] * 2
            column = Int64(part) * (plan.steps * STEP * 2) + Int64(piece) * 16
            self.sources.append(ins.byte_address(x) + row + column)
            self.targets.append(self.base + line * STAGE_BYTES + (piece ^ (token % 2 * 4)) * 16)
        swap = place.group % 2
        at = self.base + (place.k_warp * plan.tokens + place.group) * STAGE_BYTES + place.quad * 16
        self.lanes = (at + swap * 64, at + (1 - swap) * 64)
        for chunk in range(plan.stages - 1):
            self._copy(chunk)

    def step(self, step: int) -> list[ins.Words]:
        """The step's words by group of 8 tokens; a stage's first step waits for it and starts another copy."""
        chunk, half = divmod(step, STAGE_STEPS)
        if half == 0:
            cute.arch.cp_async_wait_group(self.plan.stages - 2)
            cute.arch.sync_threads()
            self._copy(chunk + self.plan.stages - 1)
        at = self.lanes[half] + self._offset(chunk)
        return [ins.shared_load(at + group * 8 * STAGE_BYTES) for group in range(self.plan.halves)]

    def _offset(self, chunk: int) -> int:
        return chunk % self.plan.stages * self.plan.k_warps * self.plan.tokens * STAGE_BYTES

    def _copy(self, chunk: int) -> None:
        if chunk * STAGE_STEPS < self.plan.steps:
            for source, target in zip(self.sources, self.targets, strict=True):
                ins.copy_async(target + self._offset(chunk), source + chunk * STAGE_BYTES)
        cute.arch.cp_async_commit_group()


def _multiply(plan: Plan, sums: Sums, weights: list[ins.Words], x: list[ins.Words]) -> None:
    """Add one step's products to the sums."""
    for tile, words in enumerate(weights):
        _multiply_tile(plan, sums[tile], words, x)


def _multiply_tile(plan: Plan, sums: list[tuple[Float32, ...]], words: ins.Words, x: list[ins.Words]) -> None:
    """Add one step's products of one tile of rows."""
    zeros = (Int32(0),) * 4
    for m in range(len(sums)):
        low, high = x[2 * m], x[2 * m + 1] if plan.halves > 1 else zeros
        value = ins.mma_bf16((low[0], high[0], low[1], high[1]), words[0:2], sums[m])
        sums[m] = ins.mma_bf16((low[2], high[2], low[3], high[3]), words[2:4], value)


def _floats(words: ins.Words) -> list[Float32]:
    return [half for word in words for half in (ins.low_half(word), ins.high_half(word))]


def _scale(words: ins.Words, norms: list[Float32], square: Float32) -> tuple[ins.Words, Float32]:
    """The activations times the norm weight, rounded to bf16, and the running sum of their squares."""
    values = _floats(words)
    for value in values:
        square = square + value * value
    scaled = [value * norm for value, norm in zip(values, norms, strict=True)]
    packed = tuple(ins.pack_halves(scaled[i], scaled[i + 1]) for i in range(0, 8, 2))
    return packed, square


def stream(
    plan: Plan,
    place: Place,
    segments: list[tuple[Int64, int]],
    x: cute.Tensor,
    norm_weight: cute.Tensor | None = None,
    chain: int | None = None,
) -> tuple[Sums, list[Float32]]:
    """Products of the warp's slice, and per group of 8 tokens the lane's sum of squares of x (for a norm).

    Lets the next kernel start at once, then waits for the previous one before the first activation is read.
    After every `chain` steps the matrix unit starts from zero again and its sum is added in fp32: the unit
    drops low bits at each addition, which an fp32 output would show (9e-7 of the row over 28 steps, 2e-7
    over 4).
    """
    if plan.slots:
        return _stream_rings(plan, place, segments, x, norm_weight, chain)
    sums, totals = _zero_sums(plan), None
    squares = [Float32(0.0)] * plan.halves
    rows = open_rows(plan, place, segments)
    norm_at = None
    if norm_weight is not None:
        norm_at = ins.byte_address(norm_weight) + Int64(rows.first_step) * (STEP * 2) + Int64(place.quad) * 16
    cute.arch.griddepcontrol_launch_dependents()
    ring = [_fetch(plan, rows, step) for step in range(min(plan.depth, plan.steps))]
    prefetch_rows(plan, place, rows)
    cute.arch.griddepcontrol_wait()
    source = _Staged(plan, place, x) if plan.stages else _Direct(plan, place, rows, x)
    for step in range(plan.steps):
        tokens = source.step(step)
        if norm_at is not None:
            back = Int64(0)
            if not plan.is_even and step == plan.steps - 1:
                back = Int64(rows.is_short) * (STEP * 2)
            norms = _floats(ins.load_weight(norm_at + step * (STEP * 2) - back))
            scaled = [_scale(words, norms, square) for words, square in zip(tokens, squares, strict=True)]
            tokens, squares = [words for words, _ in scaled], [square for _, square in scaled]
        if chain is not None and step and step % chain == 0:
            totals, sums = _add_sums(totals, sums), _zero_sums(plan)
        _multiply(plan, sums, ring[step % plan.depth], tokens)
        if step + plan.depth < plan.steps:
            ring[step % plan.depth] = _fetch(plan, rows, step + plan.depth)
    if plan.stages:
        cute.arch.sync_threads()
    return _add_sums(totals, sums), squares


def _stream_rings(
    plan: Plan,
    place: Place,
    segments: list[tuple[Int64, int]],
    x: cute.Tensor,
    norm_weight: cute.Tensor | None = None,
    chain: int | None = None,
) -> tuple[Sums, list[Float32]]:
    """As `stream`, with weights that pass through shared memory by bulk copies.

    Each warp has a ring of its own: 8 lanes ask for the 8 rows of a slot, and again as soon as the warp has used
    it, so no other warp takes part. A warp reads `depth` steps of every tile before it goes on along K.
    """
    sums, totals = _zero_sums(plan), None
    squares = [Float32(0.0)] * plan.halves
    lender = place._replace(group=place.lane % 8, quad=place.lane * 0)
    rows = open_rows(plan, lender, segments)
    layout = shared_layout(plan)
    ring = place.shared + layout.partials + place.k_warp * (plan.slots * plan.slot_bytes)
    barriers = place.shared + 16 + place.k_warp * (plan.slots * 8)
    is_lender, is_first = Int32(place.lane < 8), Int32(place.lane == 0)
    size = plan.depth * STEP * 2
    visits = [(part, tile) for part in range(plan.steps // plan.depth) for tile in range(plan.row_tiles)]

    def fill(visit: int) -> None:
        part, tile = visits[visit]
        slot = visit % plan.slots
        ins.expect_bytes_if(barriers + slot * 8, Int32(8 * size), is_first)
        at = ring + slot * plan.slot_bytes + lender.group * plan.slot_pitch
        ins.bulk_load_if(at, rows.addresses[tile] + part * size, Int32(size), barriers + slot * 8, is_lender)

    for slot in range(plan.slots):
        ins.init_barrier_if(barriers + slot * 8, is_first)
    ins.fence_barriers()
    cute.arch.sync_warp()
    for visit in range(min(plan.slots, len(visits))):
        fill(visit)
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()
    source = _Direct(plan, place, rows, x, 0)
    lane_at = ring + place.group * plan.slot_pitch + place.quad * 16
    tokens: list[list[ins.Words]] = []
    for visit, (part, tile) in enumerate(visits):
        if tile == 0:
            tokens = [source.fetch(part * plan.depth + step) for step in range(plan.depth)]
            if norm_weight is not None:
                tokens, squares = _norm_part(plan, place, rows, norm_weight, part, tokens, squares)
        slot = visit % plan.slots
        ins.wait_barrier(barriers + slot * 8, visit // plan.slots % 2)
        for step in range(plan.depth):
            if chain is not None and step and step % chain == 0:
                totals, sums = _add_sums(totals, sums), _zero_sums(plan)
            words = ins.shared_load(lane_at + slot * plan.slot_bytes + step * STEP * 2)
            _multiply_tile(plan, sums[tile], words, tokens[step])
        if visit + plan.slots < len(visits):
            cute.arch.sync_warp()
            fill(visit + plan.slots)
        if chain is not None:
            totals, sums = _add_sums(totals, sums), _zero_sums(plan)
    cute.arch.sync_threads()
    return _add_sums(totals, sums), squares


def _norm_part(
    plan: Plan,
    place: Place,
    rows: Rows,
    norm_weight: cute.Tensor,
    part: int,
    tokens: list[list[ins.Words]],
    squares: list[Float32],
) -> tuple[list[list[ins.Words]], list[Float32]]:
    """The tokens of a part times the norm weight, and the running sums of squares."""
    base = ins.byte_address(norm_weight) + Int64(rows.first_step) * (STEP * 2) + Int64(place.quad) * 16
    scaled_tokens = []
    for step, words in enumerate(tokens):
        norms = _floats(ins.load_weight(base + (part * plan.depth + step) * STEP * 2))
        scaled = [_scale(word, norms, square) for word, square in zip(words, squares, strict=True)]
        scaled_tokens.append([word for word, _ in scaled])
        squares = [square for _, square in scaled]
    return scaled_tokens, squares


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


@cute.jit
def arm_barrier(plan: Any, place: Any, count: Int32, has_norm: Any):
    """Prepare the block's barrier for the sums that the cluster will send, and arrive at the cluster."""
    mine = cute.arch.make_warp_uniform(_own_pairs(plan, place))
    if place.tid == 0:
        barrier = cute.arch.get_dyn_smem(Int64, alignment=128)
        cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_init_fence()
        expected = count * (mine * (8 * plan.cluster) + (4 * plan.cluster if has_norm else 0))
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, expected)
    cute.arch.cluster_arrive()


def _own_pairs(plan: Plan, place: Place) -> Int32:
    """Row pairs that this block of the cluster finishes."""
    left = ins.at_most(plan.pairs - place.rank * plan.share, Int32(plan.share))
    return -ins.at_most(-left, Int32(0))


class Finished(NamedTuple):
    """Two sums ready to be stored: of weight rows `row` and `row + 1`, for one token."""

    token: Int32
    row: Int32
    low: Float32
    high: Float32
    scale: Float32 | None
    """1 / root mean square of the token's x, where the op norms it."""
    is_wanted: Int32
    """Not 0 where there is such a row and token."""


def finish(
    plan: Plan,
    place: Place,
    sums: Sums,
    squares: list[Float32] | None,
    count: Int32,
    eps: Float32 | None,
    store: Callable[[Finished], None],
) -> None:
    """Add the partial sums of all warps and of the cluster, and hand each row pair to `store` once."""
    layout = shared_layout(plan)
    _publish(plan, place, sums, squares, layout)
    cute.arch.sync_threads()
    if plan.cluster > 1:
        _send(plan, place, squares is not None, count, layout)
        barrier = cute.arch.get_dyn_smem(Int64, alignment=128)
        cute.arch.mbarrier_wait(barrier, 0)
    width = plan.share if plan.cluster > 1 else plan.pairs
    sources, pitch = (plan.cluster, width * 2) if plan.cluster > 1 else (plan.k_warps, plan.pitch)
    base = place.shared + (layout.received if plan.cluster > 1 else layout.partials)
    square_base = place.shared + (layout.received_squares if plan.cluster > 1 else layout.squares)
    for turn in range(-(-plan.tokens * width // plan.threads)):
        index = place.tid + turn * plan.threads
        token, pair = index // width, index % width
        inside = ins.at_most(token, Int32(plan.tokens - 1))
        low, high = _sum_pairs(base + (inside * pitch + pair * 2) * 4, sources, plan.tokens * pitch * 4)
        scale = None
        if squares is not None:
            assert eps is not None
            total = Float32(0.0)
            for source in range(sources):
                total = total + ins.shared_load_f32(square_base + (source * plan.tokens + inside) * 4)
            scale = cute.rsqrt(total * (1.0 / plan.k) + eps)
        own = place.rank * plan.share + pair if plan.cluster > 1 else pair
        row = place.first_row + own * 2
        is_wanted = Int32(token < count) & Int32(own < plan.pairs) & Int32(row < plan.rows)
        store(Finished(token, row, low, high, scale, is_wanted))


def _publish(plan: Plan, place: Place, sums: Sums, squares: list[Float32] | None, layout: Layout) -> None:
    """Write the warp's sums to shared memory as [K warp][token][row], and its sums of squares."""
    row = place.row_warp * (8 * plan.row_tiles) + place.quad * 2
    base = place.shared + layout.partials
    base = base + ((place.k_warp * plan.tokens + place.group) * plan.pitch + row) * 4
    for tile in range(plan.row_tiles):
        for half in range(plan.halves):
            low, high = sums[tile][half // 2][2 * (half % 2) : 2 * (half % 2) + 2]
            ins.shared_store_pair(base + (half * 8 * plan.pitch + tile * 8) * 4, low, high)
    for half, square in enumerate(squares or ()):
        square = square + cute.arch.shuffle_sync_bfly(square, 1)
        square = square + cute.arch.shuffle_sync_bfly(square, 2)
        at = place.shared + layout.squares + (place.k_warp * plan.tokens + half * 8 + place.group) * 4
        ins.shared_store_f32(at, square)


def _send(plan: Plan, place: Place, has_norm: bool, count: Int32, layout: Layout) -> None:
    """Send this block's sums to the blocks of the cluster that finish them."""
    cute.arch.cluster_wait()
    base = place.shared + layout.partials
    for turn in range(-(-plan.tokens * plan.pairs // plan.threads)):
        index = place.tid + turn * plan.threads
        token, pair = index // plan.pairs, index % plan.pairs
        inside = ins.at_most(token, Int32(plan.tokens - 1))
        stride = plan.tokens * plan.pitch * 4
        low, high = _sum_pairs(base + (inside * plan.pitch + pair * 2) * 4, plan.k_warps, stride)
        owner, own = pair // plan.share, pair % plan.share
        at = place.shared + layout.received + ((place.rank * plan.tokens + inside) * plan.share + own) * 8
        there, barrier = ins.cluster_address(at, owner), ins.cluster_address(place.shared, owner)
        ins.send_pair(there, low, high, barrier, Int32(token < count))
    if not has_norm:
        return
    inside = ins.at_most(place.tid, Int32(plan.tokens - 1))
    total = Float32(0.0)
    for source in range(plan.k_warps):
        at = place.shared + layout.squares + (source * plan.tokens + inside) * 4
        total = total + ins.shared_load_f32(at)
    for peer in range(plan.cluster):
        at = place.shared + layout.received_squares + (place.rank * plan.tokens + inside) * 4
        there = ins.cluster_address(at, Int32(peer))
        barrier = ins.cluster_address(place.shared, Int32(peer))
        ins.send_f32(there, total, barrier, Int32(place.tid < count))


def _sum_pairs(address: Int32, sources: int, stride: int) -> tuple[Float32, Float32]:
    """Two neighbouring sums over `sources` places `stride` bytes apart, in ascending order."""
    low, high = ins.shared_load_pair(address)
    for source in range(1, sources):
        more_low, more_high = ins.shared_load_pair(address + source * stride)
        low, high = low + more_low, high + more_high
    return low, high
