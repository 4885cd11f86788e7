"""Whether the sweeps of two runs can be compared, and how many times faster the second is, cell by cell.
Pure.

The obstacles come first: what differs other than the code under test makes every ratio meaningless. Times of
the two runs were not interleaved, so a ratio's interval also carries how far stock moved between them: where
stock itself moved beyond both noise floors, the machine did, and the cell says nothing.
"""

from collections.abc import Iterator, Mapping, Sequence

from harness.domain.cell import Cell
from harness.domain.check import Check, CheckId, Figure, Outcome, StageName, Status
from harness.domain.machine import Machine
from harness.domain.plan import Plan
from harness.domain.record import Record

__all__ = ["CellRatio", "SweepComparison", "compare_sweeps"]

Run = tuple[Plan, Sequence[Outcome]]


class CellRatio(Record):
    """One cell of both runs."""

    check: CheckId
    first_us: float | None = None
    """Optimised arm's time in the first run."""
    second_us: float | None = None
    ratio: float | None = None
    """Gain over stock in the second run over that in the first: above 1 where the second is faster."""
    low: float | None = None
    high: float | None = None
    stock_ratio: float | None = None
    """Stock's time in the first run over that in the second: what the machine did."""
    is_alike: bool
    """Whether 1 is within the interval."""
    words: str
    """Why there is no ratio, or what it says."""


class SweepComparison(Record):
    """Obstacles, or a ratio a cell."""

    obstacles: tuple[str, ...]
    cells: tuple[CellRatio, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 alike, 1 not, 2 not comparable."""
        if self.obstacles or not any(cell.ratio is not None for cell in self.cells):
            return 2
        return int(any(not cell.is_alike for cell in self.cells))


def compare_sweeps(first: Run, second: Run) -> SweepComparison:
    """The second run against the first."""
    found = tuple(_obstacles(first[0], second[0]))
    if found:
        return SweepComparison(obstacles=found)
    ones, twos = (_done(plan, outcomes) for plan, outcomes in (first, second))
    both = [name for name in ones if name in twos]
    if not both:
        return SweepComparison(obstacles=("no cell was timed in both",))
    return SweepComparison(obstacles=(), cells=tuple(_ratio(ones[name], twos[name]) for name in both))


def _obstacles(one: Plan, two: Plan) -> Iterator[str]:
    """What differs beside the code under test, or that this does not differ."""
    if one.pack_digest == two.pack_digest:
        yield (
            f"both runs timed one build of the pack ({one.pack_digest[:12]}), so no difference is the "
            "code's; `fasttrack reproduce` says whether a run repeats"
        )
    yield from _machine_differences(one.machine, two.machine)
    checks = [{c.id: _question(c) for c in plan.of_stage(StageName.SWEEP)} for plan in (one, two)]
    if not checks[0].keys() & checks[1].keys():
        yield "no cell was planned in both"
    for name in sorted(checks[0].keys() & checks[1].keys()):
        if checks[0][name] != checks[1][name]:
            yield f"{name} was asked otherwise: {_asked_otherwise(checks[0][name], checks[1][name])}"


def _asked_otherwise(one: Mapping[str, object], two: Mapping[str, object]) -> str:
    """Each part of the question that differs, with what either run asked."""
    names = sorted(name for name in one.keys() | two.keys() if one.get(name) != two.get(name))
    return ", ".join(f"{name} {_told(one.get(name))} and {_told(two.get(name))}" for name in names)


def _told(value: object) -> str:
    return "none" if value is None else value.label() if isinstance(value, Cell) else str(value)


def _machine_differences(one: Machine, two: Machine) -> Iterator[str]:
    """Each field in which the machines differ; memory and free libraries move no time."""
    for name in ("cpu_model", "cpu_count", "gpus", "driver", "nvlinks"):
        seen = getattr(one, name), getattr(two, name)
        if seen[0] != seen[1]:
            words = [_words(value) for value in seen]
            if words[0] == words[1]:  # alike by number and name: what differs lies deeper
                words = [str(value) for value in seen]
            yield f"{name.replace('_', ' ')}: {words[0]} and {words[1]}"
    libraries = dict(one.libraries), dict(two.libraries)
    for name in ("torch", "triton", "nvidia-cutlass-dsl", "vllm"):
        if libraries[0].get(name) != libraries[1].get(name):
            yield f"{name}: {libraries[0].get(name, 'none')} and {libraries[1].get(name, 'none')}"


def _words(value: object) -> str:
    if isinstance(value, tuple):
        return f"{len(value)} x {value[0].name}" if value else "no GPU"
    return "not read" if value is None else str(value)


def _question(check: Check) -> dict[str, object]:
    """What a cell asks: its prompts' seed and its promise may differ, the work may not."""
    parameters = {k: v for k, v in check.parameters if k not in ("seed", "promise")}
    return {"cell": check.cell, "subject": check.subject, **parameters}


def _done(plan: Plan, outcomes: Sequence[Outcome]) -> Mapping[CheckId, Outcome]:
    planned = {check.id for check in plan.of_stage(StageName.SWEEP)}
    return {o.check: o for o in outcomes if o.check in planned and o.status is not Status.SKIPPED}


def _ratio(one: Outcome, two: Outcome) -> CellRatio:
    untelling = [f"{o.status.value} in the {n} run" for o, n in ((one, "first"), (two, "second"))]
    usable = [o.status in (Status.PASS, Status.FAIL) for o in (one, two)]
    if not all(usable):
        words = "; ".join(w for w, is_usable in zip(untelling, usable, strict=True) if not is_usable)
        return CellRatio(check=one.check, is_alike=True, words=words)
    before, after = _figures(one), _figures(two)
    names = ("stock_us", "optimised_us", "noise_floor", "ratio")
    if any(figures.get(n) is None or figures[n].value is None for figures in (before, after) for n in names):
        return CellRatio(check=one.check, is_alike=True, words="a time or its noise is missing")
    stock = _over(before, after, "stock_us")
    noise = sum(float(f["noise_floor"].value or 0.0) for f in (before, after))
    # Both runs carry stock as their yardstick: the ratio of gains is free of what the machine did to both.
    (least, most), (new_least, new_most) = (_spread(figures["ratio"]) for figures in (before, after))
    mine = 1 / _over(before, after, "ratio")
    low, high = new_least / most * (1 - noise), new_most / least * (1 + noise)
    found = {
        "check": one.check,
        "first_us": before["optimised_us"].value,
        "second_us": after["optimised_us"].value,
        "stock_ratio": stock,
    }
    if abs(stock - 1) > noise:
        words = f"stock itself moved by {stock - 1:+.0%}, beyond the noise of {noise:.0%}: the machine did"
        return CellRatio.model_validate({**found, "is_alike": True, "words": words})
    is_alike = low <= 1 <= high
    words = "alike" if is_alike else "the second run is faster" if low > 1 else "the second run is slower"
    ratio = {"ratio": mine, "low": low, "high": high, "is_alike": is_alike, "words": words}
    return CellRatio.model_validate({**found, **ratio})


def _figures(outcome: Outcome) -> Mapping[str, Figure]:
    return {figure.name: figure for figure in outcome.figures}


def _over(before: Mapping[str, Figure], after: Mapping[str, Figure], name: str) -> float:
    return float(before[name].value or 0.0) / float(after[name].value or 1.0)


def _spread(ratio: Figure) -> tuple[float, float]:
    value = float(ratio.value or 0.0)
    return (value if ratio.low is None else ratio.low), (value if ratio.high is None else ratio.high)
