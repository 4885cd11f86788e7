"""The tables of a sweep check, and that its arms were timed in the same blocks; whole layers have more."""

from collections.abc import Iterator, Mapping

from harness.domain.check import Samples
from harness.domain.table_shape import (
    COUNT,
    FLAG,
    NUMBER,
    POSITIVE,
    TEXT,
    TableShape,
    choice,
    misshapen,
)

__all__ = ["ARMS", "LAYER_SHAPES", "SHAPES", "faults"]

ARMS = ("stock", "optimised", "null", "slow")
_ARM = choice(*ARMS)
SHAPES: Mapping[str, TableShape] = {
    "timings": TableShape({"arm": _ARM, "block": COUNT, "us": POSITIVE}, key=("arm", "block")),
    "steps": TableShape(
        {
            "arm": _ARM,
            "phase": choice("decode", "verify", "prefill", "mixed"),
            "path": choice("stock", "optimised"),
            "tokens": COUNT,
        },
        key=("arm", "phase", "path"),
    ),
}


_COMPARED = choice("stock", "optimised")
LAYER_SHAPES: Mapping[str, TableShape] = {
    **SHAPES,
    "stock_arms": TableShape(
        {"name": TEXT, "us": POSITIVE, "is_chosen": FLAG}, key=("name",), is_required=True
    ),
    "errors": TableShape(
        {"arm": _COMPARED, "layer": COUNT, "token": COUNT, "error": NUMBER},
        key=("arm", "layer", "token"),
        is_required=True,
    ),
    "counts": TableShape(
        {"arm": _COMPARED, "name": TEXT, "value": NUMBER}, key=("arm", "name"), is_required=True
    ),
}


def faults(samples: Samples, *, is_layer: bool = False) -> tuple[str, ...]:
    """What keeps the times from being compared."""
    return misshapen(samples, LAYER_SHAPES if is_layer else SHAPES) or tuple(_unpaired(samples))


def _unpaired(samples: Samples) -> Iterator[str]:
    """Ratios are paired by block, so no arm may leave one out, and none may be chosen afterwards."""
    table = samples.table("timings")
    blocks: dict[str, list[int]] = {arm: [] for arm in ARMS}
    for row in () if table is None else table.rows:
        blocks[str(row[0])].append(int(row[1] or 0))
    for arm, seen in blocks.items():
        if sorted(seen) != list(range(len(blocks["stock"]))):
            yield f"arm {arm} was not timed in blocks 0 to {len(blocks['stock']) - 1}, once each"
