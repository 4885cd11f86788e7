"""Sums across the 32 lanes of a warp, in a fixed order, so that results never depend on timing.

`lane_sums` adds 32 values of every lane at once and leaves the total of value `lane_slot(lane, 32)` in
each lane: 31 shuffles in place of the 160 of 32 separate sums. What it leaves to callers: sums across
warps.
"""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from k3_decode.cute.instructions import asm

__all__ = ["choose", "lane_slot", "lane_sums", "warp_sum"]


def choose(condition: Int32, when_set: Float32, when_zero: Float32) -> Float32:
    """`when_set` where `condition` is not 0, else `when_zero`, without a branch."""
    template = "{.reg .pred p; setp.ne.b32 p, $3, 0; selp.f32 $0, $1, $2, p;}"
    return asm(template, "=f,f,f,r", [when_set, when_zero, condition], [Float32], is_pure=True)


def lane_sums(values: list[Float32], lane: Int32) -> Float32:
    """The sum over the warp of value `lane_slot(lane, len(values))`; the length is a power of two up to 32.

    In each step a lane keeps the half of the values that its bit names and adds the other lane's part of it.
    """
    offset = 16
    while len(values) > 1:
        half = len(values) // 2
        bit = lane & offset
        keep = [choose(bit, values[half + i], values[i]) for i in range(half)]
        give = [choose(bit, values[i], values[half + i]) for i in range(half)]
        values = [k + cute.arch.shuffle_sync_bfly(g, offset) for k, g in zip(keep, give, strict=True)]
        offset //= 2
    total = values[0]
    while offset:
        total = total + cute.arch.shuffle_sync_bfly(total, offset)
        offset //= 2
    return total


def lane_slot(lane: Any, count: int) -> Any:
    """Index of the value whose sum `lane_sums` leaves in `lane`; 32/count neighbours share one."""
    return lane // (32 // count)


def warp_sum(value: Float32) -> Float32:
    """The sum of `value` over the warp, in every lane."""
    for offset in (16, 8, 4, 2, 1):
        value = value + cute.arch.shuffle_sync_bfly(value, offset)
    return value
