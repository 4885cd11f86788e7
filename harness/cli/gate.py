"""`fasttrack gate`: decide on bundles. Exit code 0 admitted, 1 rejected, 2 could not judge."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.selectors import JsonOutput

if TYPE_CHECKING:  # the gate itself loads when a command runs
    from harness.documents import PolicySet
    from harness.domain.plan import Plan
    from harness.domain.policy import Policy
    from harness.domain.verdict import Verdict
    from harness.evidence.verify import Rejudge, Replan
    from harness.gate import Move, Submission
    from harness.repository import GitTree

__all__ = ["app", "gate_submissions", "gate_verdict", "gate_words", "judge_of", "replan_of", "verdict_words"]

app = typer.Typer()


@app.command()
def gate(
    bundles: Annotated[list[Path], typer.Argument(metavar="BUNDLE...", help="Folders or .tar.zst files.")],
    policy: Annotated[
        str, typer.Option("--policy", help="Policy by name (under policies/) or file.")
    ] = "fast_track",
    head: Annotated[
        str | None, typer.Option("--head", help="Head to judge (40 hex digits); default: the bundles' own.")
    ] = None,
    repo: Annotated[
        Path | None,
        typer.Option(
            "--repo", help="Repository that has the heads: reads the change again, and what changed since."
        ),
    ] = None,
    show_plan: Annotated[
        bool, typer.Option("--plan", help="Print only the commands of the smallest re-run, one a line.")
    ] = False,
    json: JsonOutput = False,
) -> None:
    """Decide on one or more bundles of one pull request: admitted (0), rejected (1), could not judge (2)."""
    from harness.cli.console import print_json
    from harness.documents import load_policy_set

    verdict = gate_verdict(bundles, load_policy_set(policy), _full_sha(head), repo)
    if json:
        print_json(verdict)
    elif show_plan:
        for command in dict.fromkeys(f"{m.command}  # {m.where}" for m in verdict.missing):
            typer.echo(command)
    else:
        _print_verdict(verdict)
    raise typer.Exit(verdict.exit_code)


def gate_verdict(
    bundles: Sequence[Path], policy: "Policy | PolicySet", head: str | None = None, repo: Path | None = None
) -> "Verdict":
    """Verify every bundle, plan and judge it again, and decide."""
    return gate_submissions(bundles, policy, head, repo)[0]


def gate_submissions(
    bundles: Sequence[Path], policy: "Policy | PolicySet", head: str | None = None, repo: Path | None = None
) -> "tuple[Verdict, tuple[Submission, ...]]":
    """The verdict, and the bundles as they were verified for it, in the order given."""
    from harness.evidence.pack import bundle_folder
    from harness.gate import decide, load_submission

    with ExitStack() as stack:
        submissions = []
        for path in bundles:
            folder = stack.enter_context(bundle_folder(path))
            submissions.append(load_submission(folder, judge_of(folder), replan_of(), _name(path, bundles)))
        if repo is not None:
            submissions = [_with_change_read(s, repo) for s in submissions]
        moves = _moves(submissions, head, repo) if head is not None else {}
        return decide(submissions, policy, head, moves), tuple(submissions)


def gate_words(bundles: Sequence[Path], policy: "Policy | PolicySet") -> str:
    """What the gate says of bundles, in one line."""
    return verdict_words(gate_verdict(bundles, policy))


def verdict_words(verdict: "Verdict") -> str:
    """A verdict in one line."""
    first = verdict.reasons[0] if verdict.reasons else ""
    more = f" (and {len(verdict.reasons) - 1} more)" if len(verdict.reasons) > 1 else ""
    return f"{verdict.answer.value.replace('_', ' ')} under policy {verdict.policy}: {first}{more}"


def judge_of(folder: Path) -> "Rejudge":
    """What judges the samples of a bundle again; nothing for one whose plan cannot be read."""
    from harness.domain.errors import FasttrackError
    from harness.evidence.run_folder import load_plan
    from harness.pipeline import rejudge

    try:
        return rejudge(load_plan(folder))
    except FasttrackError:
        return lambda check, samples: None


def replan_of() -> "Replan":
    """What plans again: the planner of this harness, over the packs that are installed here."""
    from harness.gate.replan import replan

    return replan


def _with_change_read(submission: "Submission", repo: Path) -> "Submission":
    """The bundle, with how the change that the repository holds differs from the one it speaks of."""
    from dataclasses import replace

    from harness.domain.errors import InputError
    from harness.repository import Limits, load_change

    plan = submission.plan
    if plan is None or plan.change.is_dirty:
        return submission
    planned = plan.change
    try:
        limits = Limits(plan.policy.max_changed_files, plan.policy.max_diff_bytes)
        change, tree = load_change(repo, planned.base, planned.head, limits, pr=planned.pr)
        with tree:
            other_pack = _other_pack(plan, tree)
    except InputError as error:
        return replace(submission, other_change=f"its change could not be read in {repo}: {error}")
    if other_pack:
        return replace(submission, other_change=other_pack)
    # A clone may have another name or address, and its working tree is no part of the range.
    same = change.model_copy(update={"repository": planned.repository, "is_dirty": planned.is_dirty})
    if same.digest() == plan.change_digest:
        return submission
    words = f"{planned.base[:12]}..{planned.head[:12]} is another change in {repo} than in its plan"
    return replace(submission, other_change=words)


def _other_pack(plan: "Plan", tree: "GitTree") -> str:
    """How the pack files that ran differ from those of the head; empty where they do not, or where the
    repository does not hold the pack.
    """
    from functools import partial

    from harness.engines.packs import files_digest, load_pack

    prefix = load_pack(plan.pack).repository_prefix
    paths = [path for path in tree.paths("head") if path.startswith(prefix)]
    reads = {path.removeprefix(prefix): partial(_content, tree, path) for path in paths}
    if not reads or files_digest(reads) == plan.pack_digest:
        return ""
    return (
        f"the files of pack {plan.pack} that ran ({plan.pack_digest[:12]}) are not those under {prefix} at "
        f"{plan.change.head[:12]}, so it speaks of another version; check that commit out and run again"
    )


def _content(tree: "GitTree", path: str) -> bytes:
    return tree.read("head", path) or b""


def _moves(submissions: "Sequence[Submission]", head: str, repo: Path | None) -> "dict[str, Move]":
    """What changed between each bundle's head and the judged head."""
    from harness.domain.errors import InputError
    from harness.engines.packs import load_pack
    from harness.gate import Move
    from harness.repository import Limits, load_change

    moves = {}
    for submission in submissions:
        plan = submission.plan
        if plan is None or plan.change.head == head or repo is None:
            continue
        try:
            pack = load_pack(plan.pack)
            limits = Limits(plan.policy.max_changed_files, plan.policy.max_diff_bytes)
            change, tree = load_change(repo, plan.change.head, head, limits)
            tree.close()
        except InputError:
            continue  # what changed is then not known, and everything of that bundle is stale
        if change.base != plan.change.head:
            continue  # rebased: a diff from the merge base would miss what the new head took back
        names = {name for f in change.files for name in (f.path, f.old_path) if name is not None}
        moves[plan.change.head] = Move(tuple(sorted(names)), pack.repository_prefix, pack.ops_of_file)
    return moves


def _print_verdict(verdict: "Verdict") -> None:
    from rich.markup import escape
    from rich.table import Table

    from harness.cli.console import out

    style = {0: "bold green", 1: "bold red"}.get(verdict.exit_code, "bold yellow")
    out.print(f"[{style}]{verdict.answer.value.replace('_', ' ')}[/] under policy {escape(verdict.policy)}")
    for reason in verdict.reasons:
        out.print(f"  {escape(reason)}", soft_wrap=True)
    table = Table(title=f"claim {verdict.claim or 'unknown'}", title_justify="left", pad_edge=False)
    for column in ("proof", "required", "found", "tier", "freshness", "control", "met"):
        table.add_column(column, overflow="fold")
    for row in verdict.rows:
        found = ", ".join(f"{count} {status.value}" for status, count in row.statuses) or "nothing"
        table.add_row(
            escape(row.stage.value if row.arch is None else f"{row.stage.value} {row.arch}"),
            f"{row.checks} checks at {row.required_tier.value}",
            found,
            row.found_tier.value if row.found_tier else "-",
            f"{row.stale} stale" if row.stale else "fresh",
            f"{row.controls} of {row.checks} failed as they should",
            "[green]yes[/]" if row.is_met else "[red]no[/]",
        )
    if verdict.rows:
        out.print(table)
    for use in verdict.bundles:
        signed = f"signed by {use.signer[:16]}…" if use.signer else "unsigned"
        refused = f"; does not count: {use.refused}" if use.refused else ""
        made = f", made with harness {use.harness[:12]}" if use.harness else ""
        of = f"of {use.base[:12]}..{use.head[:12]}, " if use.base and use.head else ""
        out.print(
            f"bundle {use.name}: {of}{use.state.value}, {signed}{made}{refused}", markup=False, soft_wrap=True
        )
    for waiver in verdict.waivers:
        expiry = "EXPIRED" if waiver.is_expired else "until"
        out.print(
            f"waiver {waiver.rule} on {waiver.path}: {waiver.owner}, {waiver.reason}, "
            f"{expiry} {waiver.expires}; {waiver.findings} findings",
            markup=False,
            soft_wrap=True,
        )
    for repeat in verdict.replications:
        said = repeat.answer.value.replace("_", " ") + (f": {repeat.why}" if repeat.why else "")
        out.print(
            f"replication {repeat.bundle} of {repeat.repeats}: {said}",
            markup=False,
            soft_wrap=True,
        )
    if verdict.replications:
        out.print(f"replicated by {verdict.replicated_by} other signers", markup=False)
    for clash in verdict.contradictions:
        said = ", ".join(f"{c.bundle} {c.status.value} at {c.tier.value}" for c in clash.contributions)
        out.print(f"contradiction {clash.check}: {said}", markup=False, soft_wrap=True)
    for stale in verdict.stale:
        cell = f" in {stale.cell}" if stale.cell is not None and stale.cell not in stale.check else ""
        out.print(f"stale {stale.check}{cell}: {stale.why}", markup=False, soft_wrap=True)
    for where, command in dict.fromkeys((m.where, m.command) for m in verdict.missing):
        out.print(f"to make it, on {where}:\n  {command}", markup=False, soft_wrap=True)


def _full_sha(head: str | None) -> str | None:
    from harness.domain.errors import InputError

    if head is not None and (len(head) != 40 or set(head) - set("0123456789abcdef")):
        raise InputError(
            f"--head {head!r} is no full commit id; give all 40 hex digits (`git rev-parse {head}`)"
        )
    return head


def _name(path: Path, bundles: Sequence[Path]) -> str:
    """The bundle's own name, or its whole path where two are called alike."""
    name = path.resolve().name
    return name if sum(p.resolve().name == name for p in bundles) == 1 else str(path)
