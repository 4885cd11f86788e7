"""Skinny products whose weights pass through shared memory by bulk copies, a ring for each warp.

An alternative to the registers of `row_stream` with the same operand map and the same sums: copies of some
hundred consecutive bytes a row, and many of them in flight at few registers, without a barrier of the
block.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from k3_decode.cute import instructions as ins
from k3_decode.cute.row_plan import STEP, Place, Plan, shared_layout
from k3_decode.cute.row_stream import (
    DirectTokens,
    Rows,
    Segments,
    Sums,
    add_sums,
    floats_of,
    multiply_tile,
    open_rows,
    scale_tokens,
    zero_sums,
)

__all__ = ["stream_rings"]


def stream_rings(
    plan: Plan,
    place: Place,
    segments: Segments,
    x: cute.Tensor,
    norm_weight: cute.Tensor | None = None,
    chain: int | None = None,
) -> tuple[Sums, list[Float32]]:
    """As `stream`, with weights that pass through shared memory by bulk copies.

    Each warp has a ring of its own: 8 lanes ask for the 8 rows of a slot, and again as soon as the warp has
    used it, so no other warp takes part. A warp reads `depth` steps of every tile before it goes on along K.
    """
    sums, totals = zero_sums(plan), None
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
    source = DirectTokens(plan, place, rows, x, 0)
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
                totals, sums = add_sums(totals, sums), zero_sums(plan)
            words = ins.shared_load(lane_at + slot * plan.slot_bytes + step * STEP * 2)
            multiply_tile(plan, sums[tile], words, tokens[step])
        if visit + plan.slots < len(visits):
            cute.arch.sync_warp()
            fill(visit + plan.slots)
        if chain is not None:
            totals, sums = add_sums(totals, sums), zero_sums(plan)
    cute.arch.sync_threads()
    return add_sums(totals, sums), squares


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
        norms = floats_of(ins.load_weight(base + (part * plan.depth + step) * STEP * 2))
        scaled = [scale_tokens(word, norms, square) for word, square in zip(words, squares, strict=True)]
        scaled_tokens.append([word for word, _ in scaled])
        squares = [square for _, square in scaled]
    return scaled_tokens, squares
