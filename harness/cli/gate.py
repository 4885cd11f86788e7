"""`fasttrack gate`: decide on bundles. Exit code 0 admitted, 1 rejected, 2 could not judge."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.selectors import JsonOutput

if TYPE_CHECKING:  # the gate itself loads when a command runs
    from rich.table import Table

    from harness.documents import PolicySet
    from harness.domain.policy import Policy
    from harness.domain.verdict import Verdict
    from harness.evidence.verify import Rejudge, Replan
    from harness.gate import Move, Submission
    from harness.gate.memory import Memory

__all__ = [
    "CacheFolder", "Judged", "TrustedRoot", "app", "gate_submissions", "judge_of", "memory_of", "replan_of",
    "submission_of", "verdict_words",
]  # fmt: skip

app = typer.Typer()
CacheFolder = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        envvar="FASTTRACK_CACHE",
        metavar="DIR",
        help="Remember verifications here, by digest of bundle, code, libraries and day. Whoever can write "
        "here decides what is admitted: not where a candidate's code runs.",
    ),
]

TrustedRoot = Annotated[
    Path | None,
    typer.Option(
        "--trusted-root",
        envvar="FASTTRACK_TRUSTED_ROOT",
        metavar="FILE",
        help="Sigstore's `trusted_root.json` that signatures by identity are checked against, offline.",
    ),
]


@app.command()
def gate(
    bundles: Annotated[list[Path], typer.Argument(metavar="BUNDLE...", help="Folders or .tar.zst files.")],
    policy: Annotated[
        str, typer.Option("--policy", help="Policy by name (under policies/) or file.")
    ] = "fast_track",
    head: Annotated[
        str | None, typer.Option("--head", help="Head to judge (40 hex digits); default: the bundles' own.")
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            help="Where the change must start: a commit in full, or with --repo any revision, of which the "
            "merge base with the head is taken.",
        ),
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
    cache: CacheFolder = None,
    trusted_root: TrustedRoot = None,
    json: JsonOutput = False,
) -> None:
    """Decide on one or more bundles of one pull request: admitted (0), rejected (1), could not judge (2)."""
    from harness.cli.console import print_json
    from harness.documents import load_policy_set
    from harness.repository import require_repository

    if repo is not None:
        require_repository(repo)
    judged = Judged(
        _full_sha("--head", head), repo, base if repo else _full_sha("--base", base), trusted_root
    )
    memory = memory_of(cache, trusted_root)
    verdict = gate_submissions(bundles, load_policy_set(policy), judged, memory)[0]
    if json:
        print_json(verdict)
    elif show_plan:
        lines = [f"{m.command}  # {m.where}" for m in verdict.missing]
        for command in dict.fromkeys([f"{verdict.worktree}  # once, in a clone", *lines] if lines else []):
            typer.echo(command)
    else:
        _print_verdict(verdict)
    raise typer.Exit(verdict.exit_code)


@dataclass(frozen=True, slots=True)
class Judged:
    """Which change is judged, where somebody says."""

    head: str | None = None
    """None: the bundles' own."""
    repo: Path | None = None
    """Repository that holds the commits; None: bundles are taken at their word about the change."""
    base: str | None = None
    """Where the change must start; None: where the bundles say."""
    trusted_root: Path | None = None
    """Who may bind identities to signatures; None: such signatures count as none."""


def gate_submissions(
    bundles: Sequence[Path],
    policy: "Policy | PolicySet",
    judged: Judged | None = None,
    memory: "Memory | None" = None,
) -> "tuple[Verdict, tuple[Submission, ...]]":
    """The verdict, and the bundles as they were verified for it, in the order given."""
    from harness.gate import decide

    judged = judged or Judged()
    root = judged.trusted_root
    submissions = [submission_of(path, _name(path, bundles), memory, root) for path in bundles]
    if judged.repo is not None:
        submissions = [_with_change_read(s, judged.repo) for s in submissions]
    if judged.base is not None:
        submissions = [_with_base_held(s, judged) for s in submissions]
    moves = _moves(submissions, judged.head, judged.repo) if judged.head is not None else {}
    return decide(submissions, policy, judged.head, moves), tuple(submissions)


def memory_of(folder: Path | None, trusted_root: Path | None = None) -> "Memory | None":
    """The memory in the folder that was named; None where none was."""
    from harness.gate.memory import open_memory

    return None if folder is None else open_memory(folder, trusted_root)


def submission_of(
    path: Path, name: str, memory: "Memory | None" = None, trusted_root: Path | None = None
) -> "Submission":
    """One bundle, verified: as it was found before where the memory has it, else now.

    What is verified, and remembered, is a copy of what was read once: whoever can write to the bundle cannot
    put another one in its place between two steps.
    """
    from harness.domain.errors import InputError
    from harness.gate.memory import recall, remember

    def known(place: Path) -> "tuple[str | None, Submission | None]":
        try:
            key = memory.key(place) if memory is not None and place.exists() else None
        except OSError:  # it changed while it was read
            key = None
        return key, recall(memory, key, name) if memory is not None and key is not None else None

    found = known(path)[1]
    if found is not None:
        return found
    # What unpacks, plans and judges loads only now: with a memory there is often nothing to do.
    from harness.evidence.pack import bundle_folder, own_copy
    from harness.gate.submission import load_submission

    with own_copy(path) if _is_copied(path) else nullcontext() as own:
        if own is None and _is_copied(path):
            raise InputError(f"{path}: has more files or bytes than any bundle may; nothing of it was read")
        key, found = (None, None) if own is None else known(own)
        if found is not None:
            return found
        with bundle_folder(own or path, shown=path) as folder:
            submission = load_submission(folder, judge_of(folder), replan_of(), name, trusted_root)
        if memory is not None and key is not None:
            remember(memory, key, submission)
    return submission


def _is_copied(path: Path) -> bool:
    """Whether there is a bundle to copy; a link in place of a folder is told by verifying it."""
    return path.exists() and not path.is_symlink()


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
    from harness.engines.packs import load_pack
    from harness.gate.replan import other_pack
    from harness.repository import Limits, load_change

    plan = submission.plan
    if plan is None or plan.change.is_dirty:
        return submission
    planned = plan.change
    try:
        limits = Limits(plan.policy.max_changed_files, plan.policy.max_diff_bytes)
        change, tree = load_change(repo, planned.base, planned.head, limits, pr=planned.pr)
        pack = load_pack(plan.pack)
        with tree:
            at_head = other_pack(pack, plan.pack_digest, tree)
    except InputError as error:
        return replace(submission, other_change=f"its change could not be read in {repo}: {error}")
    if at_head:
        words = (
            f"the files of pack {plan.pack} that ran ({plan.pack_digest[:12]}) are not those under "
            f"{pack.repository_prefix} at {planned.head[:12]}, so it speaks of another version; check that "
            "commit out and run again"
        )
        return replace(submission, other_change=words)
    # A clone may have another name or address, and its working tree is no part of the range.
    same = change.model_copy(update={"repository": planned.repository, "is_dirty": planned.is_dirty})
    if same.digest() == plan.change_digest:
        return submission
    words = f"{planned.base[:12]}..{planned.head[:12]} is another change in {repo} than in its plan"
    return replace(submission, other_change=words)


def _with_base_held(submission: "Submission", judged: Judged) -> "Submission":
    """The bundle, with how the start of its change differs from the one that is asked for."""
    from dataclasses import replace

    from harness.repository import merge_base

    plan = submission.plan
    if plan is None or submission.other_change or judged.base is None:
        return submission
    base = judged.base if judged.repo is None else merge_base(judged.repo, judged.base, plan.change.head)
    if plan.change.base == base:
        return submission
    words = (
        f"its change starts at {plan.change.base[:12]} and the one that is judged at {base[:12]}, so "
        "isolation judged another range; make it with that --base"
    )
    return replace(submission, other_change=words)


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

    from harness.cli.console import out

    style = {0: "bold green", 1: "bold red"}.get(verdict.exit_code, "bold yellow")
    out.print(f"[{style}]{verdict.answer.value.replace('_', ' ')}[/] under policy {escape(verdict.policy)}")
    for reason in verdict.reasons:
        out.print(f"  {escape(reason)}", soft_wrap=True)
    if verdict.rows:
        out.print(_row_table(verdict))
    for use in verdict.bundles:
        out.print(f"bundle {use.words()}", markup=False, soft_wrap=True)
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
    if verdict.missing:
        out.print(
            f"to make what is missing, first in a clone:\n  {verdict.worktree}", markup=False, soft_wrap=True
        )
    for where in dict.fromkeys(m.where for m in verdict.missing):
        commands = dict.fromkeys(m.command for m in verdict.missing if m.where == where)
        out.print("\n  ".join([f"on {where}:", *commands]), markup=False, soft_wrap=True)


def _row_table(verdict: "Verdict") -> "Table":
    """The matrix: a row a proof; where nothing was found no column says that anything is well."""
    from rich.markup import escape
    from rich.table import Table

    caption = "controls: checks that were shown to be able to fail"
    table = Table(title=f"claim {verdict.claim or 'unknown'}", title_justify="left", pad_edge=False)
    table.caption, table.caption_justify = caption, "left"
    for column in ("proof", "required", "found", "tier", "fresh", "controls", "met"):
        table.add_column(column, overflow="fold")
    for row in verdict.rows:
        found = ", ".join(f"{count} {status.value}" for status, count in row.statuses) or "nothing"
        fresh = "-" if not row.statuses and not row.stale else f"{row.stale} stale" if row.stale else "yes"
        table.add_row(
            escape(row.stage.value if row.arch is None else f"{row.stage.value} {row.arch}"),
            f"{row.checks} at {row.required_tier.value}"
            if row.checks
            else f"any at {row.required_tier.value}",
            found,
            row.found_tier.value if row.found_tier else "-",
            fresh,
            f"{row.controls} of {row.checks}" if row.checks else "-",
            "[green]yes[/]" if row.is_met else "[red]no[/]",
        )
    return table


def _full_sha(option: str, commit: str | None) -> str | None:
    from harness.domain.errors import InputError

    if commit is not None and (len(commit) != 40 or set(commit) - set("0123456789abcdef")):
        raise InputError(
            f"{option} {commit!r} is no full commit id; give all 40 hex digits (`git rev-parse {commit}`)"
        )
    return commit


def _name(path: Path, bundles: Sequence[Path]) -> str:
    """The bundle's own name, or its whole path where two are called alike."""
    name = path.resolve().name
    return name if sum(p.resolve().name == name for p in bundles) == 1 else str(path)
