"""A gated MLP with SiTU in two launches: the shared expert's shard, and layer 0's dense FFN.

Scope: sm_90a (run), sm_100a and sm_103a (compiled). `hidden` and `inter` multiples of 32, 1 to 64 tokens.

Layout: `x` and `out` [B,D] bf16 (row stride a multiple of 8). `prepare` reorders the weights once at load:
rows in tiles of 8 (for `gate_up` 4 gate and 4 up rows, alternating), four tiles side by side, K in steps of
16, each step in fragment order, the same for every capacity. `workspace` holds the hidden rows (bf16
[B,S]).

Schedule: one kernel, launched for gate_up with SiTU and again for down. A block owns a few tiles of rows;
its warps, and where that fills the machine the blocks of a cluster, split K. Each warp streams its weights
by bulk copies through its own ring, which starts before the wait on the previous kernel (weights are
constant); so the down weights arrive while gate_up still runs. Partial sums meet in shared memory, then
over the cluster.

Numerics: bf16 products, fp32 sums, warps and then blocks in ascending order of K; SiTU in fp32 on unrounded
sums, hidden values rounded to bf16 as stock does, the output rounded once. The same bits in every run. NaN
and infinities propagate.

Validation: `tests/k3_decode/cute/test_situ_mlp.py` compiles the variants for the three architectures and
replays packing and fragment maps in torch; its GPU tests compare cells with the float64 oracle. sm_100a and
sm_103a were never run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from k3_decode.cute import instructions as ins
from k3_decode.cute import ring
from k3_decode.cute.variant import COMPILED, DISPATCHED, Variant

if TYPE_CHECKING:
    import torch

__all__ = ["Form", "PreparedMlp", "pack_tiles", "prepare", "situ_mlp", "variants", "workspace_bytes"]

OP_INDEX = 6
"""Place of the op in the launch counters."""
CAPACITIES = (8, 16, 32, 64)
STEP = 16
"""K of one matrix instruction."""
TILE = 8
"""Weight rows of a tile: the N side of one matrix instruction."""
QUAD = 4
"""Tiles that lie side by side in memory."""
STEP_BYTES = QUAD * TILE * STEP * 2
"""One step of four tiles."""
FEW_BLOCKS = 96
"""Blocks that still keep an H200 busy, each with a deep ring."""
HELD_WORDS = 56
"""Most registers of activations that a warp holds for its whole share of K; above, it loads them stage by
stage.
"""
MULTIPROCESSORS = 132
DEEP_STAGE, DEEP_RING = 8192, 16384
"""Aims for a stage and a warp's ring of gate_up where a multiprocessor holds one block, and at 32 tokens."""
SHALLOW_STAGE, SHALLOW_RING = 2048, 8192
"""The same where several blocks share one; more in flight gains nothing (measured at TP8)."""
DOWN_STAGE, DOWN_RING = 4096, 12288
"""The same for down."""


@dataclass(frozen=True, slots=True)
class Form:
    """Compile-time constants of one launch and what follows from them."""

    rows: int
    """Weight rows: twice the inter width, or the hidden width."""
    width: int
    """K."""
    capacity: int
    """Most tokens: 8, 16, 32 or 64."""
    has_gate: bool
    """Whether rows are gate and up pairs, combined by SiTU."""

    @property
    def halves(self) -> int:
        """Groups of 8 tokens."""
        return self.capacity // 8

    @property
    def tiles(self) -> int:
        """Tiles of a block: eight read the activations half as often, four make more blocks."""
        total = self.rows // TILE
        is_wide = self.capacity > 32 and total % 8 == 0 and total // 8 * self.cluster >= FEW_BLOCKS
        return 8 if is_wide else 4

    @property
    def cluster(self) -> int:
        """Blocks that split K: so many that at 32 tokens a warp can hold its activations."""
        if not self.has_gate:
            return 1
        return max(n for n in (1, 2, 4, 8 if self.capacity == 32 else 4) if self.width // STEP % n == 0)

    @property
    def blocks(self) -> int:
        """Blocks of the launch."""
        return self.rows // TILE // self.tiles * self.cluster

    @property
    def _aims(self) -> tuple[int, int]:
        if not self.has_gate:
            return DOWN_STAGE, DOWN_RING
        is_deep = self.capacity == 32 or (self.capacity < 32 and self.blocks <= MULTIPROCESSORS)
        return (DEEP_STAGE, DEEP_RING) if is_deep else (SHALLOW_STAGE, SHALLOW_RING)

    @property
    def warps(self) -> int:
        """Warps of a block that split K."""
        most = 4 if not self.has_gate and self.capacity <= 16 else 8
        steps = self.width // STEP // self.cluster
        return max(n for n in range(1, most + 1) if steps % n == 0)

    @property
    def steps(self) -> int:
        """Steps of K of a warp."""
        return self.width // STEP // self.cluster // self.warps

    @property
    def stage_steps(self) -> int:
        most = max(1, self._aims[0] // STEP_BYTES)
        return max(n for n in range(1, most + 1) if self.steps % n == 0)

    @property
    def parts(self) -> int:
        """Stages of a warp's whole stream."""
        return self.steps // self.stage_steps

    @property
    def stage_size(self) -> int:
        return self.tiles // QUAD * self.stage_steps * STEP_BYTES

    @property
    def stages(self) -> int:
        """Stages of the ring."""
        return min(self.parts, max(2, self._aims[1] // self.stage_size))

    @property
    def step_words(self) -> int:
        """Registers of activations a step: half a fragment for 8 tokens, a whole one for 16."""
        return 2 * self.halves

    @property
    def holds_all(self) -> bool:
        return self.steps * self.step_words <= HELD_WORDS

    @property
    def pairs(self) -> int:
        """Pairs of neighbouring rows times tokens that a block computes."""
        return self.tiles * self.halves * 32

    @property
    def ring_bytes(self) -> int:
        """The ring, whose place the warps' partial sums take at the end."""
        return max(self.warps * self.stages * self.stage_size, self.warps * self.pairs * 8)

    @property
    def shared_bytes(self) -> int:
        return self.ring_bytes + self.pairs * 8 + self.warps * self.stages * 8


@cute.kernel
def _product(
    x: cute.Tensor,
    weight: cute.Tensor,
    out: cute.Tensor,
    launches: cute.Tensor,
    form: cutlass.Constexpr,
):
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    lane = tid % 32
    warp = cute.arch.make_warp_uniform(tid // 32)
    row, quarter = lane // 4, lane % 4
    tokens = x.shape[0]
    group, rank = bid // form.cluster, bid % form.cluster
    tiles, size, threads = form.tiles, form.stage_size, form.warps * 32

    base = cute.arch.get_dyn_smem(Uint8, 128).toint()
    ring_at = base + warp * (form.stages * size)
    sums_at = base + form.ring_bytes
    bars_at = sums_at + form.pairs * 8 + warp * (form.stages * 8)
    share = rank * form.warps + warp
    # The steps of four tiles lie together; a stage takes the same steps of all the block's tiles.
    weight_at = ins.byte_address(weight) + Int64(group * (tiles // QUAD)) * (form.width // STEP * STEP_BYTES)
    weight_at = weight_at + share * (form.steps * STEP_BYTES)
    if lane == 0:
        ring.make_barriers(bars_at, form.stages)
        for s in cutlass.range_constexpr(form.stages):
            _fetch(weight_at + s * (form.stage_steps * STEP_BYTES), ring_at + s * size, bars_at + s * 8, form)
    cute.arch.sync_threads()
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()

    x_at = ins.byte_address(x) + share * (form.steps * STEP * 2) + quarter * 8
    held = []
    if cutlass.const_expr(form.holds_all):
        for s in cutlass.range_constexpr(form.steps):
            held.extend(_load_step(x_at + s * (STEP * 2), x.stride[0] * 2, row, tokens, form))
    sums = cute.make_rmem_tensor((tiles * form.halves * 2,), Float32)
    for j in cutlass.range_constexpr(tiles * form.halves * 2):
        sums[j] = Float32(0.0)
    if cutlass.const_expr(form.holds_all):
        for part in cutlass.range_constexpr(form.parts):
            slot = part % form.stages
            ring.wait(bars_at + slot * 8, Int32(part // form.stages % 2))
            first = part * form.stage_steps * form.step_words
            values = held[first : first + form.stage_steps * form.step_words]
            _multiply_stage(ring_at + slot * size, lane, values, sums, form)
            if cutlass.const_expr(part + form.stages < form.parts):
                cute.arch.sync_warp()
                if lane == 0:
                    there = weight_at + (part + form.stages) * (form.stage_steps * STEP_BYTES)
                    _fetch(there, ring_at + slot * size, bars_at + slot * 8, form)
    else:
        slot, phase = Int32(0), Int32(0)
        stage_words = form.stage_steps * form.step_words
        ahead = cute.make_rmem_tensor((stage_words,), Int32)
        _load_stage(ahead, x_at, x.stride[0] * 2, row, tokens, form)
        for part in cutlass.range(form.parts, unroll=1):
            values = [ahead[j] for j in range(stage_words)]
            if part + 1 < form.parts:
                at = x_at + Int64(part + 1) * (form.stage_steps * STEP * 2)
                _load_stage(ahead, at, x.stride[0] * 2, row, tokens, form)
            ring.wait(bars_at + slot * 8, phase)
            _multiply_stage(ring_at + slot * size, lane, values, sums, form)
            cute.arch.sync_warp()
            if lane == 0 and part + form.stages < form.parts:
                there = weight_at + Int64(part + form.stages) * (form.stage_steps * STEP_BYTES)
                _fetch(there, ring_at + slot * size, bars_at + slot * 8, form)
            slot = slot + 1
            if slot == form.stages:
                slot = Int32(0)
                phase = phase ^ 1

    # All rings are drained: their place holds the warps' sums now.
    cute.arch.sync_threads()
    for j in cutlass.range_constexpr(tiles * form.halves):
        place = base + (warp * form.pairs + j * 32 + lane) * 8
        ins.asm("st.shared.v2.f32 [$0], {$1,$2};", "r,f,f", [place, sums[2 * j], sums[2 * j + 1]])
    cute.arch.sync_threads()
    for p in cutlass.range(tid, form.pairs, threads, unroll=1):
        low, high = Float32(0.0), Float32(0.0)
        for w in cutlass.range_constexpr(form.warps):
            part_low, part_high = ins.asm(
                "ld.shared.v2.f32 {$0,$1}, [$2];", "=f,=f,r", [base + (w * form.pairs + p) * 8], [Float32] * 2
            )
            low, high = low + part_low, high + part_high
        if cutlass.const_expr(form.cluster == 1):
            _store_pair(out, p, low, high, group, tokens, form)
        else:
            ins.asm("st.shared.v2.f32 [$0], {$1,$2};", "r,f,f", [sums_at + p * 8, low, high])
    if cutlass.const_expr(form.cluster > 1):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        own = form.pairs // form.cluster
        for p in cutlass.range(rank * own + tid, rank * own + own, threads, unroll=1):
            low, high = Float32(0.0), Float32(0.0)
            for peer in cutlass.range_constexpr(form.cluster):
                there = ins.cluster_address(sums_at + p * 8, Int32(peer))
                part_low, part_high = ins.asm(
                    "ld.shared::cluster.v2.f32 {$0,$1}, [$2];", "=f,=f,r", [there], [Float32] * 2
                )
                low, high = low + part_low, high + part_high
            _store_pair(out, p, low, high, group, tokens, form)
        # No block may leave while another reads its sums.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    if tid == 0 and bid == 0:
        ins.add_launch(ins.byte_address(launches) + OP_INDEX * 4)


@cute.jit
def _fetch(at: Int64, to: Int32, bar: Int32, form: cutlass.Constexpr):
    """One thread: ask for a stage, the same steps of each of the block's tiles."""
    piece = form.stage_steps * STEP_BYTES
    ring.expect(bar, form.stage_size)
    for t in cutlass.range_constexpr(form.tiles // QUAD):
        ins.bulk_load(to + t * piece, at + t * (form.width // STEP * STEP_BYTES), Int32(piece), bar)


@cute.jit
def _store_pair(
    out: cute.Tensor,
    pair: Int32,
    low: Float32,
    high: Float32,
    group: Int32,
    tokens: Int32,
    form: cutlass.Constexpr,
):
    """SiTU of a gate and up pair, or two neighbouring output columns; pair = (tile, group of 8 tokens,
    lane).
    """
    lane = pair % 32
    token = pair // 32 % form.halves * 8 + lane // 4
    tile = group * form.tiles + pair // (32 * form.halves)
    if token < tokens:
        to = ins.byte_address(out) + Int64(token) * out.stride[0] * 2
        if cutlass.const_expr(form.has_gate):
            value = ring.situ(low, high)
            to = to + (tile * 4 + lane % 4) * 2
            ins.asm("{ .reg .b16 h; cvt.rn.bf16.f32 h, $1; st.global.b16 [$0], h; }", "l,f", [to, value])
        else:
            ins.store_word(to + (tile * 4 + lane % 4) * 4, ins.pack_halves(low, high))


def _load_step(at: Int64, stride: Any, row: Int32, tokens: Int32, form: Form) -> list[Int32]:
    """Activation fragments of one step: for each 8 tokens the two words of this lane's token."""
    words: list[Int32] = []
    for half in range(form.halves):
        token = row + half * 8
        words.extend(_load_pair_if(at + Int64(cutlass.min(token, tokens - 1)) * stride, token < tokens))
    return words


@cute.jit
def _load_stage(
    words: cute.Tensor, at: Int64, stride: Int64, row: Int32, tokens: Int32, form: cutlass.Constexpr
):
    """Activation fragments of a stage's steps."""
    for s in cutlass.range_constexpr(form.stage_steps):
        loaded = _load_step(at + s * (STEP * 2), stride, row, tokens, form)
        for j in cutlass.range_constexpr(form.step_words):
            words[s * form.step_words + j] = loaded[j]


def _multiply_stage(at: Int32, lane: Int32, values: list[Int32], sums: Any, form: Form) -> None:
    """Add a stage's products to the sums [tile, group of 8 tokens, 2 rows]."""
    for pair in range(form.tiles // 2):
        # Four tiles of a step are two pieces of 512 bytes, 16 bytes a lane: two tiles' fragments.
        first = at + pair // 2 * (form.stage_steps * STEP_BYTES) + pair % 2 * 512 + lane * 16
        words = [ins.shared_load(first + s * STEP_BYTES) for s in range(form.stage_steps)]
        for tile in range(2):
            fragments = [w[2 * tile : 2 * tile + 2] for w in words]
            _multiply_tile(fragments, values, sums, (2 * pair + tile) * form.halves * 2, form)


def _multiply_tile(
    fragments: list[tuple[Int32, ...]], values: list[Int32], sums: Any, first: int, form: Form
) -> None:
    """Add one tile's products to its sums, which start at `first`: a 16-row instruction for 16 tokens, or
    half of one.
    """
    width = min(2, form.halves)
    for block in range(max(1, form.halves // 2)):
        place = first + 4 * block
        total = [sums[place + j] for j in range(2 * width)] + [Float32(0.0)] * (4 - 2 * width)
        for s, fragment in enumerate(fragments):
            at = s * form.step_words + 4 * block
            step = values[at : at + 2 * width]
            a = (step[0], step[2], step[1], step[3]) if width == 2 else (step[0], Int32(0), step[1], Int32(0))
            total = list(ins.mma_bf16(a, fragment, total))
        for j in range(2 * width):
            sums[place + j] = total[j]


def _load_pair_if(address: Int64, condition: Any) -> tuple[Int32, Int32]:
    """8 bytes that an earlier kernel wrote, or zeros without a read."""
    template = (
        "{ .reg .pred p; setp.ne.s32 p, $3, 0; mov.b32 $0, 0; mov.b32 $1, 0; "
        "@p ld.global.v2.b32 {$0,$1}, [$2]; }"
    )
    words: tuple[Int32, Int32] = ins.asm(template, "=&r,=&r,l,r", [address, Int32(condition)], [Int32] * 2)
    return words


@cute.jit
def _launch(
    x: cute.Tensor,
    weight: cute.Tensor,
    out: cute.Tensor,
    launches: cute.Tensor,
    stream: Any,
    form: cutlass.Constexpr,
):
    _product(x, weight, out, launches, form).launch(
        grid=(form.blocks, 1, 1),
        block=(form.warps * 32, 1, 1),
        cluster=(form.cluster, 1, 1),
        smem=form.shared_bytes,
        stream=stream,
        use_pdl=True,
    )


@cache
def _compile(form: Form) -> Callable[..., None]:
    """The launch for one set of constants; tokens and strides stay symbolic."""
    tokens = cute.sym_int32()

    def rows(width: int) -> Any:
        return make_fake_tensor(
            BFloat16, (tokens, width), (cute.sym_int64(divisibility=8), 1), assumed_align=16
        )

    x, out = rows(form.width), rows(form.rows // 2 if form.has_gate else form.rows)
    weight = make_fake_tensor(Uint8, (cute.sym_int64(),), (1,), assumed_align=128)
    launches = make_fake_tensor(Int32, (cute.sym_int32(),), (1,), assumed_align=4)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    compiled: Callable[..., None] = cute.compile(
        _launch, x, weight, out, launches, stream, form, options="--enable-tvm-ffi"
    )
    return compiled


@dataclass(frozen=True, slots=True)
class PreparedMlp:
    """One MLP's weights in the kernel's order."""

    gate_up: "torch.Tensor"
    down: "torch.Tensor"
    hidden: int
    inter: int


def pack_tiles(rows: "torch.Tensor") -> "torch.Tensor":
    """bf16 [M, K] -> uint8 [M/32, K/16, 2, 32 lanes, 2 tiles, 4 values]: lane 4r + q holds row r's values
    4q..4q+3.
    """
    import torch

    quads, steps = rows.shape[0] // (QUAD * TILE), rows.shape[1] // STEP
    packed = rows.view(quads, 2, 2, TILE, steps, 4, 4).permute(0, 4, 1, 3, 5, 2, 6).contiguous()
    return packed.view(torch.uint8).flatten()


def prepare(*, gate_up_weight: "torch.Tensor", down_weight: "torch.Tensor") -> PreparedMlp:
    """Reorder one MLP's weights; for load time."""
    hidden, inter = down_weight.shape
    halves = gate_up_weight.view(2, inter // 4, 4, hidden).permute(1, 2, 0, 3).reshape(2 * inter, hidden)
    return PreparedMlp(pack_tiles(halves), pack_tiles(down_weight), hidden, inter)


def workspace_bytes(*, inter: int, tokens: int = 64) -> int:
    """Size of the uint8 `workspace` that `situ_mlp` needs; layers may share it."""
    return tokens * inter * 2


def situ_mlp(
    *,
    x: "torch.Tensor",
    prepared: PreparedMlp,
    workspace: "torch.Tensor",
    out: "torch.Tensor",
    launches: "torch.Tensor",
) -> None:
    """Write `down(SiTU(gate(x), up(x)))` to `out`, in two launches."""
    import torch

    tokens, inter = x.shape[0], prepared.inter
    capacity = next((n for n in CAPACITIES if tokens <= n), None)
    if capacity is None:
        raise ValueError(
            f"situ_mlp: {tokens} tokens, but a launch holds at most {CAPACITIES[-1]}; split the step"
        )
    hidden = workspace[: tokens * inter * 2].view(torch.bfloat16).view(tokens, inter)
    up = Form(2 * inter, prepared.hidden, capacity, True)
    down = Form(prepared.hidden, inter, capacity, False)
    _compile(up)(x, prepared.gate_up, hidden, launches)
    _compile(down)(hidden, prepared.down, out, launches)


def variants() -> tuple[Variant, ...]:
    """K3's shared expert and dense FFN at TP 1 to 16, and the small models, for 8 to 64 tokens."""
    roles = (
        ("x", "activation"), ("weight", "weight"), ("out", "output"), ("launches", "workspace"),
    )  # fmt: skip
    sizes = [(7168, 6144 // tp) for tp in (1, 2, 4, 8, 16)] + [(7168, 33792 // tp) for tp in (1, 2, 4, 8, 16)]
    sizes += [(192, inter) for inter in (384, 192, 128, 64)] + [(128, inter) for inter in (128, 64, 32)]
    forms = [
        form
        for hidden, inter in sizes
        for capacity in CAPACITIES
        for form in (Form(2 * inter, hidden, capacity, True), Form(hidden, inter, capacity, False))
    ]
    return tuple(
        Variant(
            op="situ_mlp",
            name=f"situ_mlp_{'up' if form.has_gate else 'down'}_r{form.rows}_k{form.width}_t{form.capacity}",
            architectures=DISPATCHED + COMPILED,
            compile=lambda form=form: _compile(form),  # type: ignore[misc]
            parameters=roles,
            source="cute/situ_mlp.py",
            is_smoke=(form.rows, form.width, form.capacity) == (1536, 7168, 8),
            max_cluster=form.cluster,
        )
        for form in forms
    )
