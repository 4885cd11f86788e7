"""What the times of a cell amount to. Pure: samples in, outcome out."""

from collections.abc import Sequence
from statistics import median

from harness.domain.check import Check, Control, Figure, Outcome, Samples, Status, judged
from harness.domain.table_shape import unusable
from harness.measure.interleaved import Comparison, compare
from harness.stages.sweep.layers import chosen_stock, layer_figures, layer_objection, layer_unfit
from harness.stages.sweep.likeness import has_threshold, timer_objection, unlike, unproven, unseen, unsteady
from harness.stages.sweep.tables import arm_times, faults

__all__ = ["drift_of", "judge", "noise_of", "verdict_of"]


def judge(check: Check, samples: Samples) -> Outcome:
    """The outcome of one cell."""
    is_layer = dict(check.parameters).get("kind") is not None
    if unfit := faults(check, samples, is_layer=is_layer):
        return unusable(check, samples, unfit)
    alpha, seed = check.number("alpha"), int(check.parameter("seed") or 0)
    times = arm_times(samples)
    share = _path_share(samples)
    if share is None or share < check.number("min_path_share"):
        words = f"the optimised arm took the optimised path for {share or 0:.1%} of its tokens"
        return judged(check, samples, Status.NO_EVIDENCE, words, NEXT_STEPS, None, ())
    least, tokens = (
        check.number("min_tokens") if has_threshold(check, "min_tokens") else 0,
        _path_tokens(samples),
    )
    if tokens < least:
        words = (
            f"the optimised path decoded {tokens} tokens, fewer than the {least:.0f} that this cell must hold"
        )
        return judged(check, samples, Status.NO_EVIDENCE, words, NEXT_STEPS, None, ())
    medians = {arm: median(times[arm]) for arm in ("stock", "optimised")}
    instrument = timer_objection(check, samples) or layer_unfit(check, samples, medians) if is_layer else None
    if difference := instrument if is_layer else unlike(check, samples):
        return judged(check, samples, Status.INVALID, difference, NEXT_STEPS, None, ())
    if not is_layer and (gap := unproven(check, samples)):
        return judged(check, samples, Status.NO_EVIDENCE, gap, NEXT_STEPS, None, ())
    if not is_layer and (noise_words := unseen(samples) or unsteady(samples)):
        return judged(check, samples, Status.INCONCLUSIVE, noise_words, NEXT_STEPS, None, ())
    try:
        gain, null, slow = (
            compare(times["stock"][: len(times[a])], times[a], alpha, seed)
            for a in ("optimised", "null", "slow")
        )
    except ValueError as error:
        return judged(check, samples, Status.INCONCLUSIVE, str(error), NEXT_STEPS, None, ())
    noise = noise_of(check, null)
    status, words = verdict_of(check, gain, noise)
    drift = drift_of(times["stock"])
    if has_threshold(check, "max_drift"):
        allowed = max(check.number("max_drift"), abs(gain.ratio - 1), noise)
        if abs(drift) > allowed:
            status = Status.INCONCLUSIVE
            words = f"{words}: stock itself moved by {drift:+.0%} during the run, more than {allowed:.0%}"
    if is_layer:
        words = f"{words}, stock by {chosen_stock(samples)}"
        if objection := layer_objection(check, samples, gain.other_us, noise):
            status, words = Status.FAIL, f"{objection}; {words}"
    slow_status, slow_words = verdict_of(check, slow, noise)
    control = Control(
        kind="planted",
        description=f"stock with {check.number('planted_slowdown'):.0%} of its time added, against stock",
        failed=slow_status is not Status.PASS and slow.high < 1,
        observed=slow_words,
    )
    figures = (
        *_figures(gain, null, noise, share),
        Figure(name="drift", value=drift, note="stock's second half over its first"),
    )
    if is_layer:
        figures += layer_figures(samples, gain.other_us, gain.stock_us)
    else:
        figures = (*_rates(check, gain), *figures)
    return judged(check, samples, status, words, NEXT_STEPS, control, figures)


def drift_of(stock_us: Sequence[float]) -> float:
    """How far stock moved from the first half of a run to the second, as a share."""
    half = len(stock_us) // 2
    return median(stock_us[-half:]) / median(stock_us[:half]) - 1


def noise_of(check: Check, null: Comparison) -> float:
    """This machine's noise floor: how far from 1 the interval of stock against stock reaches, and no less
    than what the same work in other memory may differ by.
    """
    least = check.number("min_noise") if has_threshold(check, "min_noise") else 0.0
    return max(abs(null.low - 1), abs(null.high - 1), least)


def verdict_of(check: Check, gain: Comparison, noise: float) -> tuple[Status, str]:
    """What a gain over stock amounts to beside this noise."""
    promise = check.parameter("promise")
    least = float(promise) if promise is not None else check.number("min_ratio")
    words = (
        f"stock {gain.stock_us:.0f} us, optimised {gain.other_us:.0f} us: {gain.ratio:.2f}x [{gain.low:.2f}, "
        f"{gain.high:.2f}], "
        f"asked {least:.2f}x, noise {noise:.1%}"
    )
    if noise > check.number("max_noise"):
        return Status.INCONCLUSIVE, f"{words}: this machine is too noisy now"
    if gain.low >= least * (1 - noise) and gain.ratio >= least * (1 - noise):
        return Status.PASS, words
    if gain.high < least * (1 - noise):
        return Status.FAIL, words
    return Status.INCONCLUSIVE, words


def _rates(check: Check, gain: Comparison) -> tuple[Figure, ...]:
    """Steps a second first; tokens a second where an acceptance is known, and by which it is labelled."""
    batch, drafts = (1, 0) if check.cell is None else (check.cell.batch, check.cell.drafts)
    steps = 1e6 / gain.other_us
    if not drafts:
        return (
            Figure(name="verify_steps_per_s", value=steps, note="optimised arm, no drafts: a token a step"),
            Figure(name="tokens_per_s", value=batch * steps, note="acceptance: none, no speculation"),
        )
    golden = check.parameter("golden")
    tokens = None if golden is None else batch * steps * float(golden)
    return (
        Figure(name="verify_steps_per_s", value=steps, note=f"optimised arm, {drafts} drafts a request"),
        Figure(
            name="tokens_per_s", value=tokens,
            missing=None if tokens is not None else "no acceptance is known, and none was measured",
            note="" if tokens is None else f"golden acceptance: {golden} tokens a step; none was measured",
        ),
    )  # fmt: skip


def _figures(gain: Comparison, null: Comparison, noise: float, share: float) -> tuple[Figure, ...]:
    return (
        Figure(name="stock_us", value=gain.stock_us),
        Figure(name="optimised_us", value=gain.other_us),
        Figure(
            name="ratio",
            value=gain.ratio,
            low=gain.low,
            high=gain.high,
            note="stock time over optimised time",
        ),
        Figure(name="null_ratio", value=null.ratio, low=null.low, high=null.high, note="stock against stock"),
        Figure(name="noise_floor", value=noise),
        Figure(name="path_share", value=share),
    )


def _path_tokens(samples: Samples) -> int:
    """Decoded by the optimised arm on its path."""
    table = samples.table("steps")
    rows = () if table is None else table.records()
    return sum(
        int(row["tokens"] or 0)
        for row in rows
        if (row["arm"], row["path"]) == ("optimised", "optimised") and row["phase"] in STEPS
    )


def _path_share(samples: Samples) -> float | None:
    table = samples.table("steps")
    rows = (
        []
        if table is None
        else [r for r in table.records() if r["arm"] == "optimised" and r["phase"] in STEPS]
    )
    total = sum(int(row["tokens"] or 0) for row in rows)
    return (
        sum(int(row["tokens"] or 0) for row in rows if row["path"] == "optimised") / total if total else None
    )


STEPS = ("decode", "verify")
"""Phases of the ledger that are timed."""
NEXT_STEPS = {
    Status.INVALID: "sample the cell again: both arms on equal work, in a worker whose clock is sound",
    Status.FAIL: "profile the cell: `fasttrack kernels bench`; or take the cell out of the claim's envelope",
    Status.NO_EVIDENCE: "make the optimised path run in this cell; coverage names the decline reason",
    Status.INCONCLUSIVE: "run again on a quieter machine, or with more blocks: `fasttrack run sweep --full`",
}
