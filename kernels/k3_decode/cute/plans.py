"""Which plan a product of a given shape runs under, from measurements on an H200 (NOTES.md)."""

from k3_decode.cute.row_stream import STEP, Plan

__all__ = ["capacity", "front_plan", "projection_plan", "tail_plan"]


def capacity(tokens: int) -> int:
    """The least compiled token capacity that holds `tokens`."""
    return next(size for size in (8, 16, 32, 64) if tokens <= size)


def projection_plan(rows: int, k: int, tokens: int) -> Plan:
    """The plan of a plain projection."""
    room = capacity(tokens)
    steps = k // STEP
    k_warps = 8 if steps >= 8 else max(1, steps)
    tiles = max(1, min(6, -(-rows // (8 * 132))))
    return Plan(rows, k, room, tiles, 1, k_warps, 1, 3, 8, 2 if room <= 16 else 1)


def front_plan(rows: int, k: int, tokens: int) -> Plan:
    """The plan of router and latent down-projection together."""
    if rows > 1024:
        return projection_plan(rows, k, tokens)
    steps = k // STEP
    k_warps = 8 if steps >= 8 else max(1, steps)
    if steps < 64:
        return Plan(rows, k, capacity(tokens), 1, 1, k_warps, 1, 4, 0, 2)
    return Plan(rows, k, capacity(tokens), 4 if rows > 400 else 2, 1, 8, 7, 4, 0, 2 if tokens <= 16 else 1)


def tail_plan(rows: int, k: int, tokens: int) -> Plan:
    """The plan of norm, latent up-projection and shared add."""
    if rows > 2048:
        return projection_plan(rows, k, tokens)
    steps = k // STEP
    if steps < 64:
        return Plan(rows, k, capacity(tokens), 1, 1, min(8, steps), 1, 4, 0, 2)
    return Plan(rows, k, capacity(tokens), 4 if rows > 500 else 2, 1, 7, 4, 4, 0, 2 if tokens <= 16 else 1)
