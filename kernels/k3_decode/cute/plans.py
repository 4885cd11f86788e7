"""Which plan a product of a given shape runs under, from measurements on an H200 (NOTES.md).

Shapes of K3's TP8 and TP16 shards have their own rows in the table; others follow `_rule`, which was read
off the same sweeps. Plans differ in speed only: any plan gives the right product.
"""

from k3_decode.cute.row_plan import STEP, Plan

__all__ = ["CAPACITIES", "capacity", "plan_for"]

Tiling = tuple[int, int, int, int, int, int]
"""Row tiles, row warps, K warps, cluster, depth, blocks per multiprocessor."""

MEASURED: dict[tuple[int, int], tuple[Tiling, Tiling, Tiling, Tiling]] = {
    (6288, 7168): ((2, 1, 8, 1, 4, 3), (2, 1, 8, 1, 4, 3), (3, 4, 2, 2, 3, 1), (3, 4, 2, 2, 3, 1)),
    (3648, 7168): ((1, 1, 8, 1, 7, 4), (2, 1, 8, 1, 4, 3), (3, 4, 2, 2, 3, 1), (3, 4, 2, 2, 3, 1)),
    (3216, 7168): ((2, 1, 8, 2, 7, 2), (2, 1, 8, 1, 4, 3), (3, 4, 2, 2, 3, 1), (3, 4, 2, 2, 3, 1)),
    (7168, 1536): ((2, 1, 4, 1, 8, 4), (4, 1, 8, 1, 4, 2), (2, 2, 4, 1, 2, 2), (2, 4, 2, 1, 4, 1)),
    (7168, 768): ((1, 1, 4, 1, 6, 4), (4, 1, 8, 1, 3, 2), (2, 2, 4, 1, 2, 2), (2, 4, 2, 1, 4, 1)),
    (20480, 7168): ((2, 1, 8, 1, 6, 2), (2, 1, 8, 1, 4, 3), (3, 4, 2, 2, 3, 1), (3, 4, 2, 2, 3, 1)),
    (7168, 3584): ((2, 1, 8, 1, 6, 2), (2, 1, 8, 1, 4, 3), (3, 4, 2, 2, 3, 1), (3, 4, 2, 2, 3, 1)),
    (4480, 7168): ((2, 1, 8, 1, 6, 2), (2, 1, 8, 1, 4, 3), (3, 4, 2, 2, 3, 1), (3, 4, 2, 2, 3, 1)),
    (560, 7168): ((2, 1, 8, 7, 4, 2), (2, 2, 4, 7, 8, 2), (4, 1, 8, 4, 4, 1), (4, 1, 8, 4, 4, 1)),
    (280, 7168): ((2, 1, 8, 7, 4, 2), (2, 2, 4, 7, 8, 2), (4, 1, 8, 4, 4, 1), (4, 1, 8, 4, 4, 1)),
    (896, 3584): ((2, 1, 4, 7, 4, 4), (2, 1, 8, 4, 4, 2), (2, 2, 4, 4, 4, 1), (2, 2, 4, 4, 4, 1)),
    (448, 3584): ((2, 1, 4, 7, 4, 4), (2, 1, 8, 4, 4, 2), (2, 2, 4, 4, 4, 1), (2, 2, 4, 4, 4, 1)),
}
"""Best tiling by (rows, K), for capacities 8, 16, 32 and 64."""
CAPACITIES = (8, 16, 32, 64)


def capacity(tokens: int) -> int:
    """The least compiled token capacity that holds `tokens`."""
    return next(size for size in CAPACITIES if tokens <= size)


def plan_for(rows: int, k: int, tokens: int) -> Plan:
    """The plan of a product with `rows` weight rows of `k` elements, for `tokens` tokens."""
    room = capacity(tokens)
    tilings = MEASURED.get((rows, k))
    tiling = _rule(rows, k, room) if tilings is None else tilings[CAPACITIES.index(room)]
    tiles, row_warps, k_warps, cluster, depth, blocks = tiling
    return Plan(rows, k, room, tiles, row_warps, k_warps, cluster, depth, blocks)


def _rule(rows: int, k: int, room: int) -> Tiling:
    """A tiling for a shape without measurements: short K takes fewer warps, wide batches more rows a warp."""
    steps = k // STEP
    if steps < 16 or rows < 256:
        return (1, 1, max(1, min(8, steps // 2)), 1, min(4, steps), 2 if room <= 16 else 1)
    if room <= 16:
        return (2, 1, 8, 1, 4, 2)
    return (3, 4, 2, 2 if steps <= 224 else 4, 3, 1)
