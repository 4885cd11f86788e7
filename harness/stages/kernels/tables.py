"""The tables of a kernel check, and which rows must be there before its errors say anything.

A table that fits its shape can still leave out the row that would have failed. The plan says what the op
writes: every output must have been spoiled, repeated, and compared in every regime, token by token (`rows`);
every state repeated and compared.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from harness.domain.check import Check, Samples
from harness.domain.table_shape import COUNT, FLAG, NUMBER, TEXT, TableShape, choice, misshapen
from harness.stages.kernels.rows import missing_rows

__all__ = ["GUARD_SHAPES", "SHAPES", "faults"]

_ERRORS = {
    "regime": TEXT, "output": TEXT, "token": COUNT, "stock_l2": NUMBER, "optimised_l2": NUMBER,
    "stock_worst": NUMBER, "optimised_worst": NUMBER, "ulp": NUMBER, "least": NUMBER,
}  # fmt: skip
_EXACT = {"regime": TEXT, "output": TEXT, "elements": COUNT, "mismatches": COUNT}
_TOUCHES = {
    "regime": TEXT, "arm": choice("stock", "optimised"), "argument": TEXT,
    "kind": choice("guard", "gap", "input", "untouched_state", "unwritten", "version"), "bytes": COUNT,
}  # fmt: skip
_OPERATIONS = {
    "arm": choice("stock", "optimised", "disguised", "first", "second", "remembered"), "count": COUNT,
    "shared": NUMBER,
}  # fmt: skip
SHAPES: Mapping[str, TableShape] = {
    "errors": TableShape(_ERRORS, key=("regime", "output", "token")),
    "exact": TableShape(_EXACT, key=("regime", "output")),
    "mates": TableShape(_ERRORS, key=("regime", "output", "token")),
    "mates_exact": TableShape(_EXACT, key=("regime", "output")),
    "touches": TableShape(_TOUCHES),
    "launches": TableShape({"regime": TEXT, "counted": COUNT}, key=("regime",), is_required=True),
    "repeats": TableShape(
        {"output": TEXT, "elements": COUNT, "differing": COUNT}, key=("output",), is_required=True
    ),
    "operations": TableShape(_OPERATIONS, key=("arm",), is_required=True),
    "process": TableShape({"arm": choice("optimised", "planted"), "name": TEXT}, key=("arm", "name")),
    "spread": TableShape(
        {
            "arm": choice("stock", "optimised"),
            "over": choice("repeats", "mates", "order"),
            "output": TEXT,
            "elements": COUNT,
            "differing": COUNT,
        },
        key=("arm", "over", "output"),
    ),
    "jitter": TableShape(
        {
            "reader": choice("optimised", "early", "patient"),
            "round": COUNT,
            "delay_us": COUNT,
            "is_cold": FLAG,
            "is_busy": FLAG,
            "output": TEXT,
            "elements": COUNT,
            "differing": COUNT,
        },
        key=("reader", "round", "output"),
    ),
    "control_errors": TableShape({"control": TEXT, **_ERRORS}, key=("control", "regime", "output", "token")),
    "control_exact": TableShape({"control": TEXT, **_EXACT}, key=("control", "regime", "output")),
    "control_touches": TableShape({"control": TEXT, **_TOUCHES}, is_required=True),
}
GUARD_SHAPES: Mapping[str, TableShape] = {
    "guard": TableShape({"cell": TEXT, "must_take": FLAG, "takes": FLAG}, key=("cell",))
}
INEXACT_CONTROLS = ("scaled", "element", "swapped", "zeroed", "not_a_number")
EXACT_CONTROLS = ("flipped",)
REUSED = "reused"
REPLAYS = ("graph0", "graph1", "graph2")
"""Regimes that only a GPU has, where the plan is of a harness that did not name them."""


def faults(check: Check, samples: Samples) -> tuple[str, ...]:
    """What keeps an op's samples from being judged: shapes first, then rows that are missing."""
    return misshapen(samples, SHAPES) or tuple(_missing(check, samples))


def _missing(check: Check, samples: Samples) -> Iterator[str]:
    outputs, states = (_named(check, name) for name in ("outputs", "states"))
    if not outputs:
        yield "the plan names no output of the op, so nothing says what had to be compared"
    compared = [*_records(samples, "errors"), *_records(samples, "exact")]
    seen = {(str(r["regime"]), str(r["output"])) for r in compared}
    repeated = {str(r["output"]) for r in _records(samples, "repeats")}
    regimes = _regimes(check)
    launched = {str(r["regime"]) for r in _records(samples, "launches")}
    yield from (f"regime {name} has no launch count" for name in regimes if name not in launched)
    yield from (f"{name} was not repeated" for name in (*outputs, *states) if name not in repeated)
    for output in outputs:
        lacking = [name for name in regimes if (name, output) not in seen]
        if lacking:
            yield f"output {output} was not compared in {', '.join(lacking)}"
    for state in states:  # a regime may touch no row of it
        if not any((name, state) in seen for name in regimes):
            yield f"state {state} was compared in no regime"
    yield from _missing_controls(samples, outputs)
    yield from _missing_tokens(samples, outputs)
    if check.cell is not None:
        yield from missing_rows(check.cell, _named(check, "by_token"), samples)
    yield from _missing_spread(check, samples, outputs)
    arms = {r["arm"] for r in _records(samples, "operations")}
    asked: tuple[str, ...] = ("optimised", "disguised")
    if _named(check, "spread"):  # a plan of this harness
        asked = (*asked, "first", "second", "remembered")
    yield from (f"operations of {arm} are missing" for arm in asked if arm not in arms)


def _regimes(check: Check) -> tuple[str, ...]:
    """Every regime that sampling runs in this cell."""
    on_gpu = check.cell is not None and check.cell.arch != "cpu"
    replays = (_named(check, "replays") or REPLAYS) if on_gpu else ()
    return (*str(check.parameter("regimes")).split(","), REUSED, *replays)


def _missing_spread(check: Check, samples: Samples, outputs: tuple[str, ...]) -> Iterator[str]:
    """Determinism of both arms, and the rounds behind a late predecessor, where the plan asks for them."""
    seen = {(r["arm"], r["over"], r["output"]) for r in _records(samples, "spread")}
    for over in _named(check, "spread"):
        lacking = [
            f"{arm} {o}" for arm in ("stock", "optimised") for o in outputs if (arm, over, o) not in seen
        ]
        if lacking:
            yield f"the spread over {over} was not measured: {', '.join(lacking)}"
    rounds: dict[str, set[int]] = {}
    for r in _records(samples, "jitter"):
        rounds.setdefault(str(r["reader"]), set()).add(r["round"])
    if "jitter" in _named(check, "replays") and rounds.keys() != {"optimised", "early", "patient"}:
        yield "no rounds behind a late predecessor, or not of both readers that are their control"


def _named(check: Check, name: str) -> tuple[str, ...]:
    """Names in a parameter of the check; none where a plan of another harness lacks it."""
    return tuple(filter(None, str(dict(check.parameters).get(name) or "").split(",")))


def _missing_controls(samples: Samples, outputs: tuple[str, ...]) -> Iterator[str]:
    planted = {
        (str(r["control"]), str(r["output"]))
        for table in ("control_errors", "control_exact")
        for r in _records(samples, table)
    }
    exact = {str(r["output"]) for r in _records(samples, "exact")}
    for output in outputs:
        controls = EXACT_CONTROLS if output in exact else INEXACT_CONTROLS
        lacking = [c for c in controls if (c, output) not in planted]
        if lacking:
            yield f"output {output} was not spoiled: {', '.join(lacking)}"


def _missing_tokens(samples: Samples, outputs: tuple[str, ...]) -> Iterator[str]:
    """A spoiled output is compared token by token, whole: the candidate's must have the same tokens."""
    whole: dict[str, set[int]] = {}
    for r in _records(samples, "control_errors"):
        if r["control"] == "zeroed":
            whole.setdefault(str(r["output"]), set()).add(r["token"])
    found: dict[tuple[str, str], set[int]] = {}
    for r in _records(samples, "errors"):
        found.setdefault((str(r["output"]), str(r["regime"])), set()).add(r["token"])
    for (output, regime), tokens in found.items():
        if output in outputs and tokens != whole.get(output):
            yield f"output {output} was compared in regime {regime} for other tokens than were spoiled"


def _records(samples: Samples, name: str) -> tuple[dict[str, Any], ...]:
    table = samples.table(name)
    return table.records() if table else ()
