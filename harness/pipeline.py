"""Run a plan: sample in a child, judge here, keep each outcome as it comes.

Stages run in order, cheapest first; when a required check of one stage does not pass, later stages are
SKIPPED with that reason unless `keep_going`. Finished checks of the same plan are never repeated. Judging is
pure, so `rejudge` gives the same outcome from the stored samples on any machine, and bundle verification uses
exactly this function.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.domain.check import Check, CheckId, Outcome, Samples, StageName, Status
from harness.domain.plan import Plan
from harness.evidence.run_folder import RunFolder
from harness.executors.local import ChildSampler
from harness.stages import stage_of
from harness.worker import Job, serve_command

__all__ = ["Progress", "execute", "failed_checks", "judge_samples", "rejudge"]

DOES_NOT_BLOCK = frozenset({Status.PASS, Status.SKIPPED})
"""Statuses of a required check after which later stages still run."""


@dataclass(slots=True)
class Progress:
    """Tells people what is going on, with time left from the plan's own estimates scaled by what was seen."""

    say: Callable[[str, int, int, float | None], None]
    """(what, checks done, checks in all, seconds left or None)."""
    total: int = 0
    done: int = 0
    _left_s: float = 0.0
    _begun: float = field(default_factory=time.monotonic)
    _estimated_done_s: float = 0.0

    def begin(self, checks: Sequence[Check]) -> None:
        """Set the work ahead."""
        self.total = len(checks)
        self._left_s = sum(check.cost_s for check in checks)

    def note(self, text: str) -> None:
        """Say what is being done now."""
        self.say(text, self.done, self.total, self._time_left())

    def finish(self, check: Check, outcome: Outcome) -> None:
        """Count one check as done."""
        self.done += 1
        self._left_s -= check.cost_s
        self._estimated_done_s += check.cost_s
        self.note(f"{outcome.status.value} {check.id}")

    def _time_left(self) -> float | None:
        spent = time.monotonic() - self._begun
        if self._estimated_done_s < 0.5 or spent < 1.0:
            return self._left_s or None
        return max(0.0, self._left_s) * spent / self._estimated_done_s


def execute(
    plan: Plan, run: RunFolder, repo: Path | None, cache: Path, progress: Progress, keep_going: bool = False
) -> None:
    """Run every check of the plan that has no outcome yet; outcomes and samples land in the run folder.

    Raises `HarnessFault` when our own code broke; what was finished is kept.
    """
    finished = run.finished()
    todo = [check for check in plan.checks if check.id not in finished]
    progress.begin(todo)
    job = Job(
        plan=str(run.plan_file),
        repo=None if repo is None else str(repo),
        cache=str(cache),
        logs=str(run.logs),
        ledger=str(run.ledger),
    )
    job_file = run.scratch / "job.json"
    job_file.write_bytes(job.canonical())
    blocked_by = _first_blocking(plan, run.outcomes()) if not keep_going else None
    with (run.scratch / "child.log").open("ab") as log:
        sampler = ChildSampler(serve_command(job_file), plan.tier, progress.note, log)
        try:
            for check in todo:
                if blocked_by is not None and _stage_index(check) > _stage_index(blocked_by):
                    outcome, samples = (
                        _skipped(plan, check, f"{blocked_by.id} did not pass", "--keep-going"),
                        None,
                    )
                elif check.unavailable is not None:
                    outcome, samples = _skipped(plan, check, check.unavailable, ""), None
                else:
                    progress.note(check.id)
                    samples = run.clean(sampler.sample(check))
                    outcome = judge_samples(plan, check, samples)
                run.record(outcome, samples)
                progress.finish(check, outcome)
                if blocked_by is None and not keep_going and _blocks(check, outcome):
                    blocked_by = check
        finally:
            sampler.close()


def judge_samples(plan: Plan, check: Check, samples: Samples) -> Outcome:
    """The outcome of one check; a candidate that crashed or hung fails, whatever stage it was in."""
    if samples.ended != "ran":
        return Outcome(
            check=check.id,
            status=Status.FAIL,
            tier=samples.tier,
            summary=f"the candidate {samples.ended.replace('_', ' ')}: {samples.detail}",
            next_step=f"run `fasttrack run {check.stage.value}` and read the child's log in the run folder",
        )
    return stage_of(check.stage).judge(check, samples)


def rejudge(plan: Plan) -> Callable[[Check, Samples | None], Outcome | None]:
    """What verification calls for each stored check: the outcome again from its samples, None where there are
    none.
    """

    def again(check: Check, samples: Samples | None) -> Outcome | None:
        return None if samples is None else judge_samples(plan, check, samples)

    return again


def failed_checks(plan: Plan, outcomes: Mapping[CheckId, Outcome]) -> tuple[Check, ...]:
    """Required checks without a PASS, in plan order; checks that this tier cannot run do not count here."""
    return tuple(
        check
        for check in plan.checks
        if check.is_required
        and check.unavailable is None
        and (check.id not in outcomes or outcomes[check.id].status is not Status.PASS)
    )


def _stage_index(check: Check) -> int:
    return list(StageName).index(check.stage)


def _blocks(check: Check, outcome: Outcome) -> bool:
    return check.is_required and outcome.status not in DOES_NOT_BLOCK


def _first_blocking(plan: Plan, outcomes: Iterable[Outcome]) -> Check | None:
    """The first check of an earlier, interrupted run after which later stages must not run."""
    by_id = {outcome.check: outcome for outcome in outcomes}
    return next((c for c in plan.checks if c.id in by_id and _blocks(c, by_id[c.id])), None)


def _skipped(plan: Plan, check: Check, reason: str, flag: str) -> Outcome:
    step = f"run again with {flag}" if flag else f"run it where this is met: {reason}"
    return Outcome(check=check.id, status=Status.SKIPPED, tier=plan.tier, summary=reason, next_step=step)
