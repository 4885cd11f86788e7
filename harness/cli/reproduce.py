"""`fasttrack reproduce`: run a bundle's plan here and say whether it gives the same again."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.selectors import JsonOutput, Out

if TYPE_CHECKING:  # the harness loads when a command runs
    from harness.domain.plan import Plan
    from harness.domain.replication import Replication
    from harness.evidence.reader import Bundle

__all__ = ["app"]

app = typer.Typer()
Words = list[str] | None


@app.command()
def reproduce(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="Folder or .tar.zst of the first run.")],
    cell: Annotated[Words, typer.Option("--cell", help="Only this cell, by its label; repeatable.")] = None,
    only: Annotated[
        Words, typer.Option("--only", help="Only checks of this op, subject or id; repeatable.")
    ] = None,
    repo: Annotated[
        Path, typer.Option("--repo", help="Repository of the change, which isolation reads.")
    ] = Path(),
    out: Out = Path("out/reproduce"),
    json: JsonOutput = False,
) -> None:
    """Run a bundle's plan here, with its seeds: 0 replicated, 1 not replicated, 2 not comparable.

    The run is a bundle of its own that names the first. An interrupted one goes on in the same folder.
    """
    from harness.cli.console import print_json
    from harness.cli.finish import run_checks
    from harness.evidence.bundle import write_bundle
    from harness.evidence.reader import open_bundle
    from harness.evidence.replication import compare_runs
    from harness.evidence.run_folder import open_run

    first = _sound_bundle(bundle)
    plan = _plan_here(first, (*(cell or ()), *(only or ())), bundle)
    with open_run(out, plan) as run:
        run_checks(plan, run, _repository(plan, repo), keep_going=True)
        folder = write_bundle(run)
    result = compare_runs(first, open_bundle(folder))
    if json:
        print_json(result)
    else:
        _print_result(result, folder)
    raise typer.Exit(result.exit_code)


def _sound_bundle(path: Path) -> "Bundle":
    """The bundle, verified; raises `EvidenceError` for one that is broken or unfinished."""
    from harness.cli.gate import judge_of, replan_of
    from harness.domain.errors import EvidenceError
    from harness.evidence.pack import bundle_folder
    from harness.evidence.reader import open_bundle
    from harness.evidence.verify import verify
    from harness.gate.submission import SOUND

    with bundle_folder(path) as folder:
        found = verify(folder, judge_of(folder), replan_of())
        if found.state not in SOUND:
            first = next(iter(found.problems), None)
            raise EvidenceError(
                f"{path} is {found.state.value}{f' ({first.path} {first.message})' if first else ''}; "
                f"`fasttrack bundle verify {path}` says why, and nothing of it can be repeated"
            )
        return open_bundle(folder)


def _plan_here(first: "Bundle", words: tuple[str, ...], path: Path) -> "Plan":
    """The same questions for this machine; raises `EvidenceError` where other kernels are installed."""
    from harness.domain.errors import EvidenceError
    from harness.engines.packs import harness_digest, load_pack, pack_digest
    from harness.evidence.commands import pack_path, worktree_command, worktree_folder
    from harness.measure.machine import read_machine
    from harness.planner import CodeDigests, repeat_plan, request_again, resolve_tier

    plan = first.plan
    pack, machine = load_pack(plan.pack), read_machine()
    digests = CodeDigests(harness_digest(), pack_digest(pack))
    if digests.pack != plan.pack_digest:
        raise EvidenceError(
            f"{path} is about other kernels (pack {plan.pack}, digest {plan.pack_digest[:12]}) than are "
            f"installed here ({digests.pack[:12]}), so nothing could be compared; in a clone run "
            f"`{worktree_command(plan.change.head)}`, and reproduce with the pack of that folder: "
            f"`{pack_path(pack, worktree_folder(plan.change.head))} fasttrack reproduce {path} ...`"
        )
    resolve_tier(plan.tier.value, machine, plan.claim)
    return repeat_plan(plan, first.digest or "", request_again(plan, pack, machine), digests, words)


def _repository(plan: "Plan", repo: Path) -> Path | None:
    """The repository, where a check reads it; raises `InputError` where it does not hold the change."""
    from harness.domain.check import StageName
    from harness.domain.errors import InputError
    from harness.repository import Limits, load_change

    if not plan.of_stage(StageName.ISOLATION):
        return None
    limits = Limits(plan.policy.max_changed_files, plan.policy.max_diff_bytes)
    change, tree = load_change(repo, plan.change.base, plan.change.head, limits, pr=plan.change.pr)
    tree.close()
    change = change.model_copy(update={"is_dirty": plan.change.is_dirty})
    if change.digest() != plan.change_digest:
        raise InputError(
            f"{repo}: {plan.change.base[:12]}..{plan.change.head[:12]} is not the bundle's change of "
            f"{plan.change.repository}; name its repository with --repo, or leave isolation out with --only"
        )
    return repo


def _print_result(result: "Replication", folder: Path) -> None:
    from collections import Counter

    from harness.cli.console import out, outcome_table
    from harness.domain.replication import Repeated

    counts = Counter(c.answer for c in result.checks)
    said = ", ".join(f"{counts[a]} {a.value.replace('_', ' ')}" for a in Repeated if counts[a])
    words = f": {result.why}" if result.why else ""
    out.print(f"{result.answer.value.replace('_', ' ')} ({said}){words}", markup=False, soft_wrap=True)
    for what, one, two in result.conditions:
        out.print(f"  {what}: {one} | {two}", markup=False, soft_wrap=True)
    rest = [c for c in result.checks if c.answer is not Repeated.REPLICATED]
    if rest:
        out.print(
            outcome_table(
                "not replicated", [(c.answer.value.replace("_", " "), c.check, c.why) for c in rest]
            )
        )
    out.print(
        f"bundle {folder} names the first; sign it (`fasttrack bundle sign`) and hand both to the gate",
        markup=False,
        soft_wrap=True,
    )
