"""Where evidence came from and how to make it again."""

import shlex

from harness.domain.bundle import Verification
from harness.domain.check import Check, Status
from harness.evidence.commands import rerun_of, validate_command, worktree_command, worktree_folder
from harness.evidence.harness_score import read_score, score_words
from harness.evidence.reader import Bundle
from harness.report.panels.material import table
from harness.report.text import plain, repository_link
from harness.report.view import CellView, Command, TableView

__all__ = ["check_command", "environment_tables", "reproduce_commands", "subtitle", "verification_words"]


def subtitle(bundle: Bundle) -> tuple[tuple[str, str, str], ...]:
    """(label, text, link) of the lines under the title."""
    plan, change = bundle.plan, bundle.plan.change
    repository = repository_link(change.repository) or ""
    parts = [("repository", plain(change.repository, 200), repository)]
    if change.pr is not None:
        parts.append(
            ("pull request", f"#{change.pr}", f"{repository}/pull/{change.pr}" if repository else "")
        )
    parts += [
        ("base", change.base[:12], ""),
        ("head", change.head[:12] + (" + uncommitted changes" if change.is_dirty else ""), ""),
        ("policy", plain(plan.policy.name, 80), ""),
        ("tier", plan.tier.value, ""),
    ]
    if bundle.manifest is not None:
        parts.append(("made", f"{bundle.manifest.created:%Y-%m-%d %H:%M} UTC", ""))
    return tuple(parts)


def environment_tables(bundle: Bundle) -> tuple[tuple[str, TableView], ...]:
    """Machine, settings, libraries, digests."""
    plan = bundle.plan
    machine = bundle.manifest.machine if bundle.manifest else plan.machine
    gpus = [f"{g.name}, {g.memory_bytes / 2**30:.0f} GiB" for g in machine.gpus]
    facts = [
        ("processor", f"{machine.cpu_model}, {machine.cpu_count} cores"),
        ("memory", f"{machine.memory_bytes / 2**30:.0f} GiB"),
        ("GPUs", "; ".join(gpus) or "none"),
        ("driver", machine.driver or "none"),
        ("platform", machine.platform),
        ("Python", machine.python),
    ]
    digests = [
        ("claim", plan.claim.digest()),
        ("policy", plan.policy.digest()),
        ("plan", plan.digest()),
        ("harness", f"{plan.harness_version}, {plan.harness_digest}"),
        ("pack", f"{plan.pack}, {plan.pack_digest}"),
        ("bundle", bundle.digest or "not finished"),
    ]
    score = [("planted faults", score_words(read_score(bundle.folder), plan.harness_digest))]
    settings = list(bundle.environment.variables) if bundle.environment else []
    if bundle.environment and bundle.environment.image_digest:
        settings.append(("image", bundle.environment.image_digest))
    found = [
        ("Machine", facts),
        ("Settings", settings),
        ("Libraries", list(machine.libraries)),
        ("Digests", digests),
        ("How good this harness is", score),
    ]
    return tuple(
        (title, table("name | value", [(CellView(plain(n, 120)), CellView(plain(v, 300))) for n, v in rows]))
        for title, rows in found
        if rows
    )


def reproduce_commands(bundle: Bundle, path: str = "BUNDLE") -> tuple[Command, ...]:
    """Commands that check this bundle, repeat one cell of it, and make the whole run again; `path` is where
    the reader has the bundle.
    """
    plan, quoted = bundle.plan, shlex.quote(path)
    policy = shlex.quote(plan.policy.name)
    commands = [
        Command(f"fasttrack bundle verify {quoted}", "holds together, offline"),
        Command(f"fasttrack gate {quoted} --policy {policy}", "the verdict"),
    ]
    cell = next((label for c in plan.checks if (label := _cell_of(bundle, c)) is not None), None)
    if cell is not None:
        one = ["fasttrack", "reproduce", path, "--cell", cell]
        commands.append(Command(shlex.join(one), "one cell again, with the same inputs"))
    clone, folder = _clone_commands(bundle)
    commands += clone
    rerun = rerun_of(plan, folder)
    if rerun is not None:
        line = f"{validate_command(plan, rerun)} --nonce {plan.nonce}"
        commands.append(Command(line, "everything again, with the same inputs"))
    else:
        whole = ["fasttrack", "reproduce", path, "--repo", folder]
        commands.append(Command(shlex.join(whole), f"all {len(plan.checks)} checks again"))
    return tuple(Command(plain(c.line, 900), c.where) for c in commands)


def check_command(path: str, check: Check) -> str:
    """The command that runs one check of the bundle in `path` again."""
    return shlex.join(["fasttrack", "reproduce", path, "--only", check.id])


def _cell_of(bundle: Bundle, check: Check) -> str | None:
    """Label of a check's cell, where somebody can run it again and it ran here."""
    outcome = bundle.outcome(check.id)
    if check.cell is None or outcome is None or outcome.status is not Status.PASS:
        return None
    label = check.cell.label()
    return label if label in check.id else None  # some checks have a cell for its architecture alone


def _clone_commands(bundle: Bundle) -> tuple[list[Command], str]:
    """Commands that put the judged head on disk, and its folder as seen from where they run."""
    change = bundle.plan.change
    folder = worktree_folder(change.head)
    if not change.repository.startswith("https://"):
        where = f"once, in a clone of {plain(change.repository, 80)}"
        return [Command(worktree_command(change.head), where)], folder
    name = change.repository.rstrip("/").removesuffix(".git").rpartition("/")[2] or "repository"
    fetch = ["git", "-C", name, "fetch", "origin", change.head]
    commands = [
        Command(shlex.join(["git", "clone", change.repository, name]), "the change"),
        Command(shlex.join(fetch), "its head"),
        Command(worktree_command(change.head, name), "its files, in a folder of their own"),
    ]
    return commands, folder.removeprefix("../")


def verification_words(verification: Verification | None) -> tuple[str, ...]:
    """What verifying said, a line a step; empty where nobody verified."""
    if verification is None:
        return ()
    lines = []
    for step in verification.steps:
        problems = len(step.problems) + len(step.missing) + len(step.differing)
        said = f"skipped: {step.skipped}" if step.skipped else f"{problems or 'no'} problems"
        said += f" ({step.note})" if step.note else ""
        lines.append(f"{step.number}. {step.name}: {step.looked_at} looked at, {said}")
        lines += [
            f"   {p.path or 'bundle'}: {p.message}" for p in (*step.problems, *step.missing, *step.differing)
        ]
    return tuple(plain(line, 600) for line in lines)
