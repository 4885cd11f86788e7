"""What the persistent kernels share: rings of bulk copies, the meeting of all blocks, and small exact
pieces.

Weights stream through rings of stages: one barrier a stage, and whoever knows that a stage has been read
asks for the next. `arrive` and `wait_for` let blocks wait for each other's results; the grid must fit on
the machine at once. The counters are zero before and after each launch.
"""

from functools import cache
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from k3_decode.cute import instructions as ins

__all__ = [
    "COUNTER_BYTES",
    "ROUND_AT",
    "add_from_below",
    "arrive",
    "as_float",
    "barrier_arrive",
    "barrier_sync",
    "expect",
    "leave",
    "leave_round",
    "load_shared",
    "make_barriers",
    "multiprocessors",
    "situ",
    "store_shared",
    "wait",
    "wait_for",
    "warp_add",
]

ROUND_AT = 12
"""Place in a workspace of the number of launches that met by values."""
COUNTER_BYTES = 128
"""Start of a workspace: two int32 counts of arrivals, one of blocks that left, the number of launches that
met by values, and padding."""


@cache
def multiprocessors(device: int) -> int:
    """Multiprocessors of a CUDA device: the blocks that a persistent launch has."""
    import torch

    return torch.cuda.get_device_properties(device).multi_processor_count


def make_barriers(bars_at: Int32, stages: int) -> None:
    """One thread: a ring's barriers, each completed by one arrival and the bytes it announces."""
    for s in range(stages):
        ins.asm("mbarrier.init.shared::cta.b64 [$0], 1;", "r", [bars_at + s * 8])
    ins.asm("fence.mbarrier_init.release.cluster;", "", [])
    ins.asm("fence.proxy.async.shared::cta;", "", [])


def expect(bar: Int32, size: int) -> None:
    """Arrive and announce `size` bytes."""
    ins.asm("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", "r,r", [bar, Int32(size)])


def wait(bar: Int32, parity: Int32) -> None:
    """Wait until the barrier's phase of this parity is complete."""
    template = (
        "{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1, 10000000; "
        "@p bra DONE; bra AGAIN; DONE: }"
    )
    ins.asm(template, "r,r", [bar, parity])


def arrive(counter: Int64) -> None:
    """One thread, after a barrier with the others: publish what they wrote to all blocks."""
    ins.asm("red.release.gpu.global.add.s32 [$0], 1;", "l", [counter])


def wait_for(counter: Int64, arrivals: Int32) -> None:
    """One thread: wait until so many have arrived; what they wrote is visible after the next barrier with
    the others.
    """
    template = (
        "{ .reg .pred p; .reg .b32 n; AGAIN: ld.acquire.gpu.global.b32 n, [$0]; setp.lt.s32 p, n, $1; "
        "@p bra AGAIN; }"
    )
    ins.asm(template, "l,r", [counter, arrivals])


@cute.jit
def leave(counters: Int64, blocks: Int32):
    """One thread of each block that needs the counters no more: the last one clears them for the next
    launch.
    """
    left = ins.asm("atom.relaxed.gpu.global.add.s32 $0, [$1], 1;", "=r,l", [counters + 8], [Int32])
    if left == blocks - 1:
        for i in cutlass.range_constexpr(3):
            ins.store_word(counters + i * 4, Int32(0))


@cute.jit
def leave_round(counters: Int64, blocks: Int32):
    """As `leave`, of a launch that meets by values: the next one then has another number."""
    number = ins.load_activation_word(counters + ROUND_AT)
    left = ins.asm("atom.relaxed.gpu.global.add.s32 $0, [$1], 1;", "=r,l", [counters + 8], [Int32])
    if left == blocks - 1:
        ins.store_word(counters + 8, Int32(0))
        ins.store_word(counters + ROUND_AT, number + 1)


def barrier_sync(barrier: Any, threads: int) -> None:
    """Wait at a named barrier of the block."""
    ins.asm(f"bar.sync $0, {threads};", "r", [Int32(barrier)])


def barrier_arrive(barrier: Any, threads: int) -> None:
    """Arrive at a named barrier of the block without waiting."""
    ins.asm(f"bar.arrive $0, {threads};", "r", [Int32(barrier)])


def situ(gate: Float32, up: Float32) -> Float32:
    """4 tanh(gate/4) sigmoid(gate) x 25 tanh(up/25) in fp32; relative error about 1e-6, saturating, NaN
    kept.
    """
    sigmoid = 1.0 / (1.0 + cute.math.exp(-gate))
    return 100.0 * _tanh(gate * 0.25) * sigmoid * _tanh(up * 0.04)


def _tanh(x: Float32) -> Float32:
    """tanh by an odd polynomial below 1/8 and by the exponential above."""
    square = x * x
    small = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    large = 1.0 - 2.0 / (1.0 + cute.math.exp(2.0 * x))
    return ins.asm(
        "{ .reg .pred p; .reg .f32 a; abs.f32 a, $3; setp.lt.f32 p, a, 0f3E000000; selp.f32 $0, $1, $2, p; }",
        "=f,f,f,f", [small, large, x], [Float32], is_pure=True,
    )  # fmt: skip


def as_float(bits: Int32) -> Float32:
    return ins.asm("mov.b32 $0, $1;", "=f,r", [bits], [Float32], is_pure=True)


def load_shared(address: Int32) -> Int32:
    return ins.asm("ld.shared.b32 $0, [$1];", "=r,r", [address], [Int32])


def store_shared(address: Int32, value: Int32) -> None:
    ins.asm("st.shared.b32 [$0], $1;", "r,r", [address, value])


def add_from_below(value: Int32, step: int) -> Int32:
    """`value` plus that of the lane `step` below, where there is one."""
    template = (
        "{ .reg .pred p; .reg .b32 t; shfl.sync.up.b32 t|p, $1, " + str(step) + ", 0, -1; "
        "@!p mov.b32 t, 0; add.s32 $0, t, $1; }"
    )
    return ins.asm(template, "=r,r", [value], [Int32])


def warp_add(value: Int32) -> Int32:
    return ins.asm("redux.sync.add.s32 $0, $1, -1;", "=r,r", [value], [Int32])
