"""Ask constant weights into L2 ahead of their use, from a side stream, while the main stream leaves memory
idle.

Not an op: it computes nothing and writes nothing but its launch count, in the last of the counters'
places, so that it is counted apart. Kernels also prefetch their own next weights before the wait on the
previous kernel (`row_stream`); this one serves what lies further ahead, such as across an exchange between
ranks.

Scope: sm_90a (run), sm_100a and sm_103a (compiled); any contiguous tensor, a byte range that starts and
ends at multiples of 16.

Layout: `weight` is taken as bytes; thread i of the grid asks for piece i of `PIECE` bytes. Nothing is read
into the program, so no wait is needed and none is made: the caller joins the side stream for capture only.

Numerics: none.

Validation: `tests/k3_decode/cute/test_prefetch.py`. Whether it pays is a measurement of the caller's
(NOTES.md).
"""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from k3_decode.cute import instructions as ins
from k3_decode.cute.row_plan import CARVEOUT
from k3_decode.cute.variant import COMPILED, DISPATCHED, Variant

if TYPE_CHECKING:
    import torch

__all__ = ["LAUNCH_PLACE", "PIECE", "pieces_of", "prefetch", "variants"]

LAUNCH_PLACE = 15
"""The last place of the launch counters: prefetches are no op."""
PIECE = 4096
"""Bytes one thread asks for."""
THREADS = 32


@cute.kernel
def _ask(weight: cute.Tensor, launches: cute.Tensor, first: Int64, size: Int64):
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    start = (Int64(bid) * THREADS + Int64(tid)) * PIECE
    if start + PIECE <= size:
        ins.prefetch_bytes(ins.byte_address(weight) + first + start, Int32(PIECE))
    elif start < size:
        ins.prefetch_bytes(ins.byte_address(weight) + first + start, Int32(size - start))
    if tid + bid == 0:
        ins.add_launch(ins.byte_address(launches) + LAUNCH_PLACE * 4)


@cute.jit
def _launch(
    weight: cute.Tensor, launches: cute.Tensor, first: Int64, size: Int64, blocks: Int32, stream: Any
):
    _ask(weight, launches, first, size).launch(
        grid=(blocks, 1, 1), block=(THREADS, 1, 1), preferred_smem_carveout=CARVEOUT, stream=stream
    )


@cache
def _compile() -> Callable[..., None]:
    """The launch; sizes stay symbolic."""
    weight = make_fake_tensor(Uint8, (cute.sym_int64(),), (1,), assumed_align=16)
    launches = make_fake_tensor(Int32, (cute.sym_int32(),), (1,), assumed_align=4)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    sizes = (Int64(0), Int64(16), Int32(1))
    compiled: Callable[..., None] = cute.compile(
        _launch, weight, launches, *sizes, stream, options="--enable-tvm-ffi"
    )
    return compiled


def pieces_of(size: int) -> tuple[int, int]:
    """Threads that ask for a piece, and blocks that hold them, for `size` bytes."""
    pieces = -(-size // PIECE)
    return pieces, -(-pieces // THREADS)


def prefetch(
    *, weight: "torch.Tensor", launches: "torch.Tensor", first_byte: int = 0, bytes_wanted: int | None = None
) -> None:
    """Ask bytes `first_byte` onward of a contiguous `weight` into L2 (by default all), in one launch."""
    import torch

    flat = weight.view(-1).view(torch.uint8)
    size = flat.numel() - first_byte if bytes_wanted is None else bytes_wanted
    if first_byte % 16 or size % 16 or size <= 0 or first_byte + size > flat.numel():
        raise ValueError(f"prefetch: bytes {first_byte}+{size} of {flat.numel()} are no 16-byte range inside")
    _compile()(flat, launches, first_byte, size, pieces_of(size)[1])


def variants() -> tuple[Variant, ...]:
    """The one form."""
    return (
        Variant(
            op="prefetch",
            name="prefetch_4k",
            architectures=DISPATCHED + COMPILED,
            compile=_compile,
            parameters=(("weight", "weight"), ("launches", "workspace")),
            source="cute/prefetch.py",
            is_smoke=True,
        ),
    )
