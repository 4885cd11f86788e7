"""Arithmetic of the delta rule in `kda_step`: decay, sums over a lane's 16 columns of a row of S, update; and
the copies that fill a warp's ring.
"""

from cutlass import Float32, Int32, Int64, cute

from k3_decode.cute import fragments as frag
from k3_decode.cute.kda_form import CHUNK_BYTES
from k3_decode.cute.kda_window import Quad

__all__ = ["decay_of", "decayed", "dot", "dots_of", "fill", "updated"]


def fill(from_at: Int64, to: Int32, barrier_at: Int32, lane: Int32) -> None:
    """Lane 0 starts the copy of four rows of S and tells their barrier how much comes."""
    is_first = Int32(lane == 0)
    frag.expect_bytes_if(barrier_at, Int32(CHUNK_BYTES), is_first)
    frag.bulk_load_if(to, from_at, Int32(CHUNK_BYTES), barrier_at, is_first)


def decay_of(shifted: Float32, rate: Float32, lower_bound: Float32, has_bound: bool) -> Float32:
    """exp of the log-decay at `shifted` = logits + bias; without a bound by softplus(x) = max(x, 0) + log(1 +
    e^-|x|).
    """
    if has_bound:
        return frag.exp2(frag.sigmoid(rate * shifted) * (lower_bound * frag.LOG2E))
    size = cute.arch.fmax(shifted, -shifted)
    softplus = cute.arch.fmax(shifted, Float32(0.0)) * frag.LOG2E + frag.log2(
        frag.exp2(size * -frag.LOG2E) + 1.0
    )
    return frag.exp2(-rate * softplus)


def decayed(values: Quad, decays: Quad) -> Quad:
    return tuple(s * a for s, a in zip(values, decays, strict=True))


def dot(left: Quad, right: Quad) -> Float32:
    total = left[0] * right[0]
    for x, y in zip(left[1:], right[1:], strict=True):
        total = total + x * y
    return total


def dots_of(left: list[Quad], right: list[Quad]) -> Float32:
    total = dot(left[0], right[0])
    for x, y in zip(left[1:], right[1:], strict=True):
        total = total + dot(x, y)
    return total


def updated(values: Quad, weighted: Float32, keys: Quad) -> Quad:
    return tuple(s + weighted * k for s, k in zip(values, keys, strict=True))
