"""Products of 17 to 64 tokens by warpgroup matrix instructions: weights and tokens meet in shared memory
(sm_90a).

The sibling of `row_stream` for wide steps, where every warp reading all tokens from L2 costs more than the
weights themselves. A warpgroup owns 64 weight rows (M), all tokens are N, K runs in stages of 64 elements:
128-byte lines copied by `cp.async` into the 128-byte swizzle that the instruction reads, so both operands
are read from shared memory by the matrix unit and no register holds them. Blocks of a cluster divide K.
Weight copies of the first stages are issued before the wait on the previous kernel, token copies after it.

With a norm, each thread scales the token lines it copied itself (rounded to bf16 again) and sums their
squares. Other architectures take `row_stream`; it computes the same sums in another order.
"""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from k3_decode.cute import instructions as ins
from k3_decode.cute.row_plan import Place, Plan, Segments, row_addresses, shared_layout

__all__ = ["BLOCK", "RUN", "Tiles", "advance", "carry", "carry_runs", "publish", "start"]

BLOCK = 64
"""K elements of a stage: a 128-byte line of each row."""
LINE = BLOCK * 2
RUN = 8
"""Stages whose sums are added up apart from the earlier ones where the output is fp32: over 112 stages one
running sum errs by 2.3e-7 of the row, stock by 1.6e-7.
"""


class Tiles:
    """What a thread copies and multiplies: addresses that stay fixed over the stages."""

    def __init__(self, plan: Plan, place: Place, segments: Segments, x: cute.Tensor) -> None:
        self.plan = plan
        total = plan.k // BLOCK
        first = place.rank * total // plan.cluster
        self.count = (place.rank + 1) * total // plan.cluster - first
        """Stages of this block."""
        piece, line = place.tid % 8, place.tid // 8
        column = Int64(first) * LINE + Int64(piece) * 16
        lines = plan.threads // 8
        swizzled = line * LINE + ((piece ^ (line % 8)) * 16)
        rows = [place.first_row + line + turn * lines for turn in range(plan.group_rows // lines)]
        self.row_sources = [address + column for address in row_addresses(plan, rows, segments)]
        self.tokens = [line + turn * lines for turn in range(max(1, plan.tokens // lines))]
        last = x.shape[0] - 1
        # Lines of absent tokens stay as they are: nobody stores their products, and the last token's line,
        # read in their place by every block, would be one spot of L2 that all of them wait for.
        self.are_tokens = [Int32(line < plan.tokens) & Int32(token <= last) for token in self.tokens]
        self.token_sources = [
            ins.byte_address(x) + column + Int64(ins.at_most(token, last)) * x.stride[0] * 2
            for token in self.tokens
        ]
        self.base = place.shared + shared_layout(plan).partials
        self.row_target = self.base + swizzled
        self.token_target = self.base + plan.group_rows * LINE + swizzled
        self.turn_bytes = lines * LINE
        self.column = column
        group = place.row_warp // 4
        self.row_tile = self.base + group * (64 * LINE)
        self.token_tile = self.base + plan.group_rows * LINE

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage: rows and tokens."""
        return (self.plan.group_rows + self.plan.tokens) * LINE

    def copy_rows(self, stage: Any, slot: Any, is_wanted: Int32) -> None:
        """Ask for a stage of weights."""
        for turn, source in enumerate(self.row_sources):
            target = self.row_target + slot * self.stage_bytes + turn * self.turn_bytes
            ins.copy_async_if(target, source + Int64(stage) * LINE, is_wanted)

    def copy_tokens(self, stage: Any, slot: Any, is_wanted: Int32) -> None:
        """Ask for a stage of tokens."""
        for turn, source in enumerate(self.token_sources):
            target = self.token_target + slot * self.stage_bytes + turn * self.turn_bytes
            ins.copy_async_if(target, source + Int64(stage) * LINE, is_wanted & self.are_tokens[turn])


def start(plan: Plan, tiles: Tiles) -> None:
    """Fill all stages but one; the next kernel may start, the previous one is awaited before the tokens."""
    if not plan.is_late:
        cute.arch.griddepcontrol_launch_dependents()
    for stage in range(plan.depth - 1):
        tiles.copy_rows(stage, stage, Int32(stage < tiles.count))
    cute.arch.griddepcontrol_wait()
    for stage in range(plan.depth - 1):
        tiles.copy_tokens(stage, stage, Int32(stage < tiles.count))
        cute.arch.cp_async_commit_group()


def advance(
    plan: Plan,
    tiles: Tiles,
    stage: Any,
    sums: Any,
    squares: Any,
    norm_weight: Any,
    is_chained: bool = True,
) -> None:
    """One stage: wait for its copies, ask for a later one, multiply. `sums`, `squares`: register tensors.

    Where the stage's products are not chained to the sums they start from zero and are added in fp32: the
    matrix unit drops low bits at each addition, which an fp32 output would show.
    """
    slot = stage % plan.depth
    cute.arch.cp_async_wait_group(plan.depth - 2)
    if norm_weight is not None:
        _scale_tokens(tiles, stage, slot, squares, norm_weight)
    ins.fence_async_reads()
    cute.arch.sync_threads()
    later = stage + (plan.depth - 1)
    is_wanted = Int32(later < tiles.count)
    tiles.copy_rows(later, later % plan.depth, is_wanted)
    tiles.copy_tokens(later, later % plan.depth, is_wanted)
    cute.arch.cp_async_commit_group()
    offset = slot * tiles.stage_bytes
    before = [sums[i] for i in range(plan.tokens // 2)]
    start_from = before if is_chained else [Float32(0.0)] * len(before)
    values = ins.multiply_tiles(start_from, tiles.row_tile + offset, tiles.token_tile + offset, plan.tokens)
    for i, value in enumerate(values):
        sums[i] = value if is_chained else before[i] + value


@cute.jit
def carry_runs(plan: Any, stage: Int32, sums: Any, earlier: Any):
    """After the last stage of a run: `carry`."""
    if stage % RUN == RUN - 1:
        carry(plan, sums, earlier)


def carry(plan: Plan, sums: Any, earlier: Any) -> None:
    """Add the sums of a run of stages to those of the runs before, and begin another run."""
    for i in range(plan.tokens // 2):
        earlier[i] = earlier[i] + sums[i]
        sums[i] = Float32(0.0)


def _scale_tokens(tiles: Tiles, stage: Any, slot: Any, squares: Any, norm_weight: cute.Tensor) -> None:
    """Scale the token pieces this thread copied, in place, and add up their squares."""
    norms = ins.load_weight(ins.byte_address(norm_weight) + tiles.column + Int64(stage) * LINE)
    for turn in range(len(tiles.tokens)):
        at = tiles.token_target + slot * tiles.stage_bytes + turn * tiles.turn_bytes
        words, total = [], squares[turn]
        for word, norm in zip(ins.shared_load(at), norms, strict=True):
            low, high = ins.low_half(word), ins.high_half(word)
            total = total + low * low + high * high
            words.append(ins.pack_halves(low * ins.low_half(norm), high * ins.high_half(norm)))
        squares[turn] = total
        ins.shared_store_if(at, tuple(words), tiles.are_tokens[turn])


def publish(plan: Plan, place: Place, tiles: Tiles, sums: Any, squares: Any) -> None:
    """After the last stage: the block's sums as [token][row] in shared memory, and its sums of squares."""
    cute.arch.cp_async_wait_group(0)
    cute.arch.sync_threads()
    layout = shared_layout(plan)
    row = place.row_warp * 16 + place.group
    base = place.shared + layout.partials + (place.quad * 2 * plan.pitch + row) * 4
    for tile in range(plan.tokens // 8):
        for index in range(4):
            token, shift = tile * 8 + index % 2, index // 2 * 8
            ins.shared_store_f32(base + (token * plan.pitch + shift) * 4, sums[tile * 4 + index])
    if squares is None:
        return
    for turn, token in enumerate(tiles.tokens):
        total = squares[turn]
        for offset in (1, 2, 4):
            total = total + cute.arch.shuffle_sync_bfly(total, offset)
        ins.shared_store_f32_if(place.shared + layout.squares + token * 4, total, tiles.are_tokens[turn])
