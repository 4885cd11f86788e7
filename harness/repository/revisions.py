"""Names of commits into ids, in a repository that may be shallow, bare or empty."""

import re
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from harness.domain.change import EMPTY_TREE
from harness.domain.errors import InputError
from harness.repository.git import GitFailed, run_git

__all__ = ["Range", "merge_base", "object_folder", "past_changes", "repository_name", "resolve_range"]


class Range(NamedTuple):
    """What is compared."""

    base: str
    """Commit, or the empty tree."""
    head: str


def resolve_range(repo: Path, base: str, head: str) -> Range:
    """Ids of `base` and `head`; the base is moved to the merge base, as on a pull request's page.

    `base` may be the empty tree, and is it where head is the root commit and base is head's parent.
    """
    require_repository(repo)
    head_id = _commit(repo, head)
    if base == EMPTY_TREE or _is_parent_of_root(repo, base, head, head_id):
        return Range(EMPTY_TREE, head_id)
    return Range(_merge_base(repo, _commit(repo, base), head_id), head_id)


def merge_base(repo: Path, base: str, head: str) -> str:
    """Id of the commit where a change to `head` starts, for the revision that it is meant for."""
    return resolve_range(repo, base, head).base


def past_changes(repo: Path, head: str, last: int) -> tuple[Range, ...]:
    """The last first-parent steps up to `head`, newest first; the root commit starts from the empty tree."""
    require_repository(repo)
    steps = run_git(
        ["rev-list", "--first-parent", "--parents", "-n", str(last), "--end-of-options", _commit(repo, head)],
        folder=repo,
    )
    rows = [line.split() for line in steps.decode("ascii").splitlines()]
    if is_shallow(repo):
        rows = [row for row in rows if len(row) > 1]  # where the history was cut, a commit looks like a root
    return tuple(Range(row[1] if len(row) > 1 else EMPTY_TREE, row[0]) for row in rows)


def require_repository(repo: Path) -> None:
    """Raise `InputError` unless `repo` lies in a git repository whose ids are SHA-1."""
    if not repo.is_dir():
        raise InputError(f"{repo}: there is no such folder; name a git repository")
    try:
        object_format = run_git(["rev-parse", "--show-object-format"], folder=repo).strip()
    except GitFailed as error:
        raise InputError(f"{repo} is no git repository that git can open ({error}); name one") from error
    if object_format != b"sha1":
        raise InputError(
            f"{repo} uses {object_format.decode('ascii', 'replace')} ids, but bundles are bound to SHA-1; "
            "judge a SHA-1 clone"
        )


def object_folder(repo: Path) -> Path:
    """Folder of the repository's objects."""
    path = run_git(["rev-parse", "--path-format=absolute", "--git-path", "objects"], folder=repo)
    return Path(path.decode("utf-8", "surrogateescape").removesuffix("\n"))


def repository_name(repo: Path) -> str:
    """Remote URL without credentials or query; the folder's name where there is no remote or it is a path."""
    try:
        url = (
            run_git(["config", "--get", "remote.origin.url"], folder=repo).decode("utf-8", "replace").strip()
        )
    except GitFailed:
        url = ""
    parts = urlsplit(url) if "://" in url else None
    if parts is not None and parts.scheme != "file" and parts.hostname:
        return f"{parts.scheme}://{parts.hostname}{parts.path}"
    if match := re.fullmatch(r"(?:[^@/]*@)?([A-Za-z0-9.-]+):([^:].*)", url):  # scp form: user@host:path
        return f"{match[1]}:{match[2]}"
    return Path(url).name.removesuffix(".git") or repo.resolve().name


def _commit(repo: Path, name: str) -> str:
    try:
        found = run_git(["rev-parse", "--verify", "--end-of-options", f"{name}^{{commit}}"], folder=repo)
    except GitFailed as error:
        raise InputError(f"{name!r} is no commit of {repo} ({error}); {_advice(repo)}") from error
    return found.decode("ascii").strip()


def _is_parent_of_root(repo: Path, base: str, head: str, head_id: str) -> bool:
    if base not in (f"{head}~1", f"{head}~", f"{head}^", f"{head}^1"):
        return False
    parents = run_git(["rev-list", "--parents", "-n", "1", "--end-of-options", head_id], folder=repo).split()[
        1:
    ]
    return not parents and not is_shallow(repo)


def _merge_base(repo: Path, base: str, head: str) -> str:
    try:
        return run_git(["merge-base", base, head], folder=repo).decode("ascii").split()[0]
    except GitFailed as error:
        raise InputError(
            f"{base[:12]} and {head[:12]} have no common history in {repo}; {_advice(repo)}"
        ) from error


def is_shallow(repo: Path) -> bool:
    """Whether the history was cut."""
    return run_git(["rev-parse", "--is-shallow-repository"], folder=repo).strip() == b"true"


def _advice(repo: Path) -> str:
    if is_shallow(repo):
        return "this clone is shallow, so fetch more of it: git fetch --unshallow"
    return "fetch the branch it is on, or correct the name"
