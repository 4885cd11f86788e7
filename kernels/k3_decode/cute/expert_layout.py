"""Sizes of the expert kernel and the order in which it reads its weights.

A `Form` is one set of compile-time constants; everything else about sizes follows from it. `prepare` brings
a layer's weights into that order once at load; it is the same for every capacity.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from k3_decode.cute import mxfp4, ring, router
from k3_decode.cute.token_lists import Lists

if TYPE_CHECKING:
    import torch

__all__ = [
    "AREAS", "CAPACITIES", "FINISHERS", "SLOTS", "THREADS", "WARPS", "Form", "PreparedExperts",
    "block_range", "capacity_of", "prepare", "workspace_bytes",
]  # fmt: skip

WARPS = 16
THREADS = 32 * WARPS
FINISHERS = 2
"""Warps that in phase 1 add the K slices of finished tiles and apply SiTU, so that nobody else waits for
it.
"""
AREAS = 4
"""Stages of a block's ring in phase 1, each a whole tile."""
SLOTS = 2 * WARPS
"""Stages of phase 2, two a warp, in the memory of the areas."""
CAPACITIES = (8, 16, 64)
MAX_CHUNK_GROUPS = 6
"""Scale groups of K that a warp takes at once in phase 2: 24 registers of activations."""


@dataclass(frozen=True, slots=True)
class Form:
    """Compile-time constants of one kernel and what follows from them."""

    latent: int
    inter: int
    experts: int
    top_k: int
    capacity: int
    """Most tokens of a launch: 8, 16 or 64."""
    selects: bool = False
    """Whether the launch selects one token's experts itself, from logits (`router.py`)."""
    meets_by_value: bool = False
    """Whether blocks wait for each other's hidden rows by looking at them, not at a counter."""

    @property
    def slices(self) -> int:
        """K slices of phase 1, one a warp."""
        total = self.latent // mxfp4.GROUP
        return max(n for n in range(1, WARPS - FINISHERS + 1) if total % n == 0)

    @property
    def slice_groups(self) -> int:
        return self.latent // mxfp4.GROUP // self.slices

    @property
    def tiles(self) -> int:
        """Tiles of an expert's w13: 8 gate and 8 up rows each."""
        return self.inter // 8

    @property
    def chunk_groups(self) -> int:
        """Scale groups that a warp multiplies at once in phase 2."""
        total = self.inter // mxfp4.GROUP
        fits = [g for g in range(1, MAX_CHUNK_GROUPS + 1) if total % g == 0 and (total // g).bit_count() == 1]
        return max(fits)

    @property
    def chunks(self) -> int:
        """Chunks along K in phase 2."""
        return self.inter // mxfp4.GROUP // self.chunk_groups

    @property
    def parts(self) -> int:
        """Chunks of a phase 2 stage: while one is multiplied, the other's activations arrive."""
        return 2 if self.chunks % 2 == 0 else 1

    @property
    def columns(self) -> int:
        """Tiles of 16 output columns a block owns."""
        return 2 if self.latent % 32 == 0 else 1

    @property
    def k_warps(self) -> int:
        """Warps that split K in phase 2."""
        return min(self.chunks // self.parts, WARPS // self.columns)

    @property
    def lanes(self) -> int:
        """Warps that split the experts in phase 2."""
        return WARPS // self.columns // self.k_warps

    @property
    def loops(self) -> int:
        """Phase 2 stages of a warp for one expert."""
        return self.chunks // self.parts // self.k_warps

    @property
    def owners(self) -> int:
        """Blocks that own output columns."""
        return self.latent // 16 // self.columns

    @property
    def tile_bytes(self) -> int:
        """A tile of w13, all its slices."""
        return self.slices * mxfp4.stage_bytes(self.slice_groups)

    @property
    def slot_bytes(self) -> int:
        """A phase 2 stage of one warp."""
        return self.parts * mxfp4.stage_bytes(self.chunk_groups)

    @property
    def area_bytes(self) -> int:
        """A tile in phase 1, two slots of each of four warps in phase 2."""
        size = max(self.tile_bytes, SLOTS // AREAS * self.slot_bytes)
        return size + -size % 128

    @property
    def lists(self) -> Lists:
        """The tokens by expert, after the barriers in shared memory."""
        return Lists(self.experts, self.top_k, self.capacity, THREADS)

    @property
    def scratch_bytes(self) -> int:
        """Partial sums of phase 1, a place for each area."""
        return AREAS * self.slices * 256

    @property
    def totals_bytes(self) -> int:
        """Accumulators of phase 2. No memory is shared with phase 1, so that a race checker sees none."""
        return WARPS * self.capacity * 64

    @property
    def ring_bytes(self) -> int:
        return AREAS * self.area_bytes

    @property
    def shared_bytes(self) -> int:
        sums = self.scratch_bytes + self.totals_bytes
        return self.ring_bytes + sums + (AREAS + SLOTS) * 8 + self.lists.size + self.choice_bytes

    @property
    def round_bytes(self) -> int:
        """Hidden rows of a launch that meets by values; two such places lie behind the counters."""
        return round_bytes(self.inter, self.top_k)

    @property
    def hidden_offset(self) -> int:
        """Where the hidden rows of launches that meet by counters begin in the workspace."""
        return ring.COUNTER_BYTES + 2 * self.round_bytes

    @property
    def choice_bytes(self) -> int:
        """The selection's keys and scores, after the lists."""
        return router.space_bytes(self.experts) if self.selects else 0


@dataclass(frozen=True, slots=True)
class PreparedExperts:
    """One layer's routed experts in the kernel's order."""

    w13: "torch.Tensor"
    w2: "torch.Tensor"
    latent: int
    inter: int
    experts: int


def prepare(
    *, w13: "torch.Tensor", w13_scale: "torch.Tensor", w2: "torch.Tensor", w2_scale: "torch.Tensor"
) -> PreparedExperts:
    """Reorder one layer's weights as `ops/experts.py` states them, a few experts at a time; at load time."""
    import torch

    count, rows, half = w13.shape
    latent, inter = 2 * half, rows // 2
    form = Form(latent, inter, count, 1, 8)
    size_1, size_2 = mxfp4.stage_bytes(form.slice_groups), mxfp4.stage_bytes(form.chunk_groups)
    first = torch.empty(count, form.tiles * form.slices * size_1, dtype=torch.uint8, device=w13.device)
    second = torch.empty(count, latent // 16 * form.chunks * size_2, dtype=torch.uint8, device=w13.device)
    step = max(1, (1 << 25) // (rows * half))
    for begin in range(0, count, step):
        part = slice(begin, min(begin + step, count))
        codes, scales = (
            t[part].unflatten(1, (2, form.tiles, 8)).transpose(1, 2).flatten(0, 1) for t in (w13, w13_scale)
        )
        first[part] = mxfp4.pack_stages(codes, scales, form.slice_groups).view(-1, first.shape[1])
        codes, scales = (t[part].unflatten(1, (latent // 16, 2, 8)).flatten(0, 1) for t in (w2, w2_scale))
        second[part] = mxfp4.pack_stages(codes, scales, form.chunk_groups).view(-1, second.shape[1])
    return PreparedExperts(first.view(-1), second.view(-1), latent, inter, count)


def block_range(block: Any, units: Any, blocks: Any) -> tuple[Any, Any]:
    """First unit and number of units of a block: contiguous, as even as whole units allow."""
    first = block * units // blocks
    return first, (block + 1) * units // blocks - first


def workspace_bytes(*, inter: int, top_k: int, tokens: int = 64) -> int:
    """Size of the uint8 `workspace` that `experts` needs; zero it once, then layers may share it."""
    return ring.COUNTER_BYTES + 2 * round_bytes(inter, top_k) + tokens * top_k * inter * 2


def round_bytes(inter: int, top_k: int) -> int:
    """Hidden rows of the most tokens of a launch that meets by values."""
    return CAPACITIES[0] * top_k * inter * 2


def capacity_of(tokens: int) -> int:
    """The smallest compiled capacity that holds `tokens`."""
    for capacity in CAPACITIES:
        if tokens <= capacity:
            return capacity
    raise ValueError(f"experts: {tokens} tokens, but a launch holds at most {CAPACITIES[-1]}; split the step")
