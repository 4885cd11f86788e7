"""How one skinny product is laid over the device: the constants, and where a thread stands in them.

Invariant: a `Plan` is all that a compilation depends on, so equal plans share one; results depend on it,
never on timing. What it leaves to callers: which plan a shape gets (`plans`), and the products themselves
(`row_stream`, `row_gemm`).
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64

from k3_decode.cute import instructions as ins

__all__ = [
    "CARVEOUT",
    "STEP",
    "Layout",
    "Place",
    "Plan",
    "Segments",
    "locate",
    "row_addresses",
    "row_count",
    "shared_layout",
]

STEP = 32
"""K elements a warp consumes at once: 64 bytes of a row, four lanes of 16 bytes."""
CARVEOUT = 100
"""Share of L1 kept as shared memory, in percent; equal for all kernels of a step, because a multiprocessor
that has to change it drains first, and then the next kernel cannot start early."""
Segments = list[tuple[Int64, Int32]]
"""Weights that follow one another as one matrix: device address and rows of each."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How products of one row length are laid over the device; compile-time constants, so equal plans share a
    compilation. The number of weight rows is none of them.
    """

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
    blocks_per_sm: int = 1
    """Blocks that the compiler must leave registers for on one multiprocessor."""
    is_grouped: bool = False
    """Whether warpgroups of 64 rows multiply (`row_gemm`), `depth` stages of 64 K elements; sm_90a only."""
    is_whole: bool = False
    """Whether the weight's rows fill every cluster, so that no address needs a bound."""
    is_late: bool = False
    """Whether the next kernel may start when the products are done, not at once: where it would take the
    multiprocessors that a kernel of another stream waits for."""

    def __post_init__(self) -> None:
        if self.k % STEP or self.tokens not in (8, 16, 32, 64):
            raise ValueError(f"row stream: k {self.k} is no multiple of {STEP}, or {self.tokens} no capacity")
        if self.is_grouped and (self.k % 64 or self.row_tiles != 2 or self.row_warps % 4 or self.k_warps > 1):
            raise ValueError(f"row stream: warpgroups need k of 64 and 64 rows each: {self}")
        lines = self.threads // 8
        if self.is_grouped and self.tokens > lines and self.tokens % lines:
            raise ValueError(f"row stream: {lines} lines copied at a time do not divide the tokens: {self}")

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.row_warps * self.k_warps

    @property
    def group_rows(self) -> int:
        """Rows of a cluster."""
        return 8 * self.row_tiles * self.row_warps

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
    def is_rolled(self) -> bool:
        """Whether a warp loops over its steps: where they are too many and too wide to stand one behind the
        other in the code, which only architectures without `row_gemm` have.
        """
        return not self.is_grouped and self.tokens > 16 and self.row_tiles > 1

    @property
    def halves(self) -> int:
        """Groups of 8 tokens."""
        return self.tokens // 8

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
        tiling = f"r{self.row_tiles}x{self.row_warps}_w{self.k_warps}_c{self.cluster}_d{self.depth}"
        kind = "_grouped" * self.is_grouped + "_whole" * self.is_whole + "_late" * self.is_late
        return f"k{self.k}_b{self.tokens}_{tiling}_o{self.blocks_per_sm}{kind}"


class Layout(NamedTuple):
    """Byte offsets in a block's shared memory; the barrier lies at 0."""

    squares: int
    received_squares: int
    partials: int
    """Also the stages of warpgroups, which are done with when the first partial sum is written."""
    received: int
    size: int


def shared_layout(plan: Plan) -> Layout:
    """Where sums of squares, partial sums and received sums lie, and the bytes in all."""
    is_alone = plan.cluster == 1
    squares = 16
    received_squares = squares + plan.k_warps * plan.tokens * 4
    partials = received_squares + (0 if is_alone else plan.cluster * plan.tokens * 4)
    partials += -partials % (1024 if plan.is_grouped else 128)
    tiles = plan.depth * (plan.group_rows + plan.tokens) * 128 if plan.is_grouped else 0
    received = partials + max(tiles, plan.k_warps * plan.tokens * plan.pitch * 4)
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
        shared=cute.arch.get_dyn_smem(Int32, alignment=1024).toint(),
    )


def row_addresses(plan: Plan, rows: list[Int32], segments: Segments) -> list[Int64]:
    """Device addresses of weight rows in `segments`; rows past the end repeat the last one."""
    if len(segments) == 1 and plan.is_whole:
        base = segments[0][0] + Int64(rows[0]) * (plan.k * 2)
        return [base + Int64(row - rows[0]) * (plan.k * 2) for row in rows]
    total = row_count(segments)
    addresses = []
    for row in rows:
        at = ins.at_most(row, total - 1)
        base, start = segments[0][0], Int32(0)
        for (_, length), (address, _) in pairwise(segments):
            start = start + length
            base = ins.choose_address(at - start, base, address - Int64(start) * (plan.k * 2))
        addresses.append(base + Int64(at) * (plan.k * 2))
    return addresses


def row_count(segments: Segments) -> Int32:
    """Weight rows of all segments."""
    total = segments[0][1]
    for _, length in segments[1:]:
        total = total + length
    return total
