"""When AttnRes mixes what: the schedule of block reads and writes over the layers.

Block j is the stream's prefix before layer j * block; the first sublayer of a block starts a new prefix with
its own output. Two mixes a layer, before attention and before the FFN, and one before the head.
"""

from typing import NamedTuple

__all__ = ["Mix", "before_attention", "before_ffn", "before_head"]


class Mix(NamedTuple):
    """One use of AttnRes."""

    blocks_read: int
    write_index: int
    """Block that takes the updated prefix, or -1."""
    restarts: bool
    """Whether the preceding sublayer's output is the new prefix itself, rather than what is added to it."""


def before_attention(layer: int, block: int) -> Mix:
    """The mix that feeds the attention of 0-based `layer` with `block` layers a block."""
    starts = layer % block == 0
    return Mix(-(-layer // block), layer // block if starts else -1, restarts=False)


def before_ffn(layer: int, block: int) -> Mix:
    """The mix that feeds the FFN of `layer`."""
    starts = layer % block == 0
    return Mix(-(-layer // block) + int(starts), -1, restarts=starts)


def before_head(layers: int, block: int) -> Mix:
    """The mix after the last layer."""
    return Mix(-(-layers // block), -1, restarts=False)
