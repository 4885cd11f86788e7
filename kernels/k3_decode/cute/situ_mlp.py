"""A gated MLP with SiTU in one launch: the shared expert's shard, and layer 0's dense FFN.

Scope: sm_90a (run), sm_100a and sm_103a (compiled). `hidden` and `inter` multiples of 16, 1 to 8 tokens a launch (more are
split into several launches). The launch must be able to hold one block on every multiprocessor at a time.

Layout: `x` and `out` [B,D] bf16 (row stride a multiple of 8). `prepare` reorders the weights once at load: rows in
tiles of 8 (for `gate_up` 4 gate and 4 up rows, alternating), K in steps of 16, a tile's steps in fragment order.
`workspace` holds the hidden rows (bf16 [8,S]) and, at its start, two counters that are zero between launches (zero it
once).

Schedule: persistent, one block a multiprocessor. Phase 1: a block takes a contiguous range of gate/up tiles, 16 warps
split K, each streams its slices by bulk copies through its own ring, which starts before the wait on the previous kernel
(weights are constant). Phase 2: down tiles, warps split K and tiles; the ring runs on into phase 2's weights
while the blocks wait for each other.

Numerics: bf16 products, fp32 sums, K slices in ascending order; SiTU in fp32 on unrounded sums, hidden values
rounded to bf16 as stock does, the output rounded once. The same bits in every run. NaN and infinities propagate.

Validation: `tests/k3_decode/cute/test_situ_mlp.py` compiles the variants for the three architectures and replays packing
and fragment maps in torch; its GPU tests compare cells with the float64 oracle. sm_100a and sm_103a were never run.
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
WARPS = 16
THREADS = 32 * WARPS
TOKENS = 8
"""Most tokens of a launch."""
STEP = 16
"""K of one matrix instruction."""
TILE = 8
"""Weight rows of a tile: the N side of one matrix instruction."""
STEP_BYTES = TILE * STEP * 2
MAX_STAGE_STEPS = 8
STAGES = 3
FEWEST_BLOCKS = 112


@dataclass(frozen=True, slots=True)
class Form:
    """Compile-time constants of one kernel and what follows from them."""

    hidden: int
    inter: int

    @property
    def slices(self) -> int:
        """K slices of phase 1, one a warp."""
        return max(n for n in range(1, WARPS + 1) if self.hidden // STEP % n == 0)

    @property
    def slice_steps(self) -> int:
        return self.hidden // STEP // self.slices

    @property
    def stage_steps(self) -> int:
        return max(n for n in range(1, MAX_STAGE_STEPS + 1) if self.slice_steps % n == 0)

    @property
    def parts(self) -> int:
        """Stages of a slice."""
        return self.slice_steps // self.stage_steps

    @property
    def tiles(self) -> int:
        """Tiles of gate_up: 4 hidden values each."""
        return self.inter // 4

    @property
    def chunk_steps(self) -> int:
        """Steps of a phase 2 stage: as much of K as possible at once, in as large pieces as possible."""
        total = self.inter // STEP
        fits = [n for n in range(1, MAX_STAGE_STEPS + 1) if total % n == 0]
        return max(fits, key=lambda n: (n * _power_of_two(total // n), n))

    @property
    def chunks(self) -> int:
        return self.inter // STEP // self.chunk_steps

    @property
    def k_warps(self) -> int:
        """Warps that split K in phase 2."""
        return _power_of_two(self.chunks)

    @property
    def lanes(self) -> int:
        """Warps that split the tiles in phase 2."""
        return WARPS // self.k_warps

    @property
    def most_tiles(self) -> int:
        """Down tiles of one block at most."""
        return -(-(self.hidden // TILE) // FEWEST_BLOCKS)

    @property
    def stage_size(self) -> int:
        return max(self.stage_steps, self.chunk_steps) * STEP_BYTES

    @property
    def ring_bytes(self) -> int:
        return WARPS * STAGES * self.stage_size

    @property
    def scratch_bytes(self) -> int:
        """Partial sums of phase 1 (two buffers), then of phase 2."""
        return max(2 * WARPS, self.k_warps * self.most_tiles) * 256

    @property
    def shared_bytes(self) -> int:
        return self.ring_bytes + self.scratch_bytes + WARPS * STAGES * 8


def _power_of_two(number: int) -> int:
    """The largest power of two up to 16 that divides `number`."""
    return min(number & -number, WARPS)


@cute.kernel
def _mlp(
    x: cute.Tensor,
    gate_up: cute.Tensor,
    down: cute.Tensor,
    workspace: cute.Tensor,
    out: cute.Tensor,
    launches: cute.Tensor,
    form: cutlass.Constexpr,
):
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    lane = tid % 32
    warp = cute.arch.make_warp_uniform(tid // 32)
    row, quarter = lane // 4, lane % 4
    tokens = x.shape[0]
    steps = form.slice_steps

    base = cute.arch.get_dyn_smem(Uint8, 128).toint()
    ring_at = base + warp * (STAGES * form.stage_size)
    scratch_at = base + form.ring_bytes
    bars_at = scratch_at + form.scratch_bytes + warp * (STAGES * 8)
    gate_up_at, down_at = ins.byte_address(gate_up), ins.byte_address(down)

    first = bid * form.tiles // blocks
    mine = (bid + 1) * form.tiles // blocks - first
    early = mine * form.parts
    if warp >= form.slices:
        early = Int32(0)
    k_warp, tile_lane = warp % form.k_warps, warp // form.k_warps
    loops = form.chunks // form.k_warps
    down_tiles = (form.hidden // TILE - bid + blocks - 1) // blocks
    each = (down_tiles - tile_lane + form.lanes - 1) // form.lanes
    later = each * loops
    if lane == 0:
        ring.make_barriers(bars_at, STAGES)
        for s in cutlass.range_constexpr(STAGES):
            _fetch(
                Int32(s), Int32(s), early, later, each, first, warp, k_warp, tile_lane, bid, blocks,
                gate_up_at, down_at, ring_at, bars_at, form,
            )  # fmt: skip
    cute.arch.sync_threads()
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()

    counter_at = ins.byte_address(workspace)
    hidden_at = counter_at + ring.COUNTER_BYTES
    a = []
    x_at = ins.byte_address(x) + Int64(cutlass.min(row, tokens - 1)) * x.stride[0] * 2
    x_at = x_at + Int64(cutlass.min(warp, form.slices - 1) * (steps * 32) + quarter * 8)
    for s in cutlass.range_constexpr(steps):
        a.append(_load_pair_if(x_at + s * 32, row < tokens))

    stage, phase = Int32(0), Int32(0)
    for i in cutlass.range(mine, unroll=1):
        if warp < form.slices:
            even, odd = [Float32(0.0)] * 4, [Float32(0.0)] * 4
            for part in cutlass.range_constexpr(form.parts):
                ring.wait(bars_at + stage * 8, phase)
                words = _stage_words(ring_at + stage * form.stage_size, lane, form.stage_steps)
                cute.arch.sync_warp()
                if lane == 0:
                    _fetch(
                        i * form.parts + (part + STAGES), stage, early, later, each, first, warp, k_warp,
                        tile_lane, bid, blocks, gate_up_at, down_at, ring_at, bars_at, form,
                    )  # fmt: skip
                for s in cutlass.range_constexpr(form.stage_steps):
                    values = a[part * form.stage_steps + s]
                    even, odd = odd, _multiply(values, words[2 * s : 2 * s + 2], even)
                stage = stage + 1
                if stage == STAGES:
                    stage = Int32(0)
                    phase = phase ^ 1
            place = scratch_at + ((i % 2) * WARPS + warp) * 256 + lane * 8
            ins.asm(
                "st.shared.v2.f32 [$0], {$1,$2};", "r,f,f", [place, even[0] + odd[0], even[1] + odd[1]]
            )
        cute.arch.sync_threads()
        if warp == i % WARPS:
            gate, up = Float32(0.0), Float32(0.0)
            for w in cutlass.range_constexpr(form.slices):
                place = scratch_at + ((i % 2) * WARPS + w) * 256 + lane * 8
                part_gate, part_up = ins.asm(
                    "ld.shared.v2.f32 {$0,$1}, [$2];", "=f,=f,r", [place], [Float32] * 2
                )
                gate, up = gate + part_gate, up + part_up
            if row < tokens:
                to = hidden_at + Int64(row * form.inter + (first + i) * 4 + quarter) * 2
                value = ring.situ(gate, up)
                ins.asm("{ .reg .b16 h; cvt.rn.bf16.f32 h, $1; st.global.b16 [$0], h; }", "l,f", [to, value])

    cute.arch.sync_threads()
    if tid == 0:
        ring.meet_blocks(counter_at, blocks, True)
        if bid == 0:
            ins.add_launch(ins.byte_address(launches) + OP_INDEX * 4)
    cute.arch.sync_threads()

    sums_at = scratch_at + k_warp * (form.most_tiles * 256) + lane * 8
    b = cute.make_rmem_tensor((form.chunk_steps * 2,), Int32)
    for j in cutlass.range_constexpr(form.chunk_steps * 2):
        b[j] = Int32(0)
    h_at = hidden_at + Int64(cutlass.min(row, tokens - 1) * form.inter) * 2 + Int64(quarter * 8)
    for i in cutlass.range(later, unroll=1):
        loop, index = i // each, i % each
        if index == 0:
            at = h_at + Int64((loop * form.k_warps + k_warp) * (form.chunk_steps * 32))
            for s in cutlass.range_constexpr(form.chunk_steps):
                loaded = _load_pair_if(at + s * 32, row < tokens)
                b[2 * s], b[2 * s + 1] = loaded[0], loaded[1]
        ring.wait(bars_at + stage * 8, phase)
        words = _stage_words(ring_at + stage * form.stage_size, lane, form.chunk_steps)
        cute.arch.sync_warp()
        if lane == 0:
            _fetch(
                early + i + STAGES, stage, early, later, each, first, warp, k_warp, tile_lane, bid, blocks,
                gate_up_at, down_at, ring_at, bars_at, form,
            )  # fmt: skip
        even, odd = [Float32(0.0)] * 4, [Float32(0.0)] * 4
        for s in cutlass.range_constexpr(form.chunk_steps):
            even, odd = odd, _multiply((b[2 * s], b[2 * s + 1]), words[2 * s : 2 * s + 2], even)
        place = sums_at + (tile_lane + index * form.lanes) * 256
        low, high = even[0] + odd[0], even[1] + odd[1]
        if loop > 0:
            before = ins.asm("ld.shared.v2.f32 {$0,$1}, [$2];", "=f,=f,r", [place], [Float32] * 2)
            low, high = low + before[0], high + before[1]
        ins.asm("st.shared.v2.f32 [$0], {$1,$2};", "r,f,f", [place, low, high])
        stage = stage + 1
        if stage == STAGES:
            stage = Int32(0)
            phase = phase ^ 1
    cute.arch.sync_threads()
    for i in cutlass.range(warp, down_tiles, WARPS, unroll=1):
        low, high = Float32(0.0), Float32(0.0)
        for k in cutlass.range_constexpr(form.k_warps):
            place = scratch_at + (k * form.most_tiles + i) * 256 + lane * 8
            part_low, part_high = ins.asm(
                "ld.shared.v2.f32 {$0,$1}, [$2];", "=f,=f,r", [place], [Float32] * 2
            )
            low, high = low + part_low, high + part_high
        if row < tokens:
            to = ins.byte_address(out) + Int64(row) * out.stride[0] * 2
            ins.store_word(to + ((bid + i * blocks) * 16 + quarter * 4), ins.pack_halves(low, high))


@cute.jit
def _fetch(
    index: Int32,
    stage: Int32,
    early: Int32,
    later: Int32,
    each: Int32,
    first: Int32,
    warp: Int32,
    k_warp: Int32,
    tile_lane: Int32,
    bid: Int32,
    blocks: Int32,
    gate_up_at: Int64,
    down_at: Int64,
    ring_at: Int32,
    bars_at: Int32,
    form: cutlass.Constexpr,
):
    """One thread: ask for stage number `index` of the warp's sequence, if there is one."""
    size_1, size_2 = form.stage_steps * STEP_BYTES, form.chunk_steps * STEP_BYTES
    to, bar = ring_at + stage * form.stage_size, bars_at + stage * 8
    if index < early:
        tile, part = first + index // form.parts, index % form.parts
        place = Int64((tile * form.slices + warp) * form.parts + part)
        ring.expect(bar, size_1)
        ins.bulk_load(to, gate_up_at + place * size_1, Int32(size_1), bar)
    elif index < early + later:
        step = index - early
        tile = bid + (tile_lane + step % each * form.lanes) * blocks
        place = Int64(tile * form.chunks + step // each * form.k_warps + k_warp)
        ring.expect(bar, size_2)
        ins.bulk_load(to, down_at + place * size_2, Int32(size_2), bar)


def _stage_words(at: Int32, lane: Int32, steps: int) -> list[Int32]:
    """A stage's weight fragments of this lane, two words a step."""
    words: list[Int32] = []
    for pair in range(steps // 2):
        words.extend(ins.shared_load(at + pair * 512 + lane * 16))
    if steps % 2:
        place = at + steps // 2 * 512 + lane * 8
        words.extend(ins.asm("ld.shared.v2.b32 {$0,$1}, [$2];", "=r,=r,r", [place], [Int32] * 2))
    return words


def _multiply(values: Any, words: list[Int32], total: list[Float32]) -> list[Float32]:
    """8 tokens x 16 times 16 x 8 weight rows; the lower half of the 16-row instruction stays empty."""
    nothing = Int32(0)
    return list(ins.mma_bf16((values[0], nothing, values[1], nothing), words, total))


def _load_pair_if(address: Int64, condition: Any) -> tuple[Int32, Int32]:
    """8 bytes that an earlier kernel or block wrote, or zeros without a read."""
    template = (
        "{ .reg .pred p; setp.ne.s32 p, $3, 0; mov.b32 $0, 0; mov.b32 $1, 0; "
        "@p ld.global.v2.b32 {$0,$1}, [$2]; }"
    )
    words: tuple[Int32, Int32] = ins.asm(template, "=&r,=&r,l,r", [address, Int32(condition)], [Int32] * 2)
    return words


@cute.jit
def _launch(
    x: cute.Tensor,
    gate_up: cute.Tensor,
    down: cute.Tensor,
    workspace: cute.Tensor,
    out: cute.Tensor,
    launches: cute.Tensor,
    blocks: Int32,
    stream: Any,
    form: cutlass.Constexpr,
):
    _mlp(x, gate_up, down, workspace, out, launches, form).launch(
        grid=(blocks, 1, 1),
        block=(THREADS, 1, 1),
        smem=form.shared_bytes,
        stream=stream,
        use_pdl=True,
    )


@cache
def _compile(form: Form) -> Callable[..., None]:
    """The launch for one set of constants; tokens, strides and the number of blocks stay symbolic."""
    tokens = cute.sym_int32()

    def rows() -> Any:
        return make_fake_tensor(
            BFloat16, (tokens, form.hidden), (cute.sym_int64(divisibility=8), 1), assumed_align=16
        )

    def raw() -> Any:
        return make_fake_tensor(Uint8, (cute.sym_int64(),), (1,), assumed_align=128)

    x, gate_up, down, workspace, out = rows(), raw(), raw(), raw(), rows()
    launches = make_fake_tensor(Int32, (cute.sym_int32(),), (1,), assumed_align=4)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    compiled: Callable[..., None] = cute.compile(
        _launch, x, gate_up, down, workspace, out, launches, Int32(132), stream, form,
        options="--enable-tvm-ffi",
    )  # fmt: skip
    return compiled


@dataclass(frozen=True, slots=True)
class PreparedMlp:
    """One MLP's weights in the kernel's order."""

    gate_up: "torch.Tensor"
    down: "torch.Tensor"
    form: Form


def pack_tiles(rows: "torch.Tensor", steps: int) -> "torch.Tensor":
    """bf16 [M, K] -> uint8 of stages: tiles of 8 rows, K in stages of `steps` x 16 values, in fragment order."""
    import torch

    tiles, stages = rows.shape[0] // TILE, rows.shape[1] // STEP // steps
    # Lane (row, quarter) holds the 4 values at 4 x quarter of each step: [tile, row, stage, step, quarter, 4].
    view = rows.view(tiles, TILE, stages, steps, 4, 4).permute(0, 2, 3, 1, 4, 5)
    pairs = steps // 2
    even = view[:, :, : 2 * pairs].unflatten(2, (pairs, 2)).permute(0, 1, 2, 4, 5, 3, 6)
    parts = [even.reshape(tiles, stages, -1), view[:, :, 2 * pairs :].reshape(tiles, stages, -1)]
    return torch.cat(parts, dim=2).contiguous().view(torch.uint8).flatten()


def prepare(*, gate_up_weight: "torch.Tensor", down_weight: "torch.Tensor") -> PreparedMlp:
    """Reorder one MLP's weights; for load time."""
    hidden, inter = down_weight.shape
    form = Form(hidden, inter)
    halves = gate_up_weight.view(2, inter // 4, 4, hidden).permute(1, 2, 0, 3).reshape(2 * inter, hidden)
    return PreparedMlp(pack_tiles(halves, form.stage_steps), pack_tiles(down_weight, form.chunk_steps), form)


def workspace_bytes(*, inter: int) -> int:
    """Size of the uint8 `workspace` that `situ_mlp` needs; zero it once, then layers may share it."""
    return ring.COUNTER_BYTES + TOKENS * inter * 2


def situ_mlp(
    *,
    x: "torch.Tensor",
    prepared: PreparedMlp,
    workspace: "torch.Tensor",
    out: "torch.Tensor",
    launches: "torch.Tensor",
) -> None:
    """Write `down(SiTU(gate(x), up(x)))` to `out`, one launch for each 8 tokens."""
    blocks = _multiprocessors(x.device.index)
    if blocks < FEWEST_BLOCKS:
        raise ValueError(f"situ_mlp: {blocks} multiprocessors, but it needs {FEWEST_BLOCKS} blocks at a time")
    launch = _compile(prepared.form)
    for begin in range(0, x.shape[0], TOKENS):
        part = slice(begin, begin + TOKENS)
        launch(x[part], prepared.gate_up, prepared.down, workspace, out[part], launches, blocks)


@cache
def _multiprocessors(device: int) -> int:
    import torch

    return torch.cuda.get_device_properties(device).multi_processor_count


def variants() -> tuple[Variant, ...]:
    """K3's shared expert and dense FFN at TP 1 to 16, and the small models."""
    roles = (
        ("x", "activation"), ("gate_up", "weight"), ("down", "weight"), ("workspace", "workspace"),
        ("out", "output"), ("launches", "workspace"),
    )  # fmt: skip
    forms = [Form(7168, 6144 // tp) for tp in (1, 2, 4, 8, 16)]
    forms += [Form(7168, 33792 // tp) for tp in (1, 2, 4, 8, 16)]
    forms += [Form(192, inter) for inter in (384, 192, 128, 64)] + [Form(128, inter) for inter in (128, 64, 32)]
    return tuple(
        Variant(
            op="situ_mlp",
            name=f"situ_mlp_d{form.hidden}_s{form.inter}",
            architectures=DISPATCHED + COMPILED,
            compile=lambda form=form: _compile(form),  # type: ignore[misc]
            parameters=roles,
            source="cute/situ_mlp.py",
            is_smoke=(form.hidden, form.inter) == (7168, 768),
        )
        for form in forms
    )
