"""The tables of a coverage check, by kind."""

from collections.abc import Mapping

from harness.domain.table_shape import COUNT, FLAG, NUMBER, TEXT, TableShape, choice, optional

__all__ = ["SHAPES", "shapes_of"]

SHAPES: Mapping[str, TableShape] = {
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
            "is_graph": FLAG,
            "collective": TEXT,
            "tp": COUNT,
            "dcp": COUNT,
            "drafts": COUNT,
            "context_min": COUNT,
            "context_max": COUNT,
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
    "kernels": TableShape(
        {
            "arm": TEXT,
            "step": COUNT,
            "op": TEXT,
            "name": TEXT,
            "place": choice("graph", "eager", "none"),
            "seen": COUNT,
            "declared": COUNT,
            "counted": optional(COUNT),
        },
        key=("arm", "step", "op", "name", "place"),
    ),
    "traces": TableShape(
        {
            "arm": TEXT,
            "sentinel_seen": COUNT,
            "sentinel_planted": COUNT,
            "blind": TEXT,
            "graph_launches": COUNT,
            "steps": COUNT,
            "collective": TEXT,
        },
        key=("arm",),
    ),
    "spans": TableShape(
        {
            "arm": TEXT,
            "number": COUNT,
            "name": TEXT,
            "op": TEXT,
            "stream": COUNT,
            "start_us": NUMBER,
            "duration_us": NUMBER,
        },
        key=("arm", "number"),
    ),
    "builds": TableShape({"arm": TEXT, "digest": TEXT}, key=("arm",)),
    "two_builds": TableShape(
        {"build": choice("base", "head"), "is_own": FLAG, "launches": COUNT}, key=("build",)
    ),
    "loaded": TableShape(
        {
            "build": choice("base", "head"),
            "kind": choice("files", "modules", "binaries"),
            "name": TEXT,
            "digest": TEXT,
        },
        key=("build", "kind", "name"),
    ),
    "answers": TableShape(
        {
            "arm": choice("stock", "clean", "poison"),
            "op": TEXT,
            "item": TEXT,
            "tokens": COUNT,
            "digest": TEXT,
            "is_right": FLAG,
        },
        key=("arm", "op", "item"),
    ),
    "ran": TableShape({"op": TEXT, "launches": COUNT}, key=("op",)),
    "touched": TableShape({"name": TEXT}, key=("name",)),
    "layer_steps": TableShape(
        {"arm": TEXT, "path": choice("stock", "optimised"), "tokens": COUNT}, key=("arm",)
    ),
    "writes": TableShape({"arm": TEXT, "step": COUNT, "what": TEXT}, key=("arm", "step", "what")),
    "after_off": TableShape({"arm": TEXT, "launches": COUNT}, key=("arm",)),
    "prefixes": TableShape({"arm": TEXT, "queries": COUNT, "hits": COUNT, "reused": COUNT}, key=("arm",)),
    "choices": TableShape(
        {"request": COUNT, "step": COUNT, "token": COUNT, "is_allowed": FLAG}, key=("request", "step")
    ),
    "costs": TableShape(
        {"what": choice("step", "ledger", "planted"), "repetition": COUNT, "us": NUMBER},
        key=("what", "repetition"),
    ),
    "sums": TableShape(
        {"arm": TEXT, "case": TEXT, "rank": COUNT, "worst_ulp": NUMBER, "is_alike": FLAG},
        key=("arm", "case", "rank"),
    ),
}
_WITNESSES = ("steps", "launches", "divergence")
_TABLES: Mapping[str, tuple[str, ...]] = {
    "path": (*_WITNESSES, "kernels", "traces", "spans", "builds"),
    "prefix": (*_WITNESSES, "prefixes"),
    "feature": (*_WITNESSES, "choices"),
    "state": ("writes", "after_off", "divergence"),
    "ledger": ("costs",),
    "collective": ("sums",),
    "causal": ("answers", "ran"),
    "rebuild": ("two_builds", "loaded", "touched"),
    "layer": ("kernels", "traces", "spans", "layer_steps"),
}


def shapes_of(kind: str) -> Mapping[str, TableShape]:
    """The tables that a check of a kind may have."""
    return {name: SHAPES[name] for name in _TABLES.get(kind, _WITNESSES)}
