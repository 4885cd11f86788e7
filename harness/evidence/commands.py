"""Command lines that people paste: commits are named in full, and the judged one lies in a folder of its own.

A command that says `HEAD` means something else tomorrow, and one that names a commit needs its files on disk.
So the judged head gets a worktree beside the clone (`worktree_command`), and every other command names that
folder.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from harness.domain.check import StageName
from harness.domain.machine import Tier
from harness.domain.pack import Pack
from harness.domain.plan import Plan

__all__ = [
    "MAX_WORDS",
    "Rerun",
    "pack_path",
    "rerun_of",
    "validate_command",
    "worktree_command",
    "worktree_folder",
]

MAX_WORDS = 8
"""Words that narrow a command; where more are needed, the whole stage runs again."""


@dataclass(frozen=True, slots=True)
class Rerun:
    """What a command runs again, of one plan's claim and change."""

    policy: str
    head: str
    tier: Tier
    repo: str
    """Folder that holds the judged head."""
    stages: tuple[StageName, ...] = ()
    only: tuple[str, ...] = ()


def worktree_folder(head: str) -> str:
    """Folder of a judged head, from inside its clone."""
    return f"../judged-{head[:12]}"


def worktree_command(head: str, repo: str = "") -> str:
    """The command that puts a head into its folder, run inside the clone or for the clone in `repo`."""
    where = ["-C", repo] if repo not in ("", ".") else []
    return shlex.join(["git", *where, "worktree", "add", "--detach", worktree_folder(head), head])


def pack_path(pack: Pack, folder: str) -> str:
    """The setting that makes Python take a pack from a checkout in `folder`, whatever is installed."""
    parent = PurePosixPath(pack.repository_prefix).parent
    return f"PYTHONPATH={shlex.quote(str(PurePosixPath(folder) / parent))}"


def validate_command(plan: Plan, rerun: Rerun) -> str:
    """The command that makes the evidence, with commits in full."""
    words = ["fasttrack", "validate", "--pack", plan.pack, "--policy", rerun.policy]
    words += ["--repo", rerun.repo] if rerun.repo not in ("", ".") else []
    words += ["--base", plan.change.base, "--head", rerun.head, "--tier", rerun.tier.value]
    for stage in rerun.stages:
        words += ["--stage", stage.value]
    for word in rerun.only:
        words += ["--only", word]
    words += ["--full"] if plan.is_full else []
    return shlex.join(words)


def rerun_of(plan: Plan, repo: str) -> Rerun | None:
    """What asks a plan's own questions again; None where it is narrowed by more words than fit a command."""
    if len(plan.only) > MAX_WORDS:
        return None
    return Rerun(plan.policy.name, plan.change.head, plan.tier, repo, _narrowed(plan), plan.only)


def _narrowed(plan: Plan) -> tuple[StageName, ...]:
    """Stages to name: none where the plan has all that its policy asks for."""
    planned: Sequence[StageName] = tuple(dict.fromkeys(check.stage for check in plan.checks))
    asked = {proof.stage for proof in plan.policy.proofs}
    return () if set(planned) >= asked else tuple(planned)
