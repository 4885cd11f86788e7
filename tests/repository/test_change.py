"""What `load_change` sees in a range."""

import os
from pathlib import Path
from typing import Any

import pytest

from harness.domain.change import EMPTY_TREE, Change, ChangedFile, FileKind
from harness.domain.errors import InputError
from harness.repository import Limits, load_change

LINES = "".join(f"line {n}\n" for n in range(40))


def read(repo: Any, base: str = "HEAD~1", head: str = "HEAD", limits: Limits | None = None) -> Change:
    change, tree = load_change(repo.root, base, head, limits)
    tree.close()
    return change


def only(change: Change) -> ChangedFile:
    assert len(change.files) == 1
    return change.files[0]


def test_a_modified_file_has_its_lines_numbered_at_both_sides(repo: Any) -> None:
    repo.commit({"a.py": "one\ntwo\nthree\n"})
    repo.commit({"a.py": "one\n2\n2b\nthree\nfour"})
    file = only(read(repo))
    assert (file.path, file.status, file.kind) == ("a.py", "modified", FileKind.TEXT)
    assert [h.removed for h in file.hunks] == [((2, "two"),), ()]
    assert [h.added for h in file.hunks] == [((2, "2"), (3, "2b")), ((5, "four"),)]
    assert (file.added_lines, file.removed_lines) == (3, 1)


def test_the_root_commit_is_compared_with_the_empty_tree(repo: Any) -> None:
    repo.commit({"a.py": "one\n"})
    change = read(repo, "HEAD~1", "HEAD")
    assert change.base == EMPTY_TREE
    assert only(change).status == "added"
    assert read(repo, EMPTY_TREE, "HEAD") == change


def test_the_base_moves_to_the_merge_base_so_that_only_the_branch_is_judged(repo: Any) -> None:
    fork = repo.commit({"a.py": "one\n"})
    repo.git("checkout", "-q", "-b", "pr")
    repo.commit({"b.py": "two\n"})
    repo.git("checkout", "-q", "main")
    repo.commit({"c.py": "three\n"})
    change = read(repo, "main", "pr")
    assert change.base == fork
    assert only(change).path == "b.py"


def test_renames_copies_and_mode_changes_are_told_apart(repo: Any) -> None:
    repo.commit({"old.py": LINES, "source.py": LINES + "x\n", "run.sh": "echo\n"})
    os.chmod(repo.root / "run.sh", 0o755)
    repo.commit(
        {"old.py": None, "new.py": LINES + "y\n", "source.py": LINES + "z\n", "copy.py": LINES + "x\n"}
    )
    files = {f.path: f for f in read(repo).files}
    assert set(files) == {"new.py", "source.py", "copy.py", "run.sh"}
    assert (files["copy.py"].status, files["copy.py"].old_path) == ("copied", "source.py")
    assert (files["new.py"].status, files["new.py"].old_path) == ("renamed", "old.py")
    assert [h.added for h in files["new.py"].hunks] == [((41, "y"),)]
    assert (files["run.sh"].old_mode, files["run.sh"].new_mode) == ("100644", "100755")
    assert files["run.sh"].hunks == ()


def test_kinds_that_are_no_text_are_named_and_have_no_hunks(repo: Any) -> None:
    repo.commit({"a": "x\n"})
    os.symlink("/etc/passwd", repo.root / "link")
    repo.git("update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},module")
    repo.commit(
        {
            "image.png": b"\x89PNG\0\0",
            "late.py": b"x = 1\n" * 4000 + b"\0",
            "latin.py": "é = 1\n".encode("latin-1"),
            "weights": "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        }
    )
    repo.git("update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},module")
    repo.git("commit", "-q", "--amend", "-m", "m")
    files = {f.path: f for f in read(repo).files}
    assert {path: f.kind for path, f in files.items()} == {
        "image.png": FileKind.BINARY,
        "late.py": FileKind.BINARY,
        "latin.py": FileKind.NOT_UTF8,
        "link": FileKind.SYMLINK,
        "module": FileKind.SUBMODULE,
        "weights": FileKind.LFS_POINTER,
    }
    assert all(f.hunks == () for f in files.values())
    assert files["latin.py"].added_lines == 1


def test_a_file_that_becomes_a_symlink_is_a_type_change_and_keeps_later_files_in_step(repo: Any) -> None:
    repo.commit({"a": "text\n", "b": "one\n"})
    (repo.root / "a").unlink()
    os.symlink("b", repo.root / "a")
    repo.commit({"b": "two\n"})
    files = {f.path: f for f in read(repo).files}
    assert (files["a"].status, files["a"].kind) == ("type_changed", FileKind.SYMLINK)
    assert files["b"].hunks[0].added == ((1, "two"),)


def test_a_deleted_file_is_described_as_it_was(repo: Any) -> None:
    repo.commit({"a": "x\n", "gone.py": "one\n"})
    repo.commit({"gone.py": None})
    file = only(read(repo))
    assert (file.status, file.kind, file.removed_lines, file.new_mode) == ("deleted", FileKind.TEXT, 1, None)


def test_odd_names_are_kept_and_names_that_are_no_utf8_are_escaped(repo: Any) -> None:
    repo.commit({"a": "x\n"})
    for name in (
        b"caf\xe9.py",
        b'quo"te\ttab.py',
        b"new\ndiff --git a/x b/x\nline.py",
        "naïve.py".encode(),
    ):
        path = Path(os.fsdecode(os.fsencode(repo.root) + b"/" + name))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n")
    repo.commit({})
    change, tree = load_change(repo.root, "HEAD~1", "HEAD")
    with tree:
        assert [f.path for f in change.files] == [
            "caf\\xe9.py", "naïve.py", "new\ndiff --git a/x b/x\nline.py", 'quo"te\ttab.py',
        ]  # fmt: skip
        assert all(f.hunks[0].added == ((1, "x = 1"),) for f in change.files)
        assert tree.read("head", "caf\\xe9.py") == b"x = 1\n"


def test_lines_with_carriage_returns_and_separators_stay_whole(repo: Any) -> None:
    repo.commit({"a": "x\n"})
    repo.commit({"b": "one\r\ntwo\x0c\x85\u2028three\n@@ -1 +1 @@\ndiff --git a b\n--- a\n+++ b\n"})
    assert only(read(repo)).hunks[0].added == (
        (1, "one\r"), (2, "two\x0c\x85\u2028three"), (3, "@@ -1 +1 @@"), (4, "diff --git a b"), (5, "--- a"),
        (6, "+++ b"),
    )  # fmt: skip


def test_an_empty_range_has_no_files(repo: Any) -> None:
    repo.commit({"a": "x\n"})
    assert read(repo, "HEAD", "HEAD").files == ()


def test_the_repository_is_named_by_its_remote_without_credentials(repo: Any) -> None:
    repo.commit({"a": "x\n"})
    assert read(repo).repository == "repo"
    repo.git("remote", "add", "origin", "https://user:secret@example.com/o/r.git?token=s")
    assert read(repo).repository == "https://example.com/o/r.git"
    repo.git("remote", "set-url", "origin", "token@example.com:o/r.git")
    assert read(repo).repository == "example.com:o/r.git"
    repo.git("remote", "set-url", "origin", "/home/somebody/r.git")
    assert read(repo).repository == "r"


@pytest.mark.parametrize("name", ["nosuch", "--output=x", "HEAD^{tree}", "", "a b", "main..main"])
def test_a_name_that_is_no_commit_is_refused_in_one_paragraph(repo: Any, name: str) -> None:
    repo.commit({"a": "x\n"})
    with pytest.raises(InputError, match="is no commit of") as error:
        read(repo, name, "HEAD")
    assert "\n" not in str(error.value)


def test_a_folder_that_is_no_repository_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no such folder"):
        load_change(tmp_path / "nosuch", "a", "b")
    with pytest.raises(InputError, match="is no git repository"):
        load_change(tmp_path, "a", "b")


def test_histories_that_do_not_meet_are_refused(repo: Any) -> None:
    repo.commit({"a": "x\n"})
    repo.git("checkout", "-q", "--orphan", "other")
    repo.commit({"b": "x\n"})
    with pytest.raises(InputError, match="no common history"):
        read(repo, "main", "other")


def test_a_shallow_clone_without_the_base_says_how_to_fetch_it(repo: Any, tmp_path: Path) -> None:
    base = repo.commit({"a": "x\n"})
    repo.commit({"a": "y\n"})
    repo.git("clone", "-q", "--depth", "1", f"file://{repo.root}", str(tmp_path / "shallow"))
    for name in (base, "HEAD~1"):
        with pytest.raises(
            InputError, match="this clone is shallow, so fetch more of it: git fetch --unshallow"
        ):
            load_change(tmp_path / "shallow", name, "HEAD")


def test_a_change_over_a_limit_is_refused_with_the_limits_name(repo: Any) -> None:
    repo.commit({"a": "x\n"})
    repo.commit({"b": LINES, "c": LINES})
    with pytest.raises(InputError, match=r"2 files differ .* limit of 1 \(max_changed_files\)"):
        read(repo, limits=Limits(max_changed_files=1))
    with pytest.raises(InputError, match=r"over the limit of 300 bytes \(max_diff_bytes\)"):
        read(repo, limits=Limits(max_diff_bytes=300))


def test_a_file_over_the_blob_limit_counts_as_binary_and_cannot_be_read(repo: Any) -> None:
    repo.commit({"a": "x\n"})
    repo.commit({"b": LINES})
    change, tree = load_change(repo.root, "HEAD~1", "HEAD", Limits(max_blob_bytes=100))
    with tree:
        assert only(change).kind is FileKind.BINARY
        with pytest.raises(InputError, match="over the limit of 100 for one file"):
            tree.read("head", "b")


def test_a_sha256_repository_is_refused(tmp_path: Path, repo: Any) -> None:
    repo.git("init", "-q", "--object-format=sha256", str(tmp_path / "new"))
    with pytest.raises(InputError, match="uses sha256 ids"):
        load_change(tmp_path / "new", "HEAD~1", "HEAD")


def test_an_object_that_is_missing_is_told_in_words(repo: Any) -> None:
    repo.commit({"a": "x\n"})
    repo.commit({"a": "y\n"})
    blob = repo.git("rev-parse", "HEAD:a")
    (repo.root / ".git/objects" / blob[:2] / blob[2:]).unlink()
    with pytest.raises(InputError, match="this clone lacks objects"):
        read(repo)


def test_a_tree_reads_both_sides_and_never_the_working_tree(repo: Any) -> None:
    repo.commit({"a": "old\n", "dir/b": "b\n"})
    repo.commit({"a": "new\n", "dir/b": None})
    repo.write({"a": "uncommitted\n"})
    _, tree = load_change(repo.root, "HEAD~1", "HEAD")
    with tree:
        assert (tree.read("base", "a"), tree.read("head", "a")) == (b"old\n", b"new\n")
        assert tree.read("head", "dir/b") is None
        assert tree.read("head", "../a") is None
        assert tree.paths("base") == ("a", "dir/b")
        assert tree.paths("head") == ("a",)


def test_closing_the_tree_leaves_no_folder_behind(repo: Any) -> None:
    repo.commit({"a": "x\n"})
    _, tree = load_change(repo.root, "HEAD", "HEAD")
    folder = tree._scratch.root
    assert folder.is_dir()
    tree.close()
    assert not folder.exists()
