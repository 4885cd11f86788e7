"""The method against itself: a cell whose arms are all stock, repeated, judged as any cell is.

Blocks are ordered and ended, intervals made and verdicts given by the very code of a sweep. Only the sessions
differ: each repeat opens its own, so that where they lie in memory is drawn anew.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager

from harness.domain.check import Check
from harness.domain.null_run import ARMS, NullRepeat, NullRun
from harness.domain.stage import StageContext
from harness.measure.interleaved import TimedUnit, compare, cpu_unit
from harness.stages.sweep.judging import noise_of, verdict_of
from harness.stages.sweep.sampling import slowed_step, step_of
from harness.stages.sweep.stopping import time_blocks

__all__ = ["null_check", "null_repeat", "null_repeats", "rejudged", "stock_units"]

Open = Callable[[], AbstractContextManager[Mapping[str, TimedUnit]]]


def null_check(check: Check) -> Check:
    """The cell asked for what equal arms just reach: no gain, and no loss either."""
    thresholds = tuple(
        t.model_copy(update={"value": 1.0}) if t.name == "min_ratio" else t for t in check.thresholds
    )
    parameters = tuple((k, None if k == "promise" else v) for k, v in check.parameters)
    return check.model_copy(update={"thresholds": thresholds, "parameters": parameters})


def null_repeats(check: Check, open_units: Open, count: int) -> Iterator[NullRepeat]:
    """So many repeats, each on units of its own."""
    for _ in range(count):
        with open_units() as units:
            rows = time_blocks(check, units)
        times = {arm: tuple(us for a, _, us in rows if a == arm) for arm in ARMS}
        yield null_repeat(check, times)


def null_repeat(check: Check, times: Mapping[str, tuple[float, ...]]) -> NullRepeat:
    """What the judge of a sweep makes of these times. Pure."""
    alpha, seed = check.number("alpha"), int(check.parameter("seed") or 0)
    gain, null, slow = (
        compare(times["stock"][: len(times[arm])], times[arm], alpha, seed)
        for arm in ("optimised", "null", "slow")
    )
    noise = noise_of(check, null)
    return NullRepeat(
        status=verdict_of(check, gain, noise)[0], ratio=gain.ratio, low=gain.low, high=gain.high, noise=noise,
        is_planted_seen=slow.high < 1, times_us=tuple(times[arm] for arm in ARMS),
    )  # fmt: skip


def rejudged(run: NullRun) -> NullRun:
    """The record as its times are judged now. Pure."""
    again = (null_repeat(run.check, dict(zip(ARMS, r.times_us, strict=True))) for r in run.repeats)
    return run.model_copy(update={"repeats": tuple(again)})


@contextmanager
def stock_units(check: Check, context: StageContext) -> Iterator[Mapping[str, TimedUnit]]:
    """Decode steps of four sessions of stock, one of them slowed down."""
    with ExitStack() as stack:
        work = {arm: step_of(check, context, "stock", stack) for arm in ARMS}
        units: dict[str, TimedUnit] = {arm: cpu_unit(step) for arm, step in work.items() if arm != "slow"}
        units["slow"] = cpu_unit(slowed_step(work["slow"], check.number("planted_slowdown")))
        yield units
