"""The convolution of `kda_step`: its inputs from the slot's window and from this step's rows, its sum, and
the renewal of the window.

A lane holds four channels. Who renews which entry, and that nobody still reads it, is the kernel's business.
"""

import cutlass
from cutlass import Float32, Int32, Int64

from k3_decode.cute import fragments as frag
from k3_decode.cute import instructions as ins
from k3_decode.cute.kda_form import DECODE

__all__ = ["Pairs", "Quad", "convolved", "renew", "taps_of", "window"]

Quad = tuple[Float32, Float32, Float32, Float32]
Pairs = list[tuple[Int32, Int32]]


def taps_of(address: Int64, tap_bytes: Int64) -> list[Quad]:
    """Conv weights of four channels, oldest tap first."""
    return [ins.load_weight_f32(address + tap_bytes * i) for i in range(4)]


def window(
    home_at: Int64,
    entry_bytes: Int64,
    row_at: Int64,
    row_bytes: Int64,
    first_row: Int32,
    step: Int32,
    first: Int32,
    mode: int,
    newest: tuple[Int32, Int32],
) -> Pairs:
    """The four newest inputs of four channels at a step, oldest first: window entries, then rows of this
    step.
    """
    if mode == DECODE:
        return [*(frag.load_pair(home_at + entry_bytes * i) for i in range(3)), newest]
    inputs = []
    for i in range(3):
        in_window = home_at + entry_bytes * Int64(first + step + i)
        in_step = row_at + row_bytes * Int64(first_row + cutlass.max(step + (i - 3), 0))
        inputs.append(frag.load_pair(frag.choose_address(Int32(step + i < 3), in_window, in_step)))
    return [*inputs, newest]


def renew(home_at: Int64, entry_bytes: Int64, inputs: Pairs, step: Int32, is_mine: Int32, mode: int) -> None:
    """Step t writes its own row to entry t + 2; the first step of a request also the two inputs before it."""
    if mode == DECODE:
        for entry in range(3):
            frag.store_pair_if(home_at + entry_bytes * entry, inputs[entry + 1], is_mine)
        return
    frag.store_pair_if(home_at + entry_bytes * Int64(step + 2), inputs[3], is_mine)
    for entry in range(2):
        frag.store_pair_if(home_at + entry_bytes * entry, inputs[entry + 1], is_mine * Int32(step == 0))


def convolved(inputs: Pairs, taps: list[Quad]) -> Quad:
    """SiLU of the convolution of four channels."""
    sums = [Float32(0.0)] * 4
    for words, tap in zip(inputs, taps, strict=True):
        values = [half for word in words for half in (ins.low_half(word), ins.high_half(word))]
        sums = [s + v * w for s, v, w in zip(sums, values, tap, strict=True)]
    return tuple(u * frag.sigmoid(u) for u in sums)
