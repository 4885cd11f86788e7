"""Which plan a product of a given shape runs under, from measurements on an H200 (NOTES.md).

Shapes of K3's TP8 and TP16 shards have their own rows in the tables; others follow `_few`, `_many` and
`_wide`, which were read off the same sweeps. An entry of `tuned/sm_90a.json` goes before all of them. Plans
differ in speed only: any plan gives the right product.
Wide steps multiply by warpgroups where the architecture has `wgmma` (sm_90a) and by `mma.sync` elsewhere.
"""

from functools import cache
from typing import NamedTuple

from k3_decode.cute.row_plan import STEP, Plan
from k3_decode.cute.variant import COMPILED, DISPATCHED
from k3_decode.shapes import K3
from k3_decode.tuned import choice

__all__ = ["CAPACITIES", "FEW", "capacity", "has_warpgroups", "plan_for", "plans_by_architecture"]


class Tiling(NamedTuple):
    """A plan without its shape."""

    row_tiles: int
    row_warps: int
    k_warps: int
    cluster: int
    depth: int
    blocks_per_sm: int
    is_grouped: bool = False


def _grouped(warpgroups: int, cluster: int, depth: int, blocks: int = 1) -> Tiling:
    return Tiling(2, 4 * warpgroups, 1, cluster, depth, blocks, is_grouped=True)


MULTIPROCESSORS = 132
"""Of an H200."""
CAPACITIES = (8, 16, 32, 64)
TOKENS = (1, 2, *CAPACITIES)
"""A number of tokens for each plan that a shape may get."""
ROUGH_CAPACITIES = (16, 64)
"""Of shapes without measurements, so that fewer kernels are compiled and audited."""
Shape = tuple[int, int]

FEW: dict[Shape, tuple[Tiling, Tiling]] = {
    (6288, 7168): (Tiling(3, 1, 8, 1, 16, 1), Tiling(3, 4, 2, 2, 6, 1)),
    (3648, 7168): (Tiling(2, 1, 7, 1, 12, 2), Tiling(4, 4, 2, 4, 4, 1)),
    (3216, 7168): (Tiling(2, 1, 8, 1, 10, 2), Tiling(3, 4, 2, 2, 6, 1)),
    (2880, 7168): (Tiling(1, 1, 8, 1, 7, 4), Tiling(4, 4, 2, 4, 4, 1)),
    (7168, 1536): (Tiling(2, 1, 4, 1, 10, 4), Tiling(2, 4, 2, 2, 6, 2)),
    (7168, 768): (Tiling(1, 1, 4, 1, 6, 4), Tiling(4, 1, 4, 1, 6, 2)),
    (20480, 7168): (Tiling(1, 1, 7, 1, 16, 2), Tiling(4, 1, 8, 1, 4, 1)),
    (10240, 7168): (Tiling(1, 1, 7, 1, 16, 2), Tiling(4, 1, 8, 1, 4, 1)),
    (7168, 3584): (Tiling(2, 1, 8, 1, 6, 2), Tiling(2, 4, 2, 2, 6, 2)),
    (4480, 7168): (Tiling(2, 1, 8, 1, 6, 2), Tiling(4, 4, 2, 4, 4, 1)),
    (6016, 7168): (Tiling(1, 1, 8, 1, 12, 2), Tiling(3, 4, 2, 2, 6, 1)),
    (5248, 7168): (Tiling(1, 1, 8, 1, 12, 2), Tiling(3, 4, 2, 2, 6, 1)),
    (2096, 7168): (Tiling(2, 1, 7, 1, 25, 1), Tiling(2, 1, 8, 2, 7, 2)),
    (1048, 7168): (Tiling(1, 1, 4, 4, 14, 4), Tiling(2, 2, 4, 7, 8, 2)),
    (560, 7168): (Tiling(1, 1, 16, 1, 14, 1), Tiling(2, 2, 4, 7, 8, 2)),
    (280, 7168): (Tiling(1, 1, 8, 2, 14, 2), Tiling(2, 2, 4, 7, 8, 2)),
    (896, 3584): (Tiling(1, 1, 8, 2, 7, 2), Tiling(2, 4, 2, 7, 8, 1)),
    (448, 3584): (Tiling(2, 1, 4, 7, 4, 4), Tiling(2, 4, 2, 7, 8, 1)),
    (7168, 384): (Tiling(2, 1, 4, 1, 3, 4), Tiling(2, 1, 4, 1, 3, 4)),
    (1536, 7168): (Tiling(1, 1, 8, 2, 14, 2), Tiling(2, 2, 4, 4, 7, 2)),
    (768, 7168): (Tiling(1, 1, 8, 4, 7, 4), Tiling(2, 2, 4, 7, 8, 2)),
}
"""Best tilings of up to 8 and of up to 16 tokens by (rows, K)."""
SMALLEST: dict[tuple[Shape, int], Tiling] = {
    ((6288, 7168), 2): Tiling(2, 1, 8, 1, 10, 2),
    ((896, 3584), 1): Tiling(1, 1, 4, 4, 7, 4),
}
"""Best tilings of exactly so many tokens, where a layer is faster by 0.5 us or more with them."""
MANY: dict[Shape, tuple[Tiling | None, Tiling, Tiling]] = {
    (6288, 7168): (_grouped(1, 2, 6, 2), _grouped(1, 1, 10), _grouped(1, 1, 10)),
    (3648, 7168): (_grouped(1, 4, 9, 2), _grouped(1, 2, 10), _grouped(1, 2, 10)),
    (3216, 7168): (None, _grouped(1, 4, 6, 2), _grouped(1, 2, 8)),
    (7168, 1536): (_grouped(1, 1, 8), _grouped(1, 1, 8), _grouped(1, 1, 8)),
    (7168, 768): (_grouped(1, 1, 8), _grouped(1, 1, 8), _grouped(1, 1, 8)),
    (20480, 7168): (_grouped(1, 2, 8, 2), _grouped(2, 1, 4, 2), _grouped(2, 1, 4, 2)),
    (10240, 7168): (None, _grouped(1, 4, 6, 2), _grouped(2, 1, 8)),
    (7168, 3584): (None, _grouped(2, 2, 6), _grouped(2, 2, 6)),
    (4480, 7168): (None, _grouped(2, 3, 6), _grouped(2, 3, 6)),
    (2096, 7168): (_grouped(1, 6, 9, 2), _grouped(1, 3, 10), _grouped(1, 3, 8)),
    (1048, 7168): (None, _grouped(1, 6, 8), _grouped(1, 6, 8)),
    (560, 7168): (None, _grouped(1, 8, 6), _grouped(1, 8, 6)),
    (280, 7168): (None, _grouped(1, 8, 6), _grouped(1, 8, 6)),
    (896, 3584): (None, _grouped(1, 7, 6), _grouped(1, 7, 6)),
    (448, 3584): (None, _grouped(1, 7, 6), _grouped(1, 7, 6)),
    (1536, 7168): (_grouped(2, 8, 6), _grouped(2, 8, 6), _grouped(2, 8, 5)),
    (2880, 7168): (None, _grouped(1, 5, 6, 2), _grouped(1, 5, 5, 2)),
    (7168, 384): (None, _grouped(1, 1, 6), _grouped(1, 1, 6)),
    (768, 7168): (None, _grouped(1, 8, 10), _grouped(1, 8, 8)),
}
"""Best tilings of up to 16, 32 and 64 tokens by warpgroups; None: `mma.sync` is as fast."""


def capacity(rows: int, k: int, tokens: int) -> int:
    """The least token capacity that holds `tokens` among those a shape is compiled for."""
    sizes = CAPACITIES if (rows, k) in FEW else ROUGH_CAPACITIES
    return next(size for size in sizes if tokens <= size)


@cache
def has_warpgroups() -> bool:
    """Whether this process's device multiplies by warpgroups (Hopper)."""
    import torch

    return torch.cuda.get_device_capability()[0] == 9


def plan_for(rows: int, k: int, tokens: int, is_grouped: bool, *, is_late: bool = False) -> Plan:
    """The plan of a product with `rows` weight rows of `k` elements, for `tokens` tokens.

    `is_grouped`: whether the architecture has warpgroup products. `is_late`: see `Plan`.
    """
    room = capacity(rows, k, tokens)
    tiling = _tuned(rows, k, room) if is_grouped else None
    if tiling is None and is_grouped and k % 64 == 0 and rows >= 256 and room > 8:
        known = MANY.get((rows, k))
        if known is not None:
            tiling = known[CAPACITIES.index(room) - 1]
        elif room > 16:
            tiling = _many(rows, k)
    if tiling is None and room <= 16:
        few = FEW.get((rows, k))
        tiling = _few(rows, k) if few is None else few[0 if room == 8 else 1]
        tiling = SMALLEST.get(((rows, k), tokens), tiling)
    elif tiling is None:
        tiling = _wide(rows, k)
    return Plan(
        k=k,
        tokens=room,
        row_tiles=tiling.row_tiles,
        row_warps=tiling.row_warps,
        k_warps=tiling.k_warps,
        cluster=tiling.cluster,
        depth=tiling.depth,
        blocks_per_sm=tiling.blocks_per_sm,
        is_grouped=tiling.is_grouped,
        is_whole=rows % (8 * tiling.row_tiles * tiling.row_warps) == 0,
        is_late=is_late,
    )


def _tuned(rows: int, k: int, room: int) -> Tiling | None:
    """What a search found faster than the tables here (`tuned/`); None for most shapes."""
    found = choice("sm_90a", "row_product", {"rows": rows, "k": k, "tokens": room})
    if found is None:
        return None
    sizes = {name: value for name, value in found.values.items() if name != "is_grouped"}
    return Tiling(**sizes, is_grouped=bool(found.values["is_grouped"]))


def plans_by_architecture(
    shapes: tuple[Shape, ...], capacities: tuple[int, ...] = TOKENS
) -> tuple[tuple[Plan, tuple[str, ...]], ...]:
    """The plans of shapes (rows, K) at each token capacity, each with the architectures that take it."""
    found: dict[Plan, tuple[str, ...]] = {}
    for architectures, is_grouped in ((DISPATCHED, True), (COMPILED, False)):
        plans = (plan_for(*shape, tokens, is_grouped) for shape in shapes for tokens in capacities)
        for plan in dict.fromkeys(plans):
            found[plan] = found.get(plan, ()) + architectures
    return tuple(found.items())


def _few(rows: int, k: int) -> Tiling:
    """Up to 16 tokens, no measurement: small blocks, and fewer warps where K is short."""
    steps = k // STEP
    if steps < 16 or rows < 256:
        return Tiling(1, 1, max(1, min(8, steps // 2)), 1, min(4, steps), 2)
    return Tiling(2, 1, 8, 1, 4, 2)


def _many(rows: int, k: int) -> Tiling:
    """Warpgroups, no measurement: blocks of 64 rows where these fit the device at once, up to 8 sharing K;
    else blocks of 128 rows, one or two a multiprocessor.
    """
    blocks, stages = -(-rows // 64), k // 64
    if blocks <= MULTIPROCESSORS:
        cluster = next((c for c in (8, 4, 2) if blocks * c <= MULTIPROCESSORS and stages >= 4 * c), 1)
        return _grouped(1, cluster, min(8, stages // cluster))
    if blocks <= 2 * MULTIPROCESSORS:
        return _grouped(2, 1, min(6, stages))
    return _grouped(2, 1, min(4, stages), 2)


def _wide(rows: int, k: int) -> Tiling:
    """17 to 64 tokens by mma.sync: more rows a warp, so that tokens are read less often."""
    steps = k // STEP
    if steps < 16 or rows < 256:
        return Tiling(1, 1, max(1, min(8, steps // 2)), 1, min(4, steps), 1)
    tiles = 2 if k == K3.latent else 3  # the tail's norm takes the registers of a third: 272 bytes spilled
    return Tiling(tiles, 4, 2, 2 if steps <= 224 else 4, 3, 1)
