"""Run a plan: sample in a child, judge here, keep each outcome as it comes.

Stages run in order, cheapest first; when a required check of one stage does not pass, later stages are
SKIPPED with that reason unless `keep_going`. Finished checks of the same plan are never repeated. Judging is
pure, so `rejudge` gives the same outcome from the stored samples on any machine, and bundle verification uses
exactly this function.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

from harness.domain.check import Check, CheckId, Outcome, Samples, StageName, Status
from harness.domain.errors import EvidenceError
from harness.domain.plan import Plan
from harness.evidence.names import LOGS
from harness.evidence.run_folder import RunFolder
from harness.executors.lanes import Executor, LocalExecutor
from harness.executors.local import ChildSampler
from harness.executors.ray import ClusterWork, RayExecutor
from harness.executors.ray_lane import CHILD_LOG, LaneSetup
from harness.planner import SHARES_CORES, SIDE_BY_SIDE, gpus_needed
from harness.stages import stage_of
from harness.worker import LIGHT_STAGES, Job, lay_out, needs_network, node_objections, serve_command

__all__ = ["Cluster", "Progress", "execute", "failed_checks", "judge_samples", "rejudge"]

TRUST_S = 60.0
"""The plan's estimates count as this many seconds seen: one slow check says little about those to come."""
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
        self._left_s = sum(_seconds(check) for check in checks)

    def note(self, text: str) -> None:
        """Say what is being done now."""
        self.say(text, self.done, self.total, self._time_left())

    def finish(self, check: Check, outcome: Outcome) -> None:
        """Count one check as done."""
        self.done += 1
        self._left_s -= _seconds(check)
        self._estimated_done_s += _seconds(check)
        self.note(f"{outcome.status.value} {check.id}")

    def _time_left(self) -> float | None:
        spent = time.monotonic() - self._begun
        return max(0.0, self._left_s) * (spent + TRUST_S) / (self._estimated_done_s + TRUST_S) or None


def _seconds(check: Check) -> float:
    """What a check adds to a run, by its estimate: nothing where it cannot run, less where it has company."""
    if check.unavailable is not None:
        return 0.0
    return check.cost_s / (SIDE_BY_SIDE if check.stage in SHARES_CORES else 1)


class Cluster(NamedTuple):
    """The Ray cluster on which checks that need no repository run; one on this machine without an address."""

    address: str | None = None


def execute(
    plan: Plan,
    run: RunFolder,
    repo: Path | None,
    cache: Path,
    progress: Progress,
    keep_going: bool = False,
    cluster: Cluster | None = None,
) -> None:
    """Run every check of the plan that has no outcome yet; outcomes and samples land in the run folder.

    Raises `HarnessFault` when our own code broke; what was finished is kept.
    """
    finished = run.finished()
    todo = [check for check in plan.checks if check.id not in finished]
    progress.begin(todo)
    joined: RayExecutor | None = None
    blocked_by = _first_blocking(plan, run.outcomes()) if not keep_going else None
    with (run.logs / CHILD_LOG).open("ab") as log, ExitStack() as stack:
        local = stack.enter_context(closing(_local(plan, run, repo, cache, progress, log)))
        for stage in StageName:
            of_stage = [check for check in todo if check.stage is stage]
            if blocked_by is not None and _stage_index(stage) > _stage_index(blocked_by.stage):
                for check in of_stage:
                    skipped = _skipped(plan, check, f"{blocked_by.id} did not pass", "--keep-going")
                    _record(run, progress, check, skipped, None)
                continue
            executor: Executor = local
            if cluster is not None and stage in LIGHT_STAGES and any(c.unavailable is None for c in of_stage):
                executor = joined = joined or stack.enter_context(
                    closing(RayExecutor(cluster.address, _cluster_work(plan, run, progress)))
                )
            first, rest = _to_begin_with(of_stage)
            _run_stage(plan, run, progress, first, executor, 1)
            _run_stage(plan, run, progress, rest, executor, SIDE_BY_SIDE if stage in SHARES_CORES else 1)
            if blocked_by is None and not keep_going:
                blocked_by = _first_blocking(plan, run.outcomes())


def _local(
    plan: Plan, run: RunFolder, repo: Path | None, cache: Path, progress: Progress, log: IO[bytes]
) -> LocalExecutor:
    """Children of this process, which are started on first use."""
    job = Job(
        plan=str(run.plan_file),
        repo=None if repo is None else str(repo),
        cache=str(cache),
        logs=str(run.logs),
        ledger=str(run.ledger),
    )
    job_file = run.scratch / "job.json"
    job_file.write_bytes(job.canonical())
    command, network = serve_command(job_file), needs_network(plan)
    return LocalExecutor(
        [
            ChildSampler(command, plan.tier, progress.note, log, has_network=network)
            for _ in range(SIDE_BY_SIDE)
        ]
    )


def _cluster_work(plan: Plan, run: RunFolder, progress: Progress) -> ClusterWork:
    setup = LaneSetup(plan.tier, lay_out, serve_command, node_objections, needs_network(plan))
    return ClusterWork(
        plan.canonical(), setup, partial(gpus_needed, plan), run.logs, run.ledger, progress.note
    )


def _to_begin_with(checks: Sequence[Check]) -> tuple[Sequence[Check], Sequence[Check]]:
    """(what runs alone, the rest): the audit's first check compiles for all of them, in processes of its own,
    and others that wait for it would count as hung.
    """
    able = [check for check in checks if check.unavailable is None]
    first = able[:1] if able and able[0].stage is StageName.AUDIT else []
    return first, [check for check in checks if check not in first]


def _run_stage(
    plan: Plan,
    run: RunFolder,
    progress: Progress,
    checks: Sequence[Check],
    executor: Executor,
    side_by_side: int,
) -> None:
    """Sample one stage's checks; judge and record in this process, each as it comes.

    The longest begin first where several run beside each other, so that none is left alone at the end.
    """
    for check in checks:
        if check.unavailable is not None:
            _record(run, progress, check, _skipped(plan, check, check.unavailable, ""), None)
    waiting = [check for check in checks if check.unavailable is None]
    if side_by_side > 1:
        waiting.sort(key=lambda check: -check.cost_s)
    if not waiting:
        return
    with closing(executor.stream(waiting, side_by_side, progress.note)) as answers:
        for check, answer in answers:
            samples = run.clean(answer)
            _record(run, progress, check, judge_samples(plan, check, samples), samples)


def _record(
    run: RunFolder, progress: Progress, check: Check, outcome: Outcome, samples: Samples | None
) -> None:
    run.record(outcome, samples)
    progress.finish(check, outcome)


def judge_samples(plan: Plan, check: Check, samples: Samples) -> Outcome:
    """The outcome of one check; a candidate that crashed or hung fails, whatever stage it was in.

    A stage gives INVALID for samples that do not fit. Raises `EvidenceError` where it breaks all the same:
    nothing is concluded then, and the check stays without an outcome.
    """
    if samples.ended != "ran":
        return Outcome(
            check=check.id,
            status=Status.FAIL,
            tier=samples.tier,
            summary=f"the candidate {samples.ended.replace('_', ' ')}: {samples.detail}",
            next_step=f"read what the process said in {LOGS}/{CHILD_LOG} of the bundle, mend it, and run "
            f"`fasttrack run {check.stage.value} --only {check.id}` again",
        )
    try:
        return stage_of(check.stage).judge(check, samples)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        words = str(error).splitlines()[0][:200] if str(error) else "no words"
        raise EvidenceError(
            f"{check.id}: its samples cannot be judged ({type(error).__name__}: {words}); sample the check "
            "again with this harness, and report it where that gives the same"
        ) from error


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


def _stage_index(stage: StageName) -> int:
    return list(StageName).index(stage)


def _blocks(check: Check, outcome: Outcome) -> bool:
    return check.is_required and outcome.status not in DOES_NOT_BLOCK


def _first_blocking(plan: Plan, outcomes: Iterable[Outcome]) -> Check | None:
    """The first check of an earlier, interrupted run after which later stages must not run."""
    by_id = {outcome.check: outcome for outcome in outcomes}
    return next((c for c in plan.checks if c.id in by_id and _blocks(c, by_id[c.id])), None)


def _skipped(plan: Plan, check: Check, reason: str, flag: str) -> Outcome:
    step = f"run again with {flag}" if flag else f"run it where this is met: {reason}"
    return Outcome(check=check.id, status=Status.SKIPPED, tier=plan.tier, summary=reason, next_step=step)
