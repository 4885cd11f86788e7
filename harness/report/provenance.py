"""Where evidence came from and how to make it again."""

import shlex

from harness.domain.bundle import Verification
from harness.evidence.harness_score import read_score, score_words
from harness.evidence.reader import Bundle
from harness.report.panels.material import table
from harness.report.text import plain, repository_link
from harness.report.view import CellView, Command, TableView

__all__ = ["environment_tables", "reproduce_commands", "subtitle", "verification_words"]


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


def reproduce_commands(bundle: Bundle) -> tuple[Command, ...]:
    """Commands that make the run again, and that check this bundle."""
    plan = bundle.plan
    commands = []
    if plan.change.repository.startswith("https://"):
        folder = plan.change.repository.rstrip("/").removesuffix(".git").rpartition("/")[2] or "repository"
        commands.append(Command(shlex.join(["git", "clone", plan.change.repository, folder]), "the change"))
        fetch = ["git", "-C", folder, "fetch", "origin", plan.change.head]
        commands.append(Command(shlex.join(fetch), "its head"))
        repo = ["--repo", folder]
    else:
        repo = []
    words = ["fasttrack", "validate", "--pack", plan.pack, "--policy", plan.policy.name, *repo]
    words += ["--base", plan.change.base, "--head", plan.change.head, "--tier", plan.tier.value]
    words += ["--nonce", plan.nonce] + (["--full"] if plan.is_full else [])
    commands.append(Command(shlex.join(words), "the same questions with the same seeds"))
    commands.append(Command("fasttrack bundle verify BUNDLE", "that this bundle holds together, offline"))
    commands.append(Command(f"fasttrack gate BUNDLE --policy {shlex.quote(plan.policy.name)}", "the verdict"))
    return tuple(Command(plain(c.line, 900), c.where) for c in commands)


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
