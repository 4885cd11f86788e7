"""The tables of a sweep check, and that its arms were timed in the same blocks, as many as the plan's
rule says; whole layers have more.
"""

from collections.abc import Iterator, Mapping

from harness.domain.check import Check, Samples
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
from harness.measure.gpu_watch import GPU_SHAPE
from harness.measure.known_times import KNOWN_SHAPE
from harness.stages.sweep.likeness import LIKENESS_SHAPES
from harness.stages.sweep.stopping import stopping_fault

__all__ = ["ARMS", "LAYER_SHAPES", "SHAPES", "arm_times", "faults"]

ARMS = ("stock", "optimised", "null", "slow")
_ARM = choice(*ARMS)
_TIMED: Mapping[str, TableShape] = {
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
SHAPES: Mapping[str, TableShape] = {**_TIMED, **LIKENESS_SHAPES}


_COMPARED = choice("stock", "optimised")
LAYER_SHAPES: Mapping[str, TableShape] = {
    **_TIMED,
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
    "known": KNOWN_SHAPE,
    "flushed": TableShape(
        {"arm": choice("stock", "optimised", "known"), "number": COUNT, "us": POSITIVE}, key=("arm", "number")
    ),
    "gpu": GPU_SHAPE,
}


def faults(check: Check, samples: Samples, *, is_layer: bool = False) -> tuple[str, ...]:
    """What keeps the times from being compared."""
    unfit = misshapen(samples, LAYER_SHAPES if is_layer else SHAPES) or tuple(_unpaired(samples))
    if unfit:
        return unfit
    stopped = stopping_fault(check, arm_times(samples), stops_early=not is_layer)
    return () if stopped is None else (stopped,)


def arm_times(samples: Samples) -> dict[str, list[float]]:
    """Times of each arm in the order of its blocks, by which the arms are paired."""
    table = samples.table("timings")
    rows = sorted(() if table is None else table.records(), key=lambda row: int(row["block"] or 0))
    return {arm: [float(row["us"] or 0.0) for row in rows if row["arm"] == arm] for arm in ARMS}


def _unpaired(samples: Samples) -> Iterator[str]:
    """Ratios are paired by block, so no arm may leave one out, and none may be chosen afterwards."""
    table = samples.table("timings")
    blocks: dict[str, list[int]] = {arm: [] for arm in ARMS}
    for row in () if table is None else table.rows:
        blocks[str(row[0])].append(int(row[1] or 0))
    for arm, seen in blocks.items():
        # The planted arm may leave once it shows (`stopping`).
        count = len(seen) if arm == "slow" else len(blocks["stock"])
        if sorted(seen) != list(range(count)):
            yield f"arm {arm} was not timed in blocks 0 to {len(blocks['stock']) - 1}, once each"
