"""How a step of `kda_step` is cut into blocks: the constants of a kernel, and their choice by measurement."""

from typing import NamedTuple

__all__ = [
    "CHUNK_BYTES", "DECODE", "DIM", "LANES_A_ROW", "MAX_ROWS", "MODES", "MULTIPROCESSORS", "VERIFY",
    "VERIFY_ACCEPTED", "WEIGHT_PITCH", "Form", "form_of", "name_of",
]  # fmt: skip

DIM = 128
"""Width of a head's keys and values, and the decay's low rank."""
LANES_A_ROW = 8
"""Lanes that share a row of S, 16 columns each."""
WEIGHT_PITCH = DIM * 2 + 64
"""Bytes between rows of decay weights in shared memory: two rows' 64-byte pieces fill the banks once."""
CHUNK_BYTES = 4 * DIM * 4
"""Four rows of S: what a warp works on at once, and a place of its ring."""
MAX_ROWS = 8
MULTIPROCESSORS = 132
"""Of an H200; a choice of shapes only, any device runs any."""
DECODE, VERIFY, VERIFY_ACCEPTED = 0, 1, 2
"""Modes: one row a request; several; several, the first state chosen by `accepted`."""
MODES = ("decode", "verify", "accepted")


class Form(NamedTuple):
    """Compile-time constants of one kernel."""

    split: int
    """Blocks a head."""
    steps: int
    """Requests (in verify, rows of one request) that a block walks over."""
    threads: int
    """128 or 256."""
    stages: int
    """How S is read: 0 as it is needed, 1 a request ahead into registers, more: by bulk copies of four rows
    into a ring of that many places a warp (plain decode only)."""
    blocks: int
    """Blocks that an SM must hold, which caps the registers."""
    mode: int
    has_bound: bool


def form_of(requests: int, rows: int, heads: int, has_bound: bool, has_accepted: bool) -> Form:
    """How a step is spread, by measurement on an H200 (132 multiprocessors).

    Up to 48 (request, head) pairs 4 blocks a head, then two while all blocks fit at once (3 a
    multiprocessor), then one, still without walking. Up to 792 pairs one block a multiprocessor walks over 3
    to 6 requests through its warps' rings; more pairs take two blocks a multiprocessor and 3 requests each.
    """
    pairs = requests * heads
    if rows > 1:
        mode = VERIFY_ACCEPTED if has_accepted else VERIFY
        return Form(8 if pairs <= 24 else 4, rows, 128, 0, 3, mode, has_bound)
    if 2 * pairs <= 3 * MULTIPROCESSORS:
        return Form(4 if pairs <= 48 else 2, 1, 128, 0, 3, DECODE, has_bound)
    if pairs <= 2 * MULTIPROCESSORS:
        return Form(1, 1, 256, 0, 2, DECODE, has_bound)
    if pairs <= 6 * MULTIPROCESSORS:
        return Form(1, -(-pairs // MULTIPROCESSORS), 256, 6, 1, DECODE, has_bound)
    return Form(1, 3, 256, 3, 2, DECODE, has_bound)


def name_of(form: Form) -> str:
    reads = ("", "_ahead")[form.stages] if form.stages < 2 else f"_ring{form.stages}"
    size = f"c{form.split}_t{form.steps}_{form.threads}"
    return f"kda_step_{size}{reads}_b{form.blocks}_{MODES[form.mode]}{'' if form.has_bound else '_softplus'}"
