"""Step 10 of verifying: each outcome is judged again from its samples, on several cores where there are many.

A judge is a function of one check and its samples, so that outcomes can be judged in any order and process.
Invariant: what is found, and the order in which it is said, do not depend on the number of processes.
"""

import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from harness import forking
from harness.domain.check import Check, Outcome, Samples
from harness.domain.errors import EvidenceError
from harness.evidence.integrity import Notes, Rejudge, Work
from harness.evidence.names import SAMPLES_HEADER, samples_folder
from harness.evidence.rederive import differences
from harness.evidence.samples import read_samples

__all__ = ["check_rederivation"]

UNBOUND = (
    "its samples name no plan, so nothing shows that they answer this one; the check must be run again by a "
    "version whose samples do"
)
MIN_SPREAD = 100
"""Fewer outcomes take less time than the processes that would share them."""


class Again(NamedTuple):
    """One outcome, judged again."""

    outcome: Outcome | None
    """As judged here; None where it could not be."""
    differing: tuple[str, ...] = ()
    """How the stored one differs from it."""
    wrong: str = ""
    """Why its samples could not be read."""


class _Task(NamedTuple):
    work: Work
    rejudge: Rejudge
    checks: dict[str, Check]
    held: Sequence[Outcome]


def check_rederivation(work: Work, notes: Notes) -> None:
    """Step 10."""
    if work.rejudge is None or work.plan is None:
        notes.skipped = "no judge was given" if work.plan is not None else "there is no plan yet"
        return
    checks = {c.id: c for c in work.plan.checks}
    is_own = work.replanned is None or work.replanned.harness == work.plan.harness_digest
    say = notes.wrong if is_own else notes.differs
    have_samples = [o for o in work.outcomes if f"{samples_folder(o.check)}/{SAMPLES_HEADER}" in work.sizes]
    notes.looked_at = len(have_samples)
    for outcome in have_samples:
        if outcome.check in work.unbound:
            is_known = work.replanned is not None and is_own
            (notes.wrong if is_known else notes.differs)(outcome.check, UNBOUND)
    held = [o for o in have_samples if o.check not in work.unbound]
    for outcome, again in zip(held, _all_again(_Task(work, work.rejudge, checks, held)), strict=True):
        if again.wrong:
            notes.wrong(outcome.check, again.wrong)
        for difference in again.differing:
            say(outcome.check, difference)
        if again.outcome is not None:
            work.judged[outcome.check] = again.outcome


def _all_again(task: _Task) -> Iterator[Again]:
    """In the order of `task.held`."""
    places = range(len(task.held))
    again = partial(_again, task)
    if forking.processes_for(len(places), MIN_SPREAD) == 1:
        yield from map(again, places)
        return
    # One of each stage is judged here first: what its judge loads is then loaded once, before the fork.
    first = {task.checks[o.check].stage: n for n, o in reversed(list(enumerate(task.held)))}
    done = {n: again(n) for n in first.values()}
    rest = [n for n in places if n not in done]
    done.update(zip(rest, forking.forked_map(again, rest, at_least=1), strict=True))
    yield from (done[n] for n in places)


def _again(task: _Task, place: int) -> Again:
    outcome = task.held[place]
    folder = task.work.folder
    try:
        samples = read_samples(folder, outcome.check)
    except EvidenceError as error:
        return Again(None, wrong=str(error).replace(f"{folder}{os.sep}", ""))
    return _judged_again(task.rejudge, task.checks[outcome.check], samples, outcome)


def _judged_again(rejudge: Rejudge, check: Check, samples: Samples, outcome: Outcome) -> Again:
    try:
        again = rejudge(check, samples)
    except EvidenceError as error:
        return Again(None, (f"cannot be judged again: {error}",))
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        # A judge may assume samples of its own stage; forged ones break it, which is an answer too.
        return Again(None, (f"cannot be judged again: {type(error).__name__}: {error}",))
    if again is None:
        return Again(None, ("has samples, but no judge gives an outcome for them",))
    return Again(again, differences(outcome, again)[:5])
