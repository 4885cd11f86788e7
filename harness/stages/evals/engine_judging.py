"""What the measurements of a real engine amount to. Pure: samples in, outcome out.

In order: arms that were not forced along one text are INVALID; a batch of which a decode step was stock's, or
in which counters, decisions and profile disagree, is NO_EVIDENCE; the switch off must give stock's numbers to
the bit at one request; then log-probabilities must part from stock's no further than stock's own do when it
takes other backends. The poisoned arm must fail that.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple

from harness.domain.check import Check, Control, Figure, Outcome, Samples, Status, judged
from harness.domain.table_shape import unusable
from harness.stages.evals.shares import NEXT_STEPS, Rows, limit, rows_of
from harness.stages.evals.tables import engine_faults

__all__ = ["Agreement", "agreement", "judge_engine"]

SPREADS = ("spread", "spread_other")
"""Stock by other backends of its own."""
KINDS = ("kda_moe", "mla_moe", "dense")
Place = tuple[int, int]
Told = Mapping[Place, Mapping[int, float]]
"""By (request, position): log-probabilities of the likeliest tokens."""


class Agreement(NamedTuple):
    """Two arms along one text, over the tokens that both tell; the prompt's own step is left out."""

    mean: float
    """Nats."""
    largest: float
    first: int
    """Positions whose likeliest token is the same, of `positions`."""
    positions: int


class _Numbers(NamedTuple):
    """The arms' agreement with stock at one batch."""

    batch: int
    by_arm: Mapping[str, Agreement]
    allowed: float | None
    """None where stock's own spread is not known."""


def judge_engine(check: Check, samples: Samples) -> Outcome:
    """The outcome of the check."""
    if unfit := engine_faults(samples):
        return unusable(check, samples, unfit)
    batches = [int(word) for word in str(check.parameter("batches")).split(",")]
    off_path = [words for batch in batches for words in _off_path(samples, batch)]
    numbers = [_numbers(check, samples, batch) for batch in _told_batches(check)]
    status, words = _verdict(batches, off_path, numbers)
    figures = (
        Figure(name="path_share", value=_share(samples, batches), note=f"of batches {_list(batches)}"),
        *(figure for found in numbers for figure in _agreement_figures(found)),
        *(figure for batch in batches for figure in _speed_figures(samples, batch)),
    )
    return judged(check, samples, status, words, NEXT_STEPS, _poison(numbers), figures)


def agreement(one: Told, other: Told) -> Agreement | None:
    """How far two arms are apart; None where they tell no token in common."""
    gaps, same, positions = list[float](), 0, 0
    for place in sorted(one.keys() & other.keys()):
        if place[1] == 0:
            continue
        a, b = one[place], other[place]
        positions += 1
        same += max(a, key=a.__getitem__) == max(b, key=b.__getitem__)
        gaps += [abs(a[token] - b[token]) for token in a.keys() & b.keys()]
    return Agreement(fmean(gaps), max(gaps), same, positions) if gaps else None


def _verdict(
    batches: Sequence[int], off_path: Sequence[str], numbers: Sequence[_Numbers]
) -> tuple[Status, str]:
    if off_path:
        return Status.NO_EVIDENCE, "; ".join(off_path[:3])
    for found in numbers:
        own, switch_off = found.by_arm.get("optimised"), found.by_arm.get("switch_off")
        if own is None or found.allowed is None or switch_off is None:
            lacking = "the arms" if own is None else "stock's own spread, or the switch off,"
            return Status.NO_EVIDENCE, f"{lacking} told no log-probability in common at batch {found.batch}"
        if found.batch == 1 and switch_off.largest > 0:
            words = f"with the switch off log-probabilities part from stock's by {switch_off.largest:.3g}"
            return Status.FAIL, words
        if own.mean > found.allowed:
            words = f"log-probabilities part from stock's by {own.mean:.3g} nats on average at batch "
            return Status.FAIL, f"{words}{found.batch}, over {found.allowed:.3g}"
    parts = (
        f"{found.by_arm['optimised'].mean:.3g} nats at batch {found.batch} ({found.allowed:.3g} allowed)"
        for found in numbers
    )
    words = "every decode step is the optimised path's; log-probabilities part from stock's by "
    return Status.PASS, f"{words}{', '.join(parts)}; batches {_list(batches)}"


def _off_path(samples: Samples, batch: int) -> Iterator[str]:
    """Why a batch's decode steps were not all the optimised path's, by three witnesses."""
    forced = {str(r["arm"]): r for r in _of(samples, "forced", batch)}
    if not {"stock", "optimised"} <= forced.keys():
        yield f"batch {batch} was not run in both arms"
        return
    steps = int(forced["optimised"]["positions"] or 0) - 1
    launches = int(forced["optimised"]["launches"] or 0)
    profiled = {
        int(r["kernels"] or 0)
        for r in _of(samples, "layers", batch)
        if r["arm"] == "optimised" and r["kind"] == "model"
    }
    each, rest = divmod(launches, max(1, steps))
    if launches == 0 or rest or profiled != {each}:
        seen = " or ".join(map(str, sorted(profiled))) or "no"
        yield (
            f"batch {batch}: {launches} launches were counted in {steps} steps, and the profile shows {seen} "
            "kernels a step"
        )
    paths = {str(r["path"]) for r in _of(samples, "decisions", batch) if r["arm"] == "optimised"}
    if "optimised" not in paths:
        yield f"batch {batch}: the dispatcher took no step"
    names = {
        arm: {str(r["kernel"]) for r in _of(samples, "kernels", batch) if r["arm"] == arm}
        for arm in ("stock", "optimised")
    }
    if not names["stock"] or not names["optimised"]:
        yield f"batch {batch} was not profiled in both arms"
    elif shared := sorted(names["stock"] & names["optimised"]):
        yield f"batch {batch}: stock's kernel {shared[0][:60]} runs in the optimised steps"


def _share(samples: Samples, batches: Sequence[int]) -> float:
    """Batches whose every decode step was the optimised path's."""
    return sum(not any(_off_path(samples, batch)) for batch in batches) / len(batches)


def _numbers(check: Check, samples: Samples, batch: int) -> _Numbers:
    told: dict[str, dict[Place, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in _of(samples, "told", batch):
        place = (int(row["request"] or 0), int(row["position"] or 0))
        told[str(row["arm"])][place][int(row["token"] or 0)] = -float(row["nats"] or 0.0)
    stock = told.get("stock", {})
    found = {arm: agreement(stock, own) for arm, own in told.items() if arm != "stock"}
    by_arm = {arm: value for arm, value in found.items() if value is not None}
    spreads = [by_arm[arm].mean for arm in SPREADS if arm in by_arm]
    factor, floor = limit(check, "spread_factor", 2.0), limit(check, "spread_floor_nats", 0.05)
    return _Numbers(batch, by_arm, factor * max(spreads) + floor if spreads else None)


def _poison(numbers: Sequence[_Numbers]) -> Control:
    """The arm with a wrong op, under the same limit."""
    seen = [
        (found.batch, found.by_arm["poison"].mean, found.allowed)
        for found in numbers
        if "poison" in found.by_arm and found.allowed is not None
    ]
    told = (f"{mean:.3g} nats at batch {batch}, over {allowed:.3g}" for batch, mean, allowed in seen)
    return Control(
        kind="poison",
        description="an arm with one op made wrong, held to the same limit",
        failed=len(seen) == len(numbers) > 0 and all(mean > allowed for _, mean, allowed in seen),
        observed=", ".join(told) or "no arm was poisoned",
    )


def _agreement_figures(found: _Numbers) -> Iterator[Figure]:
    for arm, value in sorted(found.by_arm.items()):
        yield Figure(
            name=f"{arm}_mean_gap_nats.b{found.batch}",
            value=value.mean,
            note=f"largest {value.largest:.3g}, likeliest token {value.first} of {value.positions}",
        )


def _speed_figures(samples: Samples, batch: int) -> Iterator[Figure]:
    """Stock's time over the optimised one, each with both times."""
    for kind in (*KINDS, "model"):
        rows = [r for r in _of(samples, "layers", batch) if r["kind"] == kind]
        kernels = {arm: _middle(rows, arm, "kernels") for arm in ("stock", "optimised")}
        yield from _ratio(
            f"{kind}_gain.b{batch}", rows, f"{kernels['stock']} and {kernels['optimised']} kernels"
        )
    yield from _ratio(f"graph_gain.b{batch}", _of(samples, "replays", batch), "no profiler")
    yield from _ratio(f"wall_gain.b{batch}", _of(samples, "wall", batch), "host included")


def _ratio(name: str, rows: Rows, note: str) -> Iterator[Figure]:
    stock, own = _middle(rows, "stock", "us"), _middle(rows, "optimised", "us")
    if stock is not None and own is not None and own > 0:
        yield Figure(name=name, value=stock / own, note=f"{stock:.1f} and {own:.1f} us; {note}")


def _middle(rows: Rows, arm: str, column: str) -> float | None:
    values = [float(r[column] or 0.0) for r in rows if r["arm"] == arm]
    return median(values) if values else None


def _told_batches(check: Check) -> list[int]:
    return [int(word) for word in str(check.parameter("told")).split(",")]


def _of(samples: Samples, table: str, batch: int) -> Rows:
    return [row for row in rows_of(samples, table) if row["batch"] == batch]


def _list(batches: Sequence[int]) -> str:
    return ", ".join(map(str, batches))
