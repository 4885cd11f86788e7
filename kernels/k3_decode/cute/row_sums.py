"""From partial sums to finished ones: over the warps of a block and the blocks of a cluster, in a fixed
order.

Every block of a cluster finishes a share of the row pairs and receives the others' sums by `st.async`,
counted by one barrier; nothing is sent twice and no block waits for anything but its own share.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from k3_decode.cute import instructions as ins
from k3_decode.cute.row_plan import Layout, Place, Plan, shared_layout
from k3_decode.cute.row_stream import Sums

__all__ = ["Extent", "Finished", "arm_barrier", "finish", "finish_published", "own_pairs"]


@cute.jit
def arm_barrier(plan: Any, place: Any, count: Int32, has_norm: Any):
    """Prepare the block's barrier for the sums that the cluster will send, and arrive at the cluster."""
    mine = cute.arch.make_warp_uniform(own_pairs(plan, place))
    if place.tid == 0:
        barrier = cute.arch.get_dyn_smem(Int64, alignment=1024)
        cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_init_fence()
        expected = count * (mine * (8 * plan.cluster) + (4 * plan.cluster if has_norm else 0))
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, expected)
    cute.arch.cluster_arrive()


def own_pairs(plan: Plan, place: Place) -> Int32:
    """Row pairs that this block of the cluster finishes."""
    left = ins.at_most(plan.pairs - place.rank * plan.share, Int32(plan.share))
    return -ins.at_most(-left, Int32(0))


class Extent(NamedTuple):
    """What a launch holds of what its plan has room for."""

    tokens: Int32
    rows: Int32
    """Weight rows."""


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
    extent: Extent,
    eps: Float32 | None,
    store: Callable[[Finished], None],
) -> None:
    """Add the partial sums of all warps and of the cluster, and hand each row pair to `store` once."""
    _publish(plan, place, sums, squares, shared_layout(plan))
    finish_published(plan, place, squares is not None, extent, eps, store)


def finish_published(
    plan: Plan,
    place: Place,
    has_norm: bool,
    extent: Extent,
    eps: Float32 | None,
    store: Callable[[Finished], None],
) -> None:
    """As `finish`, for partial sums that lie in shared memory already."""
    layout = shared_layout(plan)
    cute.arch.sync_threads()
    if plan.cluster > 1:
        _send(plan, place, has_norm, extent.tokens, layout)
        barrier = cute.arch.get_dyn_smem(Int64, alignment=1024)
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
        if has_norm:
            assert eps is not None
            total = Float32(0.0)
            for source in range(sources):
                total = total + ins.shared_load_f32(square_base + (source * plan.tokens + inside) * 4)
            scale = cute.rsqrt(total * (1.0 / plan.k) + eps)
        own = place.rank * plan.share + pair if plan.cluster > 1 else pair
        row = place.first_row + own * 2
        is_wanted = Int32(token < extent.tokens) & Int32(own < plan.pairs) & Int32(row < extent.rows)
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
