"""What a moved head leaves of a bundle, read from a real repository."""

import subprocess
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from harness.cli import gate as gate_command
from harness.domain.verdict import Verdict
from harness.engines.packs import files_digest
from harness.evidence.run_folder import load_plan
from harness.repository import GitTree, load_change
from tests.evidence.example_judge import judge
from tests.evidence.example_run import as_planned, example_plan, example_policy_set, write_example

PACK = SimpleNamespace(
    repository_prefix="kernels/k3_decode/",
    ops_of_file=lambda path: ("kda_step",) if path.endswith("kda_step.py") else (),
)


def _git(repo: Path, *words: str) -> str:
    command = ["git", "-C", str(repo), "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _commit(repo: Path, path: str, content: str) -> str:
    (repo / path).parent.mkdir(parents=True, exist_ok=True)
    (repo / path).write_text(content)
    _git(repo, "add", "-A")
    _git(repo, "commit", "-q", "-m", path)
    return _git(repo, "rev-parse", "HEAD")


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    folder = tmp_path / "repo"
    folder.mkdir()
    _git(folder, "init", "-q", "-b", "main")
    return folder


@pytest.fixture(autouse=True)
def _example(monkeypatch: pytest.MonkeyPatch) -> None:
    import harness.documents
    import harness.engines.packs

    monkeypatch.setattr(gate_command, "judge_of", lambda folder: judge)
    monkeypatch.setattr(gate_command, "replan_of", lambda: as_planned)
    monkeypatch.setattr(harness.documents, "load_policy_set", example_policy_set)
    monkeypatch.setattr(harness.engines.packs, "load_pack", lambda name: PACK)


def _verdict(bundle: Path, head: str, repo: Path | None) -> Verdict:
    words = [str(bundle), "--policy", "smoke", "--head", head, "--json"]
    words += ["--repo", str(repo)] if repo is not None else []
    return Verdict.model_validate_json(CliRunner().invoke(gate_command.app, words).stdout)


def _content(tree: GitTree, path: str) -> bytes:
    return tree.read("head", path) or b""


def _bundle(folder: Path, head: str, repo: Path) -> Path:
    """A bundle of one commit of the repository."""
    plan = example_plan(scene="passing")
    change, tree = load_change(repo, f"{head}~1", head, pr=plan.change.pr)
    with tree:
        paths = [p for p in tree.paths("head") if p.startswith(PACK.repository_prefix)]
        ran = files_digest(
            {p.removeprefix(PACK.repository_prefix): partial(_content, tree, p) for p in paths}
        )
    change = change.model_copy(update={"is_dirty": False})  # the tree here may be of a later commit
    bound = {"change": change.without_hunks(), "change_digest": change.digest(), "pack_digest": ran}
    return write_example(folder, plan.model_copy(update=bound), "passing")


def test_the_gate_reads_what_changed_and_keeps_the_evidence_that_survives(repo: Path, tmp_path: Path) -> None:
    _commit(repo, "README.md", "one")
    old = _commit(repo, "kernels/k3_decode/cute/router.py", "one")
    new = _commit(repo, "kernels/k3_decode/cute/kda_step.py", "two")
    verdict = _verdict(_bundle(tmp_path / "bundle", old, repo), new, repo)
    stale = {s.check for s in verdict.stale}
    assert "audit/kda_step/sm_90a" in stale
    assert "audit/attn_res/sm_90a" not in stale
    assert [m.stage.value for m in verdict.missing if m.arch == "sm_90a"] == ["audit"]


def test_a_rebased_head_ends_all_evidence(repo: Path, tmp_path: Path) -> None:
    base = _commit(repo, "README.md", "one")
    old = _commit(repo, "kernels/k3_decode/cute/kda_step.py", "fast")
    _git(repo, "checkout", "-q", "-b", "again", base)
    new = _commit(repo, "README.md", "two")  # kda_step is gone, and no diff from the merge base shows it
    verdict = _verdict(_bundle(tmp_path / "bundle", old, repo), new, repo)
    assert all(row.passed == 0 for row in verdict.rows)


def test_without_a_repository_a_moved_head_ends_all_evidence(repo: Path, tmp_path: Path) -> None:
    _commit(repo, "README.md", "one")
    old = _commit(repo, "README.md", "two")
    verdict = _verdict(_bundle(tmp_path / "bundle", old, repo), "c" * 40, None)
    assert all(row.passed == 0 for row in verdict.rows)
    assert "what changed since is not known" in verdict.stale[0].why


def test_a_plan_that_speaks_of_another_change_than_the_repository_holds_counts_for_nothing(
    repo: Path, tmp_path: Path
) -> None:
    _commit(repo, "README.md", "one")
    head = _commit(repo, "kernels/k3_decode/cute/router.py", "one")
    folder = _bundle(tmp_path / "honest", head, repo)
    assert _verdict(folder, head, repo).exit_code == 0
    forged = load_plan(folder).model_copy(update={"change_digest": "9" * 64})
    verdict = _verdict(write_example(tmp_path / "forged", forged, "passing"), head, repo)
    assert verdict.exit_code == 1
    assert "is another change in" in verdict.reasons[0]
    unknown = forged.model_copy(update={"change": forged.change.model_copy(update={"base": "b" * 40})})
    verdict = _verdict(write_example(tmp_path / "unknown", unknown, "passing"), head, repo)
    assert "its change could not be read in" in verdict.reasons[0]


def test_evidence_of_other_pack_files_than_the_heads_is_refused(repo: Path, tmp_path: Path) -> None:
    _commit(repo, "README.md", "one")
    head = _commit(repo, "kernels/k3_decode/cute/router.py", "one")
    honest = load_plan(_bundle(tmp_path / "honest", head, repo))
    other = honest.model_copy(update={"pack_digest": "9" * 64})
    verdict = _verdict(write_example(tmp_path / "other", other, "passing"), head, repo)
    assert verdict.exit_code == 1
    assert "are not those under kernels/k3_decode/" in verdict.reasons[0]


def test_a_bundle_of_the_last_commit_alone_is_refused_where_the_pull_request_starts_before_it(
    repo: Path, tmp_path: Path
) -> None:
    start = _commit(repo, "README.md", "one")
    _git(repo, "branch", "target")
    _commit(repo, "vllm/core.py", "touched")
    head = _commit(repo, "kernels/k3_decode/cute/router.py", "one")
    folder = _bundle(tmp_path / "last", head, repo)
    words = [str(folder), "--policy", "smoke", "--repo", str(repo), "--base", "target", "--json"]
    verdict = Verdict.model_validate_json(CliRunner().invoke(gate_command.app, words).stdout)
    assert verdict.exit_code == 1
    assert f"and the one that is judged at {start[:12]}" in verdict.reasons[0]
    words[6] = f"{head}~1"
    assert Verdict.model_validate_json(CliRunner().invoke(gate_command.app, words).stdout).exit_code == 0
