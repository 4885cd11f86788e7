"""The tables of an eval, and that its arms answered the same questions, all of them."""

from collections.abc import Iterator, Mapping

from harness.domain.check import Check, Samples
from harness.domain.record import Scalar
from harness.domain.table_shape import (
    COUNT,
    FLAG,
    NUMBER,
    TEXT,
    TOKENS,
    TableShape,
    choice,
    misshapen,
    optional,
)

__all__ = ["DRIFT_SHAPES", "TASK_SHAPES", "drift_faults", "task_faults"]

ARMS = ("stock", "optimised", "poison")
_COMMON: Mapping[str, TableShape] = {
    "driver": TableShape({"driver": TEXT}, max_rows=1),
    "steps": TableShape(
        {
            "arm": choice(*ARMS),
            "phase": choice("decode", "verify", "prefill", "mixed"),
            "path": choice("stock", "optimised"),
            "reason": TEXT,
            "tokens": COUNT,
        },
        key=("arm", "phase", "path", "reason"),
    ),
}
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
            "finish": choice("stop", "length", "error"),
            "prefix_tokens": COUNT,
        },
        key=("arm", "item"),
    ),
    **_COMMON,
}


def drift_faults(samples: Samples) -> tuple[str, ...]:
    """What keeps a drift eval from being judged."""
    return misshapen(samples, DRIFT_SHAPES) or tuple(_uneven_positions(samples))


def task_faults(check: Check, samples: Samples) -> tuple[str, ...]:
    """What keeps an eval with items from being judged."""
    return misshapen(samples, TASK_SHAPES) or tuple(_uneven_items(check, samples))


def _uneven_positions(samples: Samples) -> Iterator[str]:
    """Every arm is measured at the same positions, and no position of a text is left out."""
    places: dict[str, set[tuple[Scalar, Scalar]]] = {arm: set() for arm in ARMS}
    for row in _records(samples, "drift"):
        places[str(row["arm"])].add((row["request"], row["position"]))
    stock = places["stock"]
    yield from (f"arm {arm} has other positions than stock" for arm in ARMS if places[arm] != stock)
    for request in sorted({int(request or 0) for request, _ in stock}):
        positions = sorted(int(p or 0) for r, p in stock if r == request)
        if positions != list(range(positions[0], positions[-1] + 1)):
            yield f"text {request} leaves out positions between {positions[0]} and {positions[-1]}"


def _uneven_items(check: Check, samples: Samples) -> Iterator[str]:
    """Both arms answer every item that was asked, and an item is the same question for each arm."""
    questions: dict[str, dict[str, tuple[Scalar, ...]]] = {arm: {} for arm in ARMS}
    for row in _records(samples, "items"):
        asked = (row["context"], row["target"], row["prefix_tokens"])
        questions[str(row["arm"])][str(row["item"])] = asked
    stock = questions["stock"]
    if stock.keys() != questions["optimised"].keys():
        yield "the arms did not answer the same items"
    if not questions["poison"].keys() <= stock.keys():
        yield "the control answered items that stock did not"
    yield from (
        f"item {item} is another question for arm {arm} than for stock"
        for arm in ("optimised", "poison")
        for item, asked in questions[arm].items()
        if stock.get(item, asked) != asked
    )
    count = check.parameter("items")
    if stock and count is not None and len(stock) != count:
        yield f"{len(stock)} items were answered, and the plan asks {count}"


def _records(samples: Samples, name: str) -> tuple[dict[str, Scalar], ...]:
    table = samples.table(name)
    return table.records() if table else ()
