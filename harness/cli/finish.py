"""How a run goes, for `validate`, `run` and `collect` alike: plan, execute, bundle, report, a table, an exit
code.

The exit code answers for the tier asked for: 0 when every check planned for it passed, 1 when one did not,
2 when none could be made here.
What the gate would say is printed beside it, and only `fasttrack gate` answers admission.
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from harness.cli.selectors import Selection, make_selected_plan
from harness.domain.check import Outcome, Status
from harness.domain.errors import InputError
from harness.domain.machine import Machine
from harness.domain.plan import Plan
from harness.evidence.run_folder import RunFolder, load_plan, open_run

if TYPE_CHECKING:  # the pipeline loads when a command runs
    from harness.pipeline import Cluster

__all__ = ["CACHE", "RunOptions", "cluster_of", "finish_run", "run_checks", "validate_selection"]

CACHE = Path("out/cache")
"""Compiled kernels, by content; safe to delete."""


class RunOptions(NamedTuple):
    """How a run goes."""

    resume: bool
    keep_going: bool
    as_json: bool
    cluster: "Cluster | None" = None
    journal: Path | None = None
    """An agent's, which travels in the bundle."""


def cluster_of(executor: str, address: str | None) -> "Cluster | None":
    """Where checks run by --executor and --address; raises `InputError` for another executor."""
    from harness.pipeline import Cluster

    if executor == "ray":
        return Cluster(address)
    if executor != "local" or address is not None:
        what = f"--executor {executor!r} is none" if executor != "local" else "--address is Ray's"
        raise InputError(f"{what}; the executors are local and ray, and only ray takes an --address")
    return None


def validate_selection(selection: Selection, out: Path, how: RunOptions) -> int:
    """Plan, run and finish; gives the exit code.

    Raises `InputError` where --out holds another run, and `EvidenceError` for a journal that was changed.
    """
    from harness.evidence.journal import put_journal

    plan = _resumed_plan(selection, out) if how.resume else make_selected_plan(selection)
    if not how.resume and out.exists() and any(out.iterdir()):
        raise InputError(
            f"{out} already holds something; go on with its run (--resume), name another folder (--out), or "
            "remove it"
        )
    with open_run(out, plan) as run:
        if how.journal is not None:
            put_journal(run.logs, how.journal)
        run_checks(plan, run, selection.repo, how.keep_going, how.cluster)
        return finish_run(plan, run, as_json=how.as_json, repeat=_repeat_command(plan, run, selection))


def run_checks(
    plan: Plan, run: RunFolder, repo: Path | None, keep_going: bool, cluster: "Cluster | None" = None
) -> None:
    """Run what has no outcome yet, with progress on standard error."""
    from harness.cli.console import progress_bar
    from harness.pipeline import Progress, execute

    with progress_bar() as show:
        repository = None if repo is None else repo.resolve()
        execute(plan, run, repository, CACHE.resolve(), Progress(say=show), keep_going, cluster)


def finish_run(
    plan: Plan, run: RunFolder, *, as_json: bool, machine: Machine | None = None, repeat: str = ""
) -> int:
    """Write bundle and report, print the result, give the exit code; `repeat` is the command that asks what
    did not pass again (this process's own where it is empty).
    """
    from harness.cli.console import out, print_json
    from harness.cli.gate import gate_submissions, verdict_words
    from harness.evidence.bundle import write_bundle
    from harness.evidence.harness_score import put_score
    from harness.pipeline import failed_checks
    from harness.report import write_report

    outcomes = {outcome.check: outcome for outcome in run.outcomes()}
    is_measured = any(outcome.status is not Status.SKIPPED for outcome in outcomes.values())
    code = 1 if failed_checks(plan, outcomes) else 0 if is_measured else 2
    put_score(run.logs)
    bundle = write_bundle(run, machine=machine)
    decision, submissions = gate_submissions([bundle], plan.policy)
    report_folder = bundle.with_name(bundle.name + "-report")
    pages = write_report(bundle, report_folder, decision, submissions[0].verification)
    verdict = verdict_words(decision)
    if as_json:
        print_json(
            {
                "exit_code": code,
                "outcomes": [outcome.model_dump(mode="json") for outcome in outcomes.values()],
                "bundle": str(bundle),
                "report": [str(page) for page in pages],
                "gate": verdict,
                "verdict": decision.model_dump(mode="json"),
            }
        )
        return code
    _print_result(plan, outcomes, bundle, [str(page) for page in pages], verdict)
    if code:
        line = repeat or shlex.join(["fasttrack", *sys.argv[1:]])
        out.print(f"repeat: {line}", markup=False, soft_wrap=True)
    return code


def _print_result(
    plan: Plan, outcomes: dict[str, Outcome], bundle: Path, pages: list[str], verdict: str
) -> None:
    from harness.cli.console import out, outcome_table
    from harness.pipeline import failed_checks

    for cost_stage in dict.fromkeys(check.stage for check in plan.checks):
        of_stage = [outcomes[c.id].status for c in plan.of_stage(cost_stage) if c.id in outcomes]
        counts = ", ".join(f"{of_stage.count(s)} {s.value}" for s in Status if s in of_stage)
        out.print(f"{cost_stage.value:<10} {counts or 'nothing ran'}", markup=False)
    rest = [o for o in outcomes.values() if o.status not in (Status.PASS, Status.SKIPPED)]
    rows = [(o.status.value, o.check, f"{o.summary}. {o.next_step}") for o in rest]
    rows += _skipped_rows([o for o in outcomes.values() if o.status is Status.SKIPPED])
    if rows:
        out.print(outcome_table("not passed", rows))
    out.print(f"bundle {bundle}", markup=False, soft_wrap=True)
    out.print(f"report {' '.join(pages)}", markup=False, soft_wrap=True)
    out.print(f"the gate would say: {verdict}", markup=False, soft_wrap=True)
    failed = failed_checks(plan, outcomes)
    words = f"{len(failed)} checks planned for this tier did not pass (exit 1)"
    if not failed and all(outcome.status is Status.SKIPPED for outcome in outcomes.values()):
        out.print("nothing was measured: every planned check was skipped (exit 2)")
        return
    out.print(words if failed else "every check planned for this tier passed (exit 0)")


def _repeat_command(plan: Plan, run: RunFolder, selection: Selection) -> str:
    """The command that asks what did not pass again, about the same commits whatever HEAD is by then."""
    from harness.evidence.commands import Rerun, validate_command
    from harness.gate.proving import smallest_words
    from harness.pipeline import failed_checks

    failed = failed_checks(plan, {outcome.check: outcome for outcome in run.outcomes()})
    stages = tuple(dict.fromkeys(check.stage for check in failed))
    words = smallest_words(failed, [check for check in plan.checks if check.stage in stages])
    rerun = Rerun(selection.policy, plan.change.head, plan.tier, str(selection.repo), stages, words)
    more = ["--claim", str(selection.claim)] if selection.claim else []
    more += ["--allow-dirty"] if plan.change.is_dirty else []
    return f"{validate_command(plan, rerun)} {shlex.join([*more, '--out', 'out/again'])}"


def _skipped_rows(skipped: Sequence[Outcome]) -> list[tuple[str, str, str]]:
    """A row for each reason, however many checks it stopped."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for outcome in skipped:
        by_reason.setdefault((outcome.summary, outcome.next_step), []).append(outcome.check)
    rows = []
    for (summary, next_step), checks in sorted(by_reason.items(), key=lambda item: -len(item[1])):
        named = checks[0] if len(checks) == 1 else f"{len(checks)} checks, such as {checks[0]}"
        rows.append((Status.SKIPPED.value, named, f"{summary}. {next_step}"))
    return rows


def _resumed_plan(selection: Selection, out: Path) -> Plan:
    """The plan of the run in `out`; raises `InputError` when these selectors no longer give that plan."""
    from dataclasses import replace

    stored = load_plan(out)
    fresh = make_selected_plan(replace(selection, nonce=stored.nonce))
    if fresh.digest() != stored.digest():
        changed = [name for name in Plan.model_fields if getattr(fresh, name) != getattr(stored, name)]
        raise InputError(
            f"{out} holds a run of another plan: {', '.join(changed)} changed since; outcomes of two plans "
            "never mix, so "
            "start anew in another folder (--out)"
        )
    return stored
