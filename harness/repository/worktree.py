"""Whether the files on disk are the ones that a commit names."""

from pathlib import Path
from typing import Final

from harness.domain.errors import InputError
from harness.repository.git import GitFailed, hardened_environment, run_git
from harness.repository.revisions import require_repository

__all__ = ["describe_dirt"]

SHOWN: Final = 3


def describe_dirt(repo: Path, head: str) -> str | None:
    """How the working tree differs from commit `head`, in a sentence; None where it does not, or there is
    none.

    Files that git was told not to look at count as different, and so do untracked files that are not ignored.
    """
    require_repository(repo)
    if run_git(["rev-parse", "--is-inside-work-tree"], folder=repo).strip() != b"true":
        return None
    root = Path(_text(run_git(["rev-parse", "--show-toplevel"], folder=repo)))
    environment = hardened_environment(_harmless_filters(repo))
    try:
        if not _is_checked_out(root, head):
            return f"the checked-out commit has other files than {head[:12]}; check that commit out"
        hidden = _hidden(root, environment)
        changed = _changed(root, environment)
    except GitFailed as error:
        raise InputError(f"{repo}: the working tree cannot be compared ({error}); mend the clone") from error
    if changed:
        return f"{_counted(changed, 'uncommitted path')}; commit or remove what is uncommitted"
    if hidden:
        return (
            f"{_counted(hidden, 'path')} that git was told not to look at; clear the flag with update-index"
        )
    return None


def _is_checked_out(root: Path, head: str) -> bool:
    trees = [
        run_git(["rev-parse", "--verify", "--end-of-options", f"{commit}^{{tree}}"], folder=root)
        for commit in ("HEAD", head)
    ]
    return trees[0] == trees[1]


def _changed(root: Path, environment: dict[str, str]) -> list[str]:
    status = run_git(
        [
            "status",
            "--porcelain=v1",
            "-z",
            "--no-renames",
            "--untracked-files=normal",
            "--ignore-submodules=dirty",
        ],
        folder=root,
        environment=environment,
    )
    return [record[3:].decode("utf-8", "backslashreplace") for record in status.split(b"\0")[:-1]]


def _hidden(root: Path, environment: dict[str, str]) -> list[str]:
    """Paths flagged assume-unchanged (a lower-case tag) or skip-worktree (S)."""
    listing = run_git(["ls-files", "-v", "-z"], folder=root, environment=environment)
    records = (record.decode("utf-8", "backslashreplace") for record in listing.split(b"\0")[:-1])
    return [record[2:] for record in records if record[0] == "S" or record[0].islower()]


def _harmless_filters(repo: Path) -> dict[str, str]:
    """Every clean, smudge and process filter of the repository's own configuration, made empty."""
    try:
        names = run_git(["config", "--list", "-z", "--name-only"], folder=repo)
    except GitFailed as error:
        raise InputError(f"{repo}: its configuration cannot be read ({error}); mend it") from error
    keys = {_text(name) for name in names.split(b"\0")[:-1]}
    filters = [key for key in keys if key.startswith("filter.")]
    return {key: "false" if key.endswith(".required") else "" for key in sorted(filters)}


def _counted(paths: list[str], what: str) -> str:
    shown = ", ".join(paths[:SHOWN]) + (", ..." if len(paths) > SHOWN else "")
    return f"the working tree has {len(paths)} {what}{'s' if len(paths) != 1 else ''} ({shown})"


def _text(output: bytes) -> str:
    return output.decode("utf-8", "surrogateescape").removesuffix("\n")
