"""A repository that tries to run something, or to hide part of a change."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from harness.domain.change import Change
from harness.repository import describe_dirt, load_change


def read(repo: Any) -> Change:
    change, tree = load_change(repo.root, "HEAD~1", "HEAD")
    tree.close()
    return change


@pytest.fixture
def witness(repo: Any, tmp_path: Path) -> Path:
    """A program that leaves a file when it runs, planted wherever git would start one."""
    seen = tmp_path / "seen"
    script = tmp_path / "evil.sh"
    script.write_text(f"#!/bin/sh\necho ran >> {seen}\ncat\n")
    script.chmod(0o755)
    repo.commit({"a.py": "one\n", ".gitattributes": "*.py diff=evil filter=evil\n"})
    repo.commit({"a.py": "two\n"})
    for key in (
        "core.fsmonitor", "diff.external", "diff.evil.command", "diff.evil.textconv", "filter.evil.clean",
        "filter.evil.smudge", "filter.evil.process", "core.pager", "core.sshCommand", "core.editor",
        "core.askPass", "credential.helper", "alias.diff-tree", "alias.status",
    ):  # fmt: skip
        repo.git("config", key, f"!{script}" if key.startswith("alias") else str(script))
    repo.git("config", "filter.evil.required", "true")
    hooks = repo.root / ".git/hooks"
    for hook in (
        "post-checkout",
        "post-index-change",
        "reference-transaction",
        "pre-commit",
        "fsmonitor-watchman",
    ):
        (hooks / hook).write_text(script.read_text())
        (hooks / hook).chmod(0o755)
    seen.unlink(missing_ok=True)
    return seen


def test_nothing_of_the_repository_runs_while_it_is_read(repo: Any, witness: Path) -> None:
    os.utime(repo.root / "a.py", (5, 5))  # git must compare the content, where a clean filter would run
    repo.write({"a.py": "tow\n"})
    change = read(repo)
    assert change.files[0].hunks[0].added == ((1, "two"),)
    assert change.is_dirty
    assert not witness.exists()


def test_the_witness_does_run_under_an_unguarded_git(repo: Any, witness: Path) -> None:
    repo.write({"a.py": "tow\n"})
    with pytest.raises(subprocess.CalledProcessError):  # the program is no filter process, so git gives up
        repo.git("diff", "--ext-diff", "HEAD")
    assert witness.exists()


def test_a_promisor_remote_cannot_start_a_transport(repo: Any, witness: Path, tmp_path: Path) -> None:
    blob = repo.git("rev-parse", "HEAD:a.py")
    (repo.root / ".git/objects" / blob[:2] / blob[2:]).unlink()
    repo.git("config", "extensions.partialClone", "origin")
    repo.git("config", "remote.origin.promisor", "true")
    repo.git("config", "remote.origin.url", f"ext::{tmp_path / 'evil.sh'} x")
    repo.git("config", "protocol.ext.allow", "always")
    witness.unlink(missing_ok=True)
    with pytest.raises(Exception, match="lacks objects"):
        read(repo)
    assert not witness.exists()


def test_attributes_cannot_hide_a_file_from_the_diff(repo: Any) -> None:
    repo.commit({"a.py": "one\n", ".gitattributes": "*.py -diff binary\n"})
    repo.commit({"a.py": "two\n"})
    (repo.root / ".git/info").mkdir(exist_ok=True)
    (repo.root / ".git/info/attributes").write_text("* -diff\n")
    assert read(repo).files[0].hunks[0].added == ((1, "two"),)


def test_replace_refs_cannot_show_other_content(repo: Any) -> None:
    repo.commit({"a.py": "one\n"})
    head = repo.commit({"a.py": "two\n"})
    innocent = repo.commit({"a.py": "one\n"})
    repo.git("reset", "-q", "--hard", head)
    repo.git("replace", head, innocent)
    assert read(repo).files[0].hunks[0].added == ((1, "two"),)


def test_reading_leaves_the_repository_as_it_was(repo: Any) -> None:
    repo.commit({"a.py": "one\n"})
    repo.commit({"a.py": "two\n"})
    os.utime(repo.root / "a.py", (5, 5))

    def state() -> dict[str, tuple[int, int]]:
        paths = sorted(p for p in (repo.root / ".git").rglob("*"))
        return {str(p): (p.stat().st_mtime_ns, p.stat().st_size) for p in paths}

    before = state()
    read(repo)
    assert state() == before


def test_a_clean_checkout_has_no_dirt(repo: Any) -> None:
    head = repo.commit({"a.py": "one\n", ".gitignore": "out/\n"})
    repo.write({"out/x": "ignored\n"})
    assert describe_dirt(repo.root, head) is None


def test_uncommitted_and_untracked_files_are_dirt_that_is_named(repo: Any) -> None:
    head = repo.commit({"a.py": "one\n"})
    repo.write({"a.py": "two\n", "new.py": "x\n"})
    repo.git("config", "status.showUntrackedFiles", "no")
    assert describe_dirt(repo.root, head) == (
        "the working tree has 2 uncommitted paths (a.py, new.py); commit or remove what is uncommitted"
    )


@pytest.mark.parametrize("flag", ["--assume-unchanged", "--skip-worktree"])
def test_a_file_that_git_was_told_to_overlook_is_dirt(repo: Any, flag: str) -> None:
    head = repo.commit({"a.py": "one\n"})
    repo.git("update-index", flag, "a.py")
    repo.write({"a.py": "evil\n"})
    assert "told not to look at" in str(describe_dirt(repo.root, head))


def test_another_commit_being_checked_out_is_dirt(repo: Any) -> None:
    head = repo.commit({"a.py": "one\n"})
    repo.commit({"a.py": "two\n"})
    assert "the checked-out commit has other files" in str(describe_dirt(repo.root, head))


def test_a_bare_repository_has_no_dirt(repo: Any, tmp_path: Path) -> None:
    head = repo.commit({"a.py": "one\n"})
    repo.git("clone", "-q", "--bare", str(repo.root), str(tmp_path / "bare"))
    assert describe_dirt(tmp_path / "bare", head) is None
