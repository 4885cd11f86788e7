"""The tables of an eval, and that its arms answered the same questions, all of them."""

from collections.abc import Iterator, Mapping

from harness.domain.cell_tokens import CELL_SHAPE
from harness.domain.check import Check, Samples
from harness.domain.record import Scalar
from harness.domain.table_shape import (
    COUNT,
    FLAG,
    NUMBER,
    POSITIVE,
    SIZE,
    TEXT,
    TOKENS,
    TableShape,
    choice,
    misshapen,
    optional,
)
from harness.engines.measured import ARMS as ENGINES
from harness.engines.measured import CUT_KINDS
from harness.stages.evals.ledger_tables import cell_faults

__all__ = [
    "ANSWER_SHAPES", "DRIFT_SHAPES", "ENGINE_SHAPES", "FEATURE_SHAPES", "TASK_SHAPES", "answer_faults",
    "drift_faults", "engine_faults", "feature_faults", "task_faults",
]  # fmt: skip

ARMS = ("stock", "optimised", "poison")
FINISHES = ("stop", "length", "error", "refusal", "transport")
_PHASES = choice("decode", "verify", "prefill", "mixed")
_COMMON: Mapping[str, TableShape] = {
    "driver": TableShape({"driver": TEXT}, max_rows=1),
    "steps": TableShape(
        {
            "arm": choice(*ARMS),
            "phase": _PHASES,
            "path": choice("stock", "optimised"),
            "reason": TEXT,
            "tokens": COUNT,
        },
        key=("arm", "phase", "path", "reason"),
    ),
    "cells": CELL_SHAPE,
}
_ASKED: Mapping[str, TableShape] = {
    "flips": TableShape(
        {
            "item": TEXT,
            "repeat": COUNT,
            "position": COUNT,
            "stock_gap": optional(NUMBER),
            "optimised_gap": optional(NUMBER),
            "step": optional(COUNT),
            "path": TEXT,
        },
        key=("item", "repeat"),
    ),
    "loads": TableShape(
        {"arm": choice(*ARMS), "phase": _PHASES, "requests": SIZE, "tokens": COUNT},
        key=("arm", "phase", "requests"),
    ),
    "counters": TableShape({"arm": choice(*ARMS), "name": TEXT, "value": COUNT}, key=("arm", "name")),
    "settings": TableShape({"arm": choice(*ARMS), "name": TEXT, "value": TEXT}, key=("arm", "name")),
    **_COMMON,
}
_PLACE = {"turn": COUNT, "batch": SIZE, "prompt": TEXT}
"""When it was asked, how many were asked with it, and the prompt's digest."""
DRIFT_SHAPES: Mapping[str, TableShape] = {
    "drift": TableShape(
        {
            "arm": choice(*ARMS),
            "request": COUNT,
            "position": COUNT,
            "kl": optional(NUMBER),
            "max_gap": optional(NUMBER),
            "is_top1_equal": FLAG,
        },
        key=("arm", "request", "position"),
    ),
    "pair": TableShape(
        {"request": COUNT, "position": COUNT, "kl": optional(NUMBER), "is_top1_equal": FLAG},
        key=("request", "position"),
    ),
    "text": TableShape({"kind": choice("embedded", "local"), "digest": TEXT}, max_rows=1),
    **_COMMON,
}
TASK_SHAPES: Mapping[str, TableShape] = {
    "items": TableShape(
        {
            "arm": choice(*ARMS),
            "item": TEXT,
            "context": COUNT,
            "target": TOKENS,
            "answer": TOKENS,
            "finish": choice(*FINISHES),
            "prefix_tokens": COUNT,
            **_PLACE,
        },
        key=("arm", "item"),
    ),
    **_ASKED,
}
ANSWER_SHAPES: Mapping[str, TableShape] = {
    "answers": TableShape(
        {
            "arm": choice(*ARMS),
            "item": TEXT,
            "repeat": COUNT,
            "context": COUNT,
            "target": TEXT,
            "prefix": TEXT,
            "answer": TEXT,
            "finish": choice(*FINISHES),
            "tokens": COUNT,
            "lm_eval": optional(NUMBER),
            **_PLACE,
        },
        key=("arm", "item", "repeat"),
    ),
    "data": TableShape(
        {
            "dataset": TEXT,
            "revision": TEXT,
            "kind": choice("hub", "official_files", "local", "generated"),
            "digest": TEXT,
            "length_unit": TEXT,
        },
        max_rows=1,
        is_required=True,
    ),
    **_ASKED,
}
FEATURE_SHAPES: Mapping[str, TableShape] = {
    "draws": TableShape(
        {
            "arm": choice(*ARMS),
            "item": TEXT,
            "position": COUNT,
            "token": COUNT,
            "above": optional(NUMBER),
            "own": optional(NUMBER),
        },
        key=("arm", "item", "position"),
    ),
    "texts": TableShape(
        {
            "arm": choice(*ARMS, "control"),
            "item": TEXT,
            "expected": TEXT,
            "answer": TEXT,
            "finish": choice(*FINISHES),
        },
        key=("arm", "item"),
    ),
    "spreads": TableShape(
        {"arm": choice(*ARMS, "control"), "item": TEXT, "position": COUNT, "gap": optional(NUMBER)},
        key=("arm", "item", "position"),
    ),
    "counters": _ASKED["counters"],
    "settings": _ASKED["settings"],
    **_COMMON,
}

_ENGINE = {"arm": choice(*ENGINES), "batch": SIZE}
_TURNS = TableShape({**_ENGINE, "turn": COUNT, "us": POSITIVE}, key=("arm", "batch", "turn"))
ENGINE_SHAPES: Mapping[str, TableShape] = {
    "forced": TableShape(
        {**_ENGINE, "digest": TEXT, "positions": COUNT, "launches": COUNT},
        key=("arm", "batch"),
        is_required=True,
    ),
    "told": TableShape(
        {**_ENGINE, "request": COUNT, "position": COUNT, "token": COUNT, "nats": NUMBER},
        key=("arm", "batch", "request", "position", "token"),
        is_required=True,
    ),
    "decisions": TableShape(
        {**_ENGINE, "path": choice("stock", "optimised"), "reason": TEXT, "steps": SIZE},
        key=("arm", "batch", "path", "reason"),
    ),
    "layers": TableShape(
        {**_ENGINE, "step": COUNT, "layer": COUNT, "kind": choice(*CUT_KINDS), "kernels": SIZE, "us": NUMBER},
        key=("arm", "batch", "step", "layer"),
    ),
    "kernels": TableShape(
        {**_ENGINE, "kernel": TEXT, "launches": SIZE, "us": NUMBER}, key=("arm", "batch", "kernel")
    ),
    "replays": _TURNS,
    "wall": _TURNS,
    "settings": TableShape({"arm": choice(*ENGINES), "name": TEXT, "value": TEXT}, key=("arm", "name")),
}


def drift_faults(samples: Samples) -> tuple[str, ...]:
    """What keeps a drift eval from being judged."""
    return misshapen(samples, DRIFT_SHAPES) or (*_uneven_positions(samples), *cell_faults(samples))


def task_faults(check: Check, samples: Samples) -> tuple[str, ...]:
    """What keeps an eval with items from being judged."""
    return misshapen(samples, TASK_SHAPES) or (*_uneven_items(check, samples), *cell_faults(samples))


def _uneven_positions(samples: Samples) -> Iterator[str]:
    """Every arm is measured at the same positions, and no position of a text is left out."""
    places: dict[str, set[tuple[Scalar, Scalar]]] = {arm: set() for arm in ARMS}
    for row in _records(samples, "drift"):
        places[str(row["arm"])].add((row["request"], row["position"]))
    stock = places["stock"]
    yield from (f"arm {arm} has other positions than stock" for arm in ARMS if places[arm] != stock)
    pair = {(row["request"], row["position"]) for row in _records(samples, "pair")}
    if samples.table("pair") is not None and pair != stock:
        yield "the arms were compared with each other at other positions than with the oracle"
    for request in sorted({int(request or 0) for request, _ in stock}):
        positions = sorted(int(p or 0) for r, p in stock if r == request)
        if positions != list(range(positions[0], positions[-1] + 1)):
            yield f"text {request} leaves out positions between {positions[0]} and {positions[-1]}"


def answer_faults(check: Check, samples: Samples) -> tuple[str, ...]:
    """What keeps an eval over texts from being judged."""
    asked = ("context", "target", "prefix", "prompt", "batch")
    return misshapen(samples, ANSWER_SHAPES) or (
        *_uneven(check, samples, "answers", ("item", "repeat"), asked),
        *cell_faults(samples),
    )


def feature_faults(samples: Samples) -> tuple[str, ...]:
    """What keeps a check of a feature from being judged."""
    return misshapen(samples, FEATURE_SHAPES) or cell_faults(samples)


def engine_faults(samples: Samples) -> tuple[str, ...]:
    """What keeps the measurements of an engine from being judged: their shape, or arms along unlike texts."""
    return misshapen(samples, ENGINE_SHAPES) or tuple(_unlike_texts(samples))


def _unlike_texts(samples: Samples) -> Iterator[str]:
    forced = _records(samples, "forced")
    stock = {row["batch"]: (row["digest"], row["positions"]) for row in forced if row["arm"] == "stock"}
    yield from (
        f"the {row['arm']} engine was not forced along stock's text at batch {row['batch']}"
        for row in forced
        if stock.get(row["batch"]) != (row["digest"], row["positions"])
    )


def _uneven_items(check: Check, samples: Samples) -> Iterator[str]:
    asked = ("context", "target", "prefix_tokens", "prompt", "batch")
    yield from _uneven(check, samples, "items", ("item",), asked)


def _uneven(
    check: Check, samples: Samples, table: str, key: tuple[str, ...], asked: tuple[str, ...]
) -> Iterator[str]:
    """Both arms answer every item that was asked, an item is the same question for each arm, asked among as
    many others, and the arms take turns.
    """
    questions: dict[str, dict[str, dict[str, Scalar]]] = {arm: {} for arm in ARMS}
    turns: dict[str, set[int]] = {arm: set() for arm in ARMS}
    for row in _records(samples, table):
        place = "/".join(str(row[name]) for name in key)
        questions[str(row["arm"])][place] = {name: row[name] for name in asked}
        turns[str(row["arm"])].add(int(row["turn"] or 0))
    stock = questions["stock"]
    if stock.keys() != questions["optimised"].keys():
        yield "the arms did not answer the same items"
    if not questions["poison"].keys() <= stock.keys():
        yield "the control answered items that stock did not"
    yield from (
        f"item {item} is another question for arm {arm} than for stock"
        for arm in ("optimised", "poison")
        for item, question in questions[arm].items()
        if _question(stock.get(item, question), arm) != _question(question, arm)
    )
    count = check.parameter("items")
    if stock and count is not None and len(stock) != count:
        yield f"{len(stock)} items were answered, and the plan asks {count}"
    if dict(check.parameters).get("is_interleaved") and _is_apart(turns["stock"], turns["optimised"]):
        yield "the arms did not take turns, so that whatever drifted in time met one of them alone"


def _question(fields: Mapping[str, Scalar], arm: str) -> dict[str, Scalar]:
    """What makes a question the same; the control asks fewer at once."""
    return {name: value for name, value in fields.items() if name != "batch" or arm != "poison"}


def _is_apart(one: set[int], two: set[int]) -> bool:
    """Whether all of one came before all of the other, though there were batches to alternate."""
    return len(one) > 1 and len(two) > 1 and (max(one) < min(two) or max(two) < min(one))


def _records(samples: Samples, name: str) -> tuple[dict[str, Scalar], ...]:
    table = samples.table(name)
    return table.records() if table else ()
