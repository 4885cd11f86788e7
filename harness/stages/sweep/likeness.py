"""Whether the arms of a decode step did like work, on a clock that no candidate holds.

Tables: `outside` (name, us): every timed unit, `<arm>.<block>`, by the clock of the process that started the
worker, beside what the worker's own says in `timings`; `prefixes` (arm, queries, hits, reused_tokens):
counters of the prefix cache, and of a control session that must hit; `experts` (arm, experts, expert, rows):
how many rows of a step chose which expert of the last MoE layer.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from statistics import median
from typing import Any

from harness.domain.check import Check, Samples
from harness.domain.pack import Session
from harness.domain.table_shape import COUNT, NUMBER, TEXT, TableShape, choice
from harness.executors.marks import stretch
from harness.measure.interleaved import TimedUnit

__all__ = [
    "LIKENESS_SHAPES", "PROMPT_TOKENS", "expert_rows", "marked", "prefix_rows", "unlike", "unproven",
    "unseen",
]  # fmt: skip

PROMPT_TOKENS = 130
"""Of the control's prompt: two pages of the cache, and a little more."""
CONTROL = "control"
SEEN_SLOWER = 1.1
"""What the planted arm must take at least of stock's time by the clock outside."""
TOLERANCE, LATENCY_US = 0.35, 2000.0
"""How far a unit may differ between the two clocks: a share, and what a word takes on its way."""
MAX_APART = 0.2
"""Share of an arm's units that may differ by more: the one who listens is put off on a busy machine too."""
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


def unlike(samples: Samples) -> str | None:
    """Why the times cannot be compared, in words; None where they can. Pure."""
    return _from_prefix_cache(samples) or _other_clock(samples)


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
        apart = [p for p in pairs if abs(p[0] - p[1]) > TOLERANCE * max(p) + LATENCY_US]
        if len(apart) > MAX_APART * len(pairs):
            outside, us = apart[0]
            return (
                f"{len(apart)} of {len(pairs)} units of arm {arm} took another time by the clock outside of "
                f"the worker: {outside:.0f} us, not {us:.3g} us"
            )
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
