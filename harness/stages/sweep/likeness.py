"""Whether the arms of a decode step did like work, on a clock that no candidate holds.

Tables: `outside` (name, us): every timed unit, `<arm>.<block>`, by the clock of the process that started the
worker, beside what the worker's own says in `timings`; `prefixes` (arm, queries, hits, reused_tokens):
counters of the prefix cache, and of a control session that must hit; `experts` (arm, experts, expert, rows):
how many rows of a step chose which expert of the last MoE layer; `known` (name, known_us, told_us): known
durations, as the same timer tells them. Work that was asked and work that the ledger counted must be equal.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from statistics import median
from typing import Any

from harness.domain.check import Check, Samples
from harness.domain.pack import Session
from harness.domain.table_shape import COUNT, NUMBER, TEXT, TableShape, choice
from harness.executors.marks import stretch
from harness.measure.interleaved import TimedUnit
from harness.measure.known_times import KNOWN_SHAPE, KnownTime, timer_fault

__all__ = [
    "LIKENESS_SHAPES", "PROMPT_TOKENS", "WARM_STEPS", "expert_rows", "has_threshold", "marked",
    "prefix_rows", "timer_objection", "unlike", "unproven", "unseen", "unsteady",
]  # fmt: skip

WARM_STEPS = 3
"""Steps of the planted arm of which the quickest sets the length of its delay."""
PROMPT_TOKENS = 130
"""Of the control's prompt: two pages of the cache, and a little more."""
CONTROL = "control"
SEEN_SLOWER = 1.1
"""What the planted arm must take at least of stock's time by the clock outside."""
TOLERANCE, LATENCY_US = 0.35, 2000.0
"""How far a unit may differ between the two clocks: a share, and what a word takes on its way."""
MAX_APART = 0.2
"""Share of an arm's units that may differ by more: the one who listens is put off on a busy machine too."""
GAP_SHARE, GAP_ERRORS = 0.1, 4.0
"""What an arm may be told shorter or longer than stock is, by the clock outside: a share of stock's time, and
so many standard errors of the median, by stock's own gaps: an arm that scatters its own buys nothing. A word
takes as long on its way for every arm. Where those errors are more than the share, nothing is decided."""
MEDIAN_ERROR = 1.2533 * 1.4826
"""Standard error of a median of n normal values, in median absolute deviations and times the root of n."""
LIKENESS_SHAPES: Mapping[str, TableShape] = {
    "outside": TableShape({"name": TEXT, "us": NUMBER}, key=("name",)),
    "prefixes": TableShape(
        {
            "arm": choice("stock", "optimised", "null", "slow", CONTROL), "queries": COUNT, "hits": COUNT,
            "reused_tokens": COUNT,
        },
        key=("arm",),
    ),
    "experts": TableShape(
        {"arm": choice("stock", "optimised"), "experts": COUNT, "expert": COUNT, "rows": COUNT},
        key=("arm", "expert"),
    ),
    "known": KNOWN_SHAPE,
}  # fmt: skip


def marked(arm: str, unit: TimedUnit, mark: Callable[[str], object]) -> TimedUnit:
    """The unit, told to the clock outside each time; the first call is the warm-up before block 0."""
    block = itertools.count(-1)

    def run() -> float:
        with stretch(mark, f"{arm}.{next(block)}"):
            return unit()

    return run


def prefix_rows(
    sessions: Mapping[str, Session], open_control: Callable[[], Session], prompt: Sequence[int]
) -> tuple[tuple[Any, ...], ...]:
    """Rows of `prefixes`; the control is asked for the same prompt twice."""
    rows = [(arm, *session.prefix_counters()) for arm, session in sessions.items()]
    with closing(open_control()) as session:
        session.finish(session.prefill([prompt])[0])
        session.prefill([prompt])
        rows.append((CONTROL, *session.prefix_counters()))
    return tuple(rows)


def expert_rows(sessions: Mapping[str, Session]) -> Iterator[tuple[Any, ...]]:
    """Rows of `experts` of the last step; one of zeros where the model has none or nothing can be told."""
    for arm in ("stock", "optimised"):
        experts, chosen = sessions[arm].expert_choices()
        counts = Counter(expert for row in chosen for expert in row)
        if not counts:
            yield arm, experts, 0, 0
        for expert, rows in sorted(counts.items()):
            yield arm, experts, expert, rows


def unlike(check: Check, samples: Samples) -> str | None:
    """Why the times cannot be compared, in words; None where they can. Pure."""
    return (
        _from_prefix_cache(samples)
        or _other_clock(samples)
        or _other_gap(samples)
        or timer_objection(check, samples)
        or _other_work(check, samples)
    )


def timer_objection(check: Check, samples: Samples) -> str | None:
    """Why the timer itself cannot be believed, in words. Pure."""
    if not has_threshold(check, "timer_tolerance"):
        return None
    rows = _records(samples, "known")
    if not rows:
        return "the timer was not asked for a known duration"
    return timer_fault((KnownTime(**row) for row in rows), check.number("timer_tolerance"))


def has_threshold(check: Check, name: str) -> bool:
    """Whether the plan asks for it; plans made before it was asked do not."""
    return any(threshold.name == name for threshold in check.thresholds)


def unproven(check: Check, samples: Samples) -> str | None:
    """Why the times say nothing, in words; None where they do. Pure."""
    prefixes = {str(r["arm"]): r for r in _records(samples, "prefixes")}
    if CONTROL not in prefixes or not prefixes[CONTROL]["hits"]:
        return "the prefix cache's counters did not rise where the same prompt came twice: they prove nothing"
    return _too_few_experts(check, samples)


def unseen(samples: Samples) -> str | None:
    """Why the clock outside decides nothing, in words: it must see the planted slow-down. Pure."""
    pairs = _pairs(samples)
    slow, stock = (median(outside for outside, _ in pairs[arm]) for arm in ("slow", "stock"))
    if slow < SEEN_SLOWER * stock:
        return "the clock outside did not see the planted slow-down, so it would not see a lie either"
    return None


def _from_prefix_cache(samples: Samples) -> str | None:
    rows = [r for r in _records(samples, "prefixes") if r["arm"] != CONTROL and r["hits"]]
    if not rows:
        return None
    first = rows[0]
    return (
        f"{first['hits']} of {first['queries']} prompts of arm {first['arm']} came from the prefix cache "
        f"({first['reused_tokens']} tokens), and nobody declared it"
    )


def _other_clock(samples: Samples) -> str | None:
    """Where the worker's clock and the one outside say different things."""
    for arm, pairs in _pairs(samples).items():
        if any(outside is None for outside, _ in pairs):
            return f"not every unit of arm {arm} was seen by a clock outside of the worker"
        apart = [pair for pair in pairs if _is_apart(*pair)]
        if len(apart) > MAX_APART * len(pairs):
            outside, us = apart[0]
            return (
                f"{len(apart)} of {len(pairs)} units of arm {arm} took another time by the clock outside of "
                f"the worker: {outside:.0f} us, not {us:.3g} us"
            )
    return None


def _other_gap(samples: Samples) -> str | None:
    """Where an arm is told otherwise than stock by what the clock outside adds to its units, block by block.

    The fixed limits of `_other_clock` are wider than a short unit, so within them an arm alone could be told
    as anything. A clock that does not even see the planted slow-down has its own verdict (`unseen`).
    """
    if unseen(samples):
        return None
    pairs = _blocks(samples)
    gaps = _gaps(samples)
    stock_us = median(us for _, us in pairs["stock"].values())
    if _gap_error(gaps["stock"].values(), len(gaps["stock"])) > GAP_SHARE * stock_us:
        return None
    for arm in (arm for arm in gaps if arm != "stock"):
        both = [block for block in gaps[arm] if block in gaps["stock"]]
        if not both:
            continue
        allowed = GAP_SHARE * stock_us + _gap_error(gaps["stock"].values(), len(both))
        paired = median(gaps[arm][block] - gaps["stock"][block] for block in both)
        # Most units may be told truly and the rest not: the verdict is on medians, so medians must agree.
        apart = _gap_of_medians(pairs[arm], both) - _gap_of_medians(pairs["stock"], both)
        worst = max(paired, apart, key=abs)
        if abs(worst) > allowed:
            said = "shorter" if worst > 0 else "longer"
            return (
                f"arm {arm} is told {abs(worst):.0f} us {said} a unit than stock is, by the clock outside "
                f"of the worker ({allowed:.0f} us allowed)"
            )
    return None


def unsteady(samples: Samples) -> str | None:
    """Why what the clock outside adds cannot be compared, in words: it must be steady beside a unit. Pure."""
    gaps = _gaps(samples)
    allowed = GAP_SHARE * median(us for _, us in _pairs(samples)["stock"])
    for arm in ("stock", "optimised"):
        error = _gap_error(gaps[arm].values(), len(gaps[arm]))
        if error > allowed:
            return (
                f"what the clock outside of the worker adds to units of arm {arm} is known to {error:.0f} us "
                f"only ({allowed:.0f} us asked): it would not see a lie of that size"
            )
    return None


def _gap_error(gaps: Collection[float], count: int) -> float:
    """How far the medians of two times `count` gaps may differ by chance, when they scatter like these."""
    middle = median(gaps)
    scatter = median(abs(gap - middle) for gap in gaps)
    return float(GAP_ERRORS * MEDIAN_ERROR * scatter * (2 / count) ** 0.5)


def _gap_of_medians(pairs: Mapping[int, tuple[float, float]], blocks: Collection[int]) -> float:
    """Median by the clock outside less the median that was told; units noted late are `_other_clock`'s."""
    kept = [pairs[block] for block in blocks if not _is_apart(*pairs[block])]
    return median(outside for outside, _ in kept) - median(us for _, us in kept) if kept else 0.0


def _is_apart(outside: float, us: float) -> bool:
    """Whether the two clocks say more different things of a unit than a word on its way explains."""
    return abs(outside - us) > TOLERANCE * max(outside, us) + LATENCY_US


def _gaps(samples: Samples) -> dict[str, dict[int, float]]:
    """What the clock outside adds to a unit, by arm and block."""
    return {
        arm: {block: outside - us for block, (outside, us) in pairs.items()}
        for arm, pairs in _blocks(samples).items()
    }


def _blocks(samples: Samples) -> dict[str, dict[int, tuple[float, float]]]:
    """Each unit by both clocks, by arm and block."""
    blocks: dict[str, list[int]] = {}
    for row in _records(samples, "timings"):
        blocks.setdefault(str(row["arm"]), []).append(int(row["block"]))
    return {arm: dict(zip(blocks[arm], pairs, strict=True)) for arm, pairs in _pairs(samples).items()}


def _other_work(check: Check, samples: Samples) -> str | None:
    """Where an arm decoded more or fewer tokens than its timed steps ask, or prefilled more than once."""
    if check.cell is None or not has_threshold(check, "timer_tolerance"):
        return None
    units = Counter(str(row["arm"]) for row in _records(samples, "timings"))
    done: Counter[tuple[str, str]] = Counter()
    for row in _records(samples, "steps"):
        done[str(row["arm"]), str(row["phase"])] += int(row["tokens"])
    most = check.cell.batch * (check.cell.context - 1)
    for arm, count in units.items():
        asked = check.cell.rows * (count + 1 + (WARM_STEPS if arm == "slow" else 0))
        stepped = done[arm, "decode"] + done[arm, "verify"]
        if stepped != asked:
            return f"arm {arm} decoded {stepped} tokens, and its timed steps ask for {asked}"
        if done[arm, "prefill"] > most:
            return f"arm {arm} prefilled {done[arm, 'prefill']} tokens of {most}: set-up is in what was timed"
    return None


def _too_few_experts(check: Check, samples: Samples) -> str | None:
    """Whether the step's rows chose so few experts that its time says nothing of a real one."""
    rows = _records(samples, "experts")
    batch = 1 if check.cell is None else check.cell.batch
    for arm in ("stock", "optimised"):
        mine = [r for r in rows if r["arm"] == arm]
        if not mine:
            return f"arm {arm} has no histogram of experts: its time says nothing of a MoE"
        experts, chosen = mine[0]["experts"], sum(r["rows"] for r in mine)
        if not experts or (batch == 1 and not chosen):
            continue
        distinct = sum(r["rows"] > 0 for r in mine)
        by_chance = experts * (1 - (1 - chosen / batch / experts) ** batch)
        if distinct < check.number("min_expert_share") * by_chance:
            return (
                f"the {batch} rows of arm {arm} chose {distinct} of {experts} experts, where an even router "
                f"gives {by_chance:.0f}: its time says nothing of a MoE"
            )
    return None


def _pairs(samples: Samples) -> dict[str, list[tuple[Any, float]]]:
    """(by the clock outside, by the worker's own) of every timed unit, by arm."""
    outside = {str(r["name"]): float(r["us"]) for r in _records(samples, "outside")}
    found: dict[str, list[tuple[Any, float]]] = {}
    for row in _records(samples, "timings"):
        pair = (outside.get(f"{row['arm']}.{row['block']}"), float(row["us"]))
        found.setdefault(str(row["arm"]), []).append(pair)
    return found


def _records(samples: Samples, name: str) -> tuple[dict[str, Any], ...]:
    table = samples.table(name)
    return table.records() if table else ()
