"""A gated MLP with SiTU in one launch on a few multiprocessors, beside kernels that leave memory idle.

The shared expert of a small step: its 33 MB (TP8) or 16 MB (TP16) stream while front, router and routed
experts wait for one another on the multiprocessors that this launch leaves to them.

Scope: sm_90a (run), sm_100a and sm_103a (compiled); 1 to 8 rows of x; `hidden` a multiple of 512 up to 8192,
`inter` a multiple of 32 up to `hidden`. Refused: more than 8 rows, strides that are no multiple of 8. All
`blocks` must be able to run at a time; each takes a multiprocessor of its own.

Layout: as `situ_mlp`: `x` and `out` [B,D] bf16, row strides free, every element of `out` written;
`gate_up` [2S,D] holds gate and up rows by turns, `down` [D,S]. `hidden` [B,S] bf16: the hidden rows, read and
written; a kernel before may have written its first columns. `workspace`: counters that are zero between
launches (zero it once). 16-byte aligned bases. No null slots.

Schedule: a warp owns a sixteenth of K and keeps one tile's weights (8 rows) ahead of its products; tiles of
gate and up rows go round over the blocks, a block adds its warps' slices behind one barrier a tile. The
blocks meet once; then each warp takes whole tiles of `down`, the first of which were asked for before.

Numerics: bf16 products summed in fp32 by the matrix unit along a slice of K, slices added in ascending order
in fp32; SiTU in fp32 on unrounded sums, hidden values rounded to bf16, the output rounded once. The order
depends on the constants alone. NaN and infinities propagate.

Validation: `tests/k3_decode/cute/test_narrow_mlp.py` compiles it for the three architectures and replays its
tiles and lane maps in numpy; its GPU tests compare cells with the float64 oracle and count launches. On an
H200 memcheck, racecheck and synccheck are clean over whole MLPs and the down-projection alone, at K3's widths
and at small ones. sm_100a and sm_103a were never run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8

from k3_decode.cute import instructions as ins
from k3_decode.cute import ring, row_plan, row_product
from k3_decode.cute.variant import COMPILED, DISPATCHED, Variant
from k3_decode.shapes import K3

if TYPE_CHECKING:
    import torch

    from k3_decode.cute.situ_mlp import PreparedMlp

__all__ = ["MAX_ROWS", "Form", "narrow_mlp", "serves", "variants", "workspace_bytes"]

OP_INDEX = 6
"""Place of the op in the launch counters: `situ_mlp`'s, whose work it does."""
WARPS = 16
THREADS = 32 * WARPS
MAX_ROWS = 8
"""Rows of x that one matrix instruction takes beside eight of zeros."""
LINE = row_plan.STEP * 2
"""Bytes of a weight row that a warp multiplies at once."""
TILE = 8
"""Weight rows of a matrix instruction."""
H200_BLOCKS = 20
"""Multiprocessors of an H200 (132) that the routed experts' 112 blocks do not need."""


@dataclass(frozen=True, slots=True)
class Form:
    """Compile-time constants of one kernel and what follows from them."""

    hidden: int
    inter: int
    blocks: int
    first: int = 0
    """Hidden values below this one are another kernel's; all of them where only `down` is multiplied here."""

    @property
    def has_up(self) -> bool:
        return self.first < self.inter

    @property
    def steps_up(self) -> int:
        """Steps of K in a warp's slice of a gate and up tile, all of them in flight ahead of their use."""
        return self.hidden // row_plan.STEP // WARPS

    @property
    def steps_down(self) -> int:
        """Steps of K in a tile of `down`, which one warp takes whole."""
        return self.inter // row_plan.STEP

    @property
    def depth_down(self) -> int:
        """Steps of `down` in flight: they share the registers of gate and up."""
        return max(d for d in range(1, self.steps_up + 1) if self.steps_down % d == 0)

    @property
    def tiles_up(self) -> int:
        """Tiles of 4 gate and 4 up rows."""
        return 2 * (self.inter - self.first) // TILE

    @property
    def tiles_down(self) -> int:
        return self.hidden // TILE

    @property
    def turns_up(self) -> int:
        """Tiles of a block."""
        return -(-self.tiles_up // self.blocks)

    @property
    def turns_down(self) -> int:
        """Tiles of a warp."""
        return -(-self.tiles_down // (self.blocks * WARPS))

    @property
    def rows_bytes(self) -> int:
        """x by warp and step, one piece of 16 bytes a lane; then, in its place, the hidden rows."""
        return WARPS * self.steps_up * 512

    @property
    def shared_bytes(self) -> int:
        """With the slices' sums of two tiles: more than half of a multiprocessor's, so none holds two."""
        return max(self.rows_bytes + 2 * WARPS * 256, 120 * 1024)


@cute.kernel
def _mlp(
    x: cute.Tensor,
    gate_up: cute.Tensor,
    down: cute.Tensor,
    hidden: cute.Tensor,
    workspace: cute.Tensor,
    out: cute.Tensor,
    launches: cute.Tensor,
    form: cutlass.Constexpr,
):
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    lane = tid % 32
    warp = cute.arch.make_warp_uniform(tid // 32)
    group, quad = lane // 4, lane % 4
    tokens = x.shape[0]
    token = cutlass.min(group, tokens - 1)
    base = cute.arch.get_dyn_smem(Uint8, alignment=128).toint()
    counter_at = ins.byte_address(workspace)
    hidden_at = ins.byte_address(hidden)

    column = Int64(warp * (form.steps_up * LINE) + quad * 16)
    up_at = ins.byte_address(gate_up) + Int64((2 * form.first + group) * (form.hidden * 2)) + column
    down_at = ins.byte_address(down) + Int64(group * (form.inter * 2) + quad * 16)
    weights = cute.make_rmem_tensor((4 * form.steps_up,), Int32)
    unit = bid * WARPS + warp
    first_at = _tile_address(down_at, unit, form.tiles_down, form.inter)
    if cutlass.const_expr(form.has_up):
        first_at = _tile_address(up_at, bid, form.tiles_up, form.hidden)
    for step in cutlass.range_constexpr(form.steps_up if form.has_up else form.depth_down):
        _keep(weights, step, ins.load_weight(first_at + step * LINE))
    cute.arch.griddepcontrol_wait()

    if cutlass.const_expr(form.has_up):
        x_at = ins.byte_address(x) + Int64(token) * x.stride[0] * 2
        # Each lane copies the pieces that it multiplies itself.
        mine_at = base + warp * (form.steps_up * 512) + lane * 16
        for step in cutlass.range_constexpr(form.steps_up):
            ins.copy_async(mine_at + step * 512, x_at + column + step * LINE)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)

        sums_at = base + form.rows_bytes
        for turn in cutlass.range(form.turns_up - 1, unroll=1):
            following = _tile_address(up_at, (turn + 1) * form.blocks + bid, form.tiles_up, form.hidden)
            sums = multiply_tile(
                weights, mine_at, form.steps_up, form.steps_up, None, following, form.steps_up
            )
            _finish_hidden(sums, turn, sums_at, hidden, bid, warp, lane, tokens, form)
        following = _tile_address(down_at, unit, form.tiles_down, form.inter)
        sums = multiply_tile(weights, mine_at, form.steps_up, form.steps_up, None, following, form.depth_down)
        _finish_hidden(sums, Int32(form.turns_up - 1), sums_at, hidden, bid, warp, lane, tokens, form)

        cute.arch.sync_threads()
        if tid == 0:
            ring.arrive(counter_at)
            ring.wait_for(counter_at, Int32(form.blocks))
            ring.leave(counter_at, Int32(form.blocks))
        cute.arch.sync_threads()
    row_at = hidden_at + Int64(token) * hidden.stride[0] * 2
    _copy_hidden(row_at + Int64(quad * 16), base, warp, lane, form)
    cute.arch.sync_threads()
    lane_at = base + lane * 16
    for _ in cutlass.range(form.turns_down - 1, unroll=1):
        here_at = _tile_address(down_at, unit, form.tiles_down, form.inter)
        later = unit + form.blocks * WARPS
        next_at = _tile_address(down_at, later, form.tiles_down, form.inter)
        outputs = multiply_tile(
            weights, lane_at, form.steps_down, form.depth_down, here_at, next_at, form.depth_down
        )
        _store(out, outputs, unit, lane, tokens, form)
        unit = later
    last_at = _tile_address(down_at, unit, form.tiles_down, form.inter)
    outputs = multiply_tile(weights, lane_at, form.steps_down, form.depth_down, last_at, last_at, 0)
    _store(out, outputs, unit, lane, tokens, form)
    if tid + bid == 0:
        ins.add_launch(ins.byte_address(launches) + OP_INDEX * 4)


def _tile_address(base: Int64, tile: Int32, tiles: int, width: int) -> Int64:
    """Where the lane's part of a tile of 8 rows begins; past the end, of the last tile."""
    return base + Int64(cutlass.min(tile, tiles - 1)) * (TILE * width * 2)


def _keep(weights: Any, slot: int, words: ins.Words) -> None:
    for i, word in enumerate(words):
        weights[4 * slot + i] = word


def multiply_tile(
    weights: Any, tokens_at: Int32, steps: int, depth: int, here: Any, following: Int64, wanted: int
) -> tuple[Float32, ...]:
    """Sums of 8 weight rows and up to 8 tokens over `steps` steps, whose first `depth` are in `weights`.

    Each place is filled anew as soon as it has been read: from `here` as long as this tile has more steps,
    then with the first `wanted` steps of the tile at `following`. `tokens_at`: the lane's piece of the first
    step, 512 bytes from each to the next.
    """
    sums = (Float32(0.0),) * 4
    zero = Int32(0)
    for step in range(steps):
        slot = step % depth
        words = [weights[4 * slot + i] for i in range(4)]
        x = ins.shared_load(tokens_at + step * 512)
        later = step + depth
        if later < steps:
            _keep(weights, slot, ins.load_weight(here + later * LINE))
        elif later - steps < wanted:
            _keep(weights, slot, ins.load_weight(following + (later - steps) * LINE))
        sums = ins.mma_bf16((x[0], zero, x[1], zero), words[0:2], sums)
        sums = ins.mma_bf16((x[2], zero, x[3], zero), words[2:4], sums)
    return sums


@cute.jit
def _finish_hidden(
    sums: Any,
    turn: Int32,
    sums_at: Int32,
    hidden: cute.Tensor,
    bid: Int32,
    warp: Int32,
    lane: Int32,
    tokens: Int32,
    form: cutlass.Constexpr,
):
    """All warps: leave a tile's slice sums; one of them, another each turn, adds and stores hidden values."""
    place = sums_at + turn % 2 * (WARPS * 256) + lane * 8
    ins.shared_store_pair(place + warp * 256, sums[0], sums[1])
    cute.arch.sync_threads()
    if warp == turn % WARPS:
        gate, up = ins.shared_load_pair(place)
        for source in cutlass.range_constexpr(1, WARPS):
            more_gate, more_up = ins.shared_load_pair(place + source * 256)
            gate, up = gate + more_gate, up + more_up
        tile = turn * form.blocks + bid
        at = ins.byte_address(hidden) + Int64(lane // 4) * hidden.stride[0] * 2
        at = at + Int64(form.first + tile * 4 + lane % 4) * 2
        is_wanted = Int32(lane // 4 < tokens) & Int32(tile < form.tiles_up)
        ins.store_half_if(at, ring.situ(gate, up), is_wanted)


@cute.jit
def _copy_hidden(lane_at: Int64, base: Int32, warp: Int32, lane: Int32, form: cutlass.Constexpr):
    """All warps: the hidden rows by step, one piece of 16 bytes a lane; a block barrier must follow."""
    for turn in cutlass.range_constexpr(-(-form.steps_down // WARPS)):
        step = warp + turn * WARPS
        if step < form.steps_down:
            ins.copy_async(base + step * 512 + lane * 16, lane_at + Int64(step) * LINE)
    cute.arch.cp_async_commit_group()
    cute.arch.cp_async_wait_group(0)


def _store(out: cute.Tensor, sums: Any, tile: Int32, lane: Int32, tokens: Int32, form: Form) -> None:
    """Two columns of the lane's token."""
    at = ins.byte_address(out) + Int64(lane // 4) * out.stride[0] * 2
    at = at + Int64(tile * TILE + lane % 4 * 2) * 2
    is_wanted = Int32(lane // 4 < tokens) & Int32(tile < form.tiles_down)
    ins.store_word_if(at, ins.pack_halves(sums[0], sums[1]), is_wanted)


@cute.jit
def _launch(
    x: cute.Tensor,
    gate_up: cute.Tensor,
    down: cute.Tensor,
    hidden: cute.Tensor,
    workspace: cute.Tensor,
    out: cute.Tensor,
    launches: cute.Tensor,
    stream: Any,
    form: cutlass.Constexpr,
):
    _mlp(x, gate_up, down, hidden, workspace, out, launches, form).launch(
        grid=(form.blocks, 1, 1),
        block=(THREADS, 1, 1),
        smem=form.shared_bytes,
        preferred_smem_carveout=row_plan.CARVEOUT,
        stream=stream,
        use_pdl=True,
    )


@cache
def _compile(form: Form) -> Callable[..., None]:
    """The launch for one set of constants; token count and row strides stay symbolic."""
    tokens = cute.sym_int32()
    compiled: Callable[..., None] = cute.compile(
        _launch,
        row_product.rows_of(tokens, form.hidden),
        row_product.matrix_of(2 * form.inter, form.hidden),
        row_product.matrix_of(form.hidden, form.inter),
        row_product.rows_of(tokens, form.inter),
        cute.runtime.make_fake_tensor(Uint8, (cute.sym_int64(),), (1,), assumed_align=128),
        row_product.rows_of(tokens, form.hidden, stride_of=2),
        row_product.vector_of(cute.sym_int32(), Int32),
        row_product.stream_of(),
        form,
        options="--enable-tvm-ffi",
    )
    return compiled


def serves(hidden: int, inter: int) -> bool:
    """Whether there is a form for the widths."""
    return hidden % (row_plan.STEP * WARPS) == 0 and hidden <= 8192 and inter % row_plan.STEP == 0


def workspace_bytes() -> int:
    """Size of the uint8 `workspace`; zero it once, then layers may share it."""
    return ring.COUNTER_BYTES


def narrow_mlp(
    *,
    x: "torch.Tensor",
    prepared: "PreparedMlp",
    hidden: "torch.Tensor",
    workspace: "torch.Tensor",
    out: "torch.Tensor",
    blocks: int,
    launches: "torch.Tensor",
    first: int = 0,
) -> None:
    """Write `down(SiTU(gate(x), up(x)))` to `out` by `blocks` blocks in one launch.

    `prepared` is `situ_mlp`'s. `hidden` [B,S] is room for the hidden rows, whose columns below `first` an
    earlier kernel wrote. Raises `ValueError` outside the scope.
    """
    width, inter = prepared.down.shape
    if not 1 <= x.shape[0] <= MAX_ROWS or not serves(width, inter) or inter > width or first % 4:
        raise ValueError(
            f"narrow_mlp: {x.shape[0]} rows, widths {width} and {inter}; it takes 1 to {MAX_ROWS} rows, a "
            f"hidden of {row_plan.STEP * WARPS} n and an inter of {row_plan.STEP} n; use situ_mlp"
        )
    launch = _compile(Form(width, inter, blocks, first))
    launch(x, prepared.gate_up, prepared.down, hidden, workspace, out, launches)


def variants() -> tuple[Variant, ...]:
    """K3's shared expert at TP16, and its down-projection at TP8."""
    roles = (
        ("x", "activation"), ("gate_up", "weight"), ("down", "weight"), ("hidden", "workspace"),
        ("workspace", "workspace"),
        ("out", "output"), ("launches", "workspace"),
    )  # fmt: skip
    wide, half = K3.rank(8).shared_inter, K3.rank(16).shared_inter
    forms = [Form(K3.hidden, half, H200_BLOCKS), Form(K3.hidden, wide, H200_BLOCKS, wide)]
    return tuple(
        Variant(
            op="situ_mlp",
            name=f"narrow_mlp_d{form.hidden}_i{form.inter}_f{form.first}_b{form.blocks}",
            architectures=DISPATCHED + COMPILED,
            compile=lambda form=form: _compile(form),  # type: ignore[misc]
            parameters=roles,
            source="cute/narrow_mlp.py",
        )
        for form in forms
    )
