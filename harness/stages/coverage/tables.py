"""The tables of a coverage check."""

from collections.abc import Mapping

from harness.domain.table_shape import COUNT, FLAG, NUMBER, TEXT, TableShape, choice, optional

__all__ = ["STATE_SHAPES", "WITNESS_SHAPES"]

WITNESS_SHAPES: Mapping[str, TableShape] = {
    "steps": TableShape(
        {
            "arm": TEXT,
            "step": COUNT,
            "phase": choice("decode", "verify", "prefill", "mixed"),
            "requests": COUNT,
            "rows": COUNT,
            "tokens": COUNT,
            "bucket": optional(COUNT),
            "path": choice("stock", "optimised"),
            "reason": TEXT,
            "layers": TEXT,
        },
        key=("arm", "step", "phase"),
    ),
    "launches": TableShape({"arm": TEXT, "op": TEXT, "counted": COUNT, "expected": COUNT}, key=("arm", "op")),
    "divergence": TableShape(
        {
            "pair": TEXT,
            "request": COUNT,
            "position": COUNT,
            "kl": optional(NUMBER),
            "max_gap": optional(NUMBER),
            "is_top1_equal": FLAG,
        },
        key=("pair", "request", "position"),
    ),
}
"""Of every kind but `state`."""
STATE_SHAPES: Mapping[str, TableShape] = {
    "writes": TableShape({"arm": TEXT, "step": COUNT, "what": TEXT}, key=("arm", "step", "what"))
}
