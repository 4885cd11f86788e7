"""Only the op's own files count; what else an agent leaves in its workspace is not looked at."""

from pathlib import Path

import pytest

from harness.agent.workspace import MAX_FILE_BYTES, editable_files, lay_out, read_change, tree_with
from harness.domain.errors import InputError
from harness.engines.packs import load_pack

FILE = "kernels/k3_decode/cpu/router.py"
START = {FILE: "first\nsecond\n"}


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    place = tmp_path / "workspace"
    (place / FILE).parent.mkdir(parents=True)
    (place / FILE).write_text(START[FILE])
    return place


def test_an_agent_may_edit_the_implementation_and_never_the_oracle() -> None:
    contract = next(o for o in load_pack("k3_decode").ops() if o.name == "router")
    assert editable_files(contract, "cpu") == (FILE,)
    assert editable_files(contract, "cute") == ("kernels/k3_decode/cute/router.py",)


def test_the_change_is_a_patch_of_the_known_files_alone(workspace: Path) -> None:
    (workspace / FILE).write_text("first\nthird\n")
    (workspace / "kernels/k3_decode/ops").mkdir()
    (workspace / "kernels/k3_decode/ops/router.py").write_text("an oracle that agrees")
    change = read_change(workspace, START)
    assert list(change.files) == [FILE]
    assert change.patch.splitlines()[-2:] == ["-second", "+third"]


def test_an_unchanged_workspace_has_an_empty_patch(workspace: Path) -> None:
    assert read_change(workspace, START).patch == ""


@pytest.mark.parametrize(("make", "words"), [
    (lambda place: place.unlink(), "is gone"),
    (lambda place: (place.unlink(), place.symlink_to("/etc/passwd")), "links are not followed"),
    (lambda place: place.write_bytes(b"\xff\xfe"), "is no UTF-8 text"),
    (lambda place: place.write_bytes(b"x" * (MAX_FILE_BYTES + 1)), "200000 at most"),
], ids=["gone", "link", "binary", "large"])  # fmt: skip
def test_a_file_that_is_no_plain_text_is_refused_in_words(workspace: Path, make: object, words: str) -> None:
    make(workspace / FILE)  # type: ignore[operator]  # one of the functions above
    with pytest.raises(InputError, match=words):
        read_change(workspace, START)


def test_a_folder_that_became_a_link_out_of_the_workspace_is_refused(workspace: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (workspace / FILE).parent.rename(elsewhere)
    (workspace / FILE).parent.symlink_to(elsewhere)
    with pytest.raises(InputError, match="no plain file of the workspace"):
        read_change(workspace, START)


def test_a_tree_is_the_pack_with_the_candidates_files_in_it(tmp_path: Path) -> None:
    pack = load_pack("k3_decode")
    source = tmp_path / "repo"
    (source / FILE).parent.mkdir(parents=True)
    (source / FILE).write_text("old")
    (source / "kernels/k3_decode/pack.py").write_text("kept")
    tree = tree_with(pack, source, {FILE: "new"}, tmp_path / "tree")
    found = {p.relative_to(tree).as_posix(): p.read_text() for p in tree.rglob("*.py")}
    assert found == {"k3_decode/cpu/router.py": "new", "k3_decode/pack.py": "kept"}
    assert (source / FILE).read_text() == "old"


def test_a_repository_without_the_file_gives_nothing_to_begin_with(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="an agent needs a file to begin with"):
        lay_out(tmp_path / "workspace", tmp_path, (FILE,))
