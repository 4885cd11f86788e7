"""`fasttrack reproduce` from the outside: a real run of the fake pack, repeated."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness import pipeline
from harness.cli import reproduce as command
from harness.cli.main import _exit_code
from harness.domain.check import StageName
from harness.domain.plan import Plan
from harness.domain.replication import Replication
from harness.engines import packs
from harness.engines.packs import harness_digest, source_digest
from harness.evidence.bundle import write_bundle
from harness.evidence.reader import open_bundle
from harness.evidence.run_folder import load_plan, open_run
from harness.gate import replan as replanning
from harness.measure.machine import read_machine
from harness.pipeline import Progress, execute
from harness.planner import CodeDigests, make_plan, request_again
from tests.evidence.tampering import rehash
from tests.fakes.pack import FakePack
from tests.fakes.requests import plan_request

PACK = FakePack()
NONCE = "0123456789abcdef"


@pytest.fixture(autouse=True)
def _fake_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs, "load_pack", lambda name: PACK)
    monkeypatch.setattr(replanning, "load_pack", lambda name: PACK)
    _serve(monkeypatch, "honest")


def _serve(monkeypatch: pytest.MonkeyPatch, behaviour: str) -> None:
    argv = (sys.executable, "-m", "tests.fakes.serve")
    monkeypatch.setattr(pipeline, "serve_command", lambda job: (*argv, str(job), behaviour))


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Two coverage checks of this machine."""
    digests = CodeDigests(harness_digest(), source_digest(PACK.root))
    draft = make_plan(plan_request(PACK), digests, NONCE, (StageName.COVERAGE,), ("mix", "head"))
    request = request_again(draft, PACK, read_machine())
    return make_plan(request, digests, NONCE, (StageName.COVERAGE,), ("mix", "head"))


@pytest.fixture
def bundle(plan: Plan, tmp_path: Path) -> Path:
    with open_run(tmp_path / "first", plan) as run:
        execute(plan, run, None, tmp_path / "cache", Progress(say=lambda *_: None))
        return write_bundle(run)


def _reproduce(*words: object) -> tuple[int, Replication]:
    result = CliRunner().invoke(command.app, [*(str(w) for w in words), "--json"])
    return result.exit_code, Replication.model_validate_json(result.stdout)


def test_a_bundle_run_again_is_replicated_by_a_bundle_that_names_it(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, result = _reproduce(bundle, "--out", tmp_path / "again")
    assert (code, result.answer.value) == (0, "replicated")
    assert [c.check for c in result.checks] == ["coverage/poison/mix", "coverage/poison/head"]
    again = open_bundle(tmp_path / "again")
    assert (result.first, result.second) == (open_bundle(bundle).digest, again.digest)
    assert again.plan.replicates == result.first
    assert again.plan.nonce == NONCE


def test_one_check_alone_is_run_where_only_it_is_asked_for(
    bundle: Path, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, result = _reproduce(bundle, "--only", "head", "--out", tmp_path / "again")
    assert code == 0
    assert [c.check for c in result.checks] == ["coverage/poison/head"]
    assert load_plan(tmp_path / "again").only == ("head",)
    cell = plan.checks[0].cell
    assert cell is not None
    _, by_cell = _reproduce(bundle, "--cell", cell.label(), "--out", tmp_path / "cell")
    assert "coverage/poison/mix" in [c.check for c in by_cell.checks]


def test_a_candidate_that_dies_here_is_not_replicated(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _serve(monkeypatch, "segfault")
    code, result = _reproduce(bundle, "--only", "mix", "--out", tmp_path / "again")
    assert (code, result.answer.value) == (1, "not_replicated")
    assert result.checks[0].why.startswith("PASS in the bundle and FAIL here: the candidate crashed")


def test_what_a_narrowed_bundle_left_out_is_not_asked_of_its_repetition(
    bundle: Path, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cell = plan.checks[0].cell
    assert cell is not None
    wide = make_plan(plan_request(PACK), CodeDigests("1" * 64, "2" * 64), NONCE, (StageName.COVERAGE,))
    assert sum(check.cell == cell for check in wide.checks) > sum(c.cell == cell for c in plan.checks)
    code, result = _reproduce(bundle, "--cell", cell.label(), "--out", tmp_path / "again")
    assert (code, [c.check for c in result.checks]) == (0, [c.id for c in plan.checks if c.cell == cell])


def test_other_kernels_are_told_before_anything_runs(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = plan.model_copy(update={"pack_digest": "9" * 64})
    with open_run(tmp_path / "first", other) as run:
        execute(other, run, None, tmp_path / "cache", Progress(say=lambda *_: None))
        write_bundle(run)
    assert _exit_code(["reproduce", str(tmp_path / "first"), "--out", str(tmp_path / "again")]) == 2
    said = capsys.readouterr().err
    assert "is about other kernels (pack fake, digest 999999999999)" in said
    folder = f"../judged-{plan.change.head[:12]}"
    assert f"git worktree add --detach {folder} {plan.change.head}" in said
    assert f"PYTHONPATH={folder}/" in said
    assert not (tmp_path / "again").exists()


def test_a_broken_bundle_is_not_repeated(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = bundle / "outcomes.jsonl"
    lines = [json.loads(line) for line in outcomes.read_text().splitlines()]
    lines[0]["summary"] = "all is well"
    from harness.domain.record import canonical_bytes

    outcomes.write_bytes(b"".join(canonical_bytes(line) + b"\n" for line in lines))
    rehash(bundle)
    assert _exit_code(["reproduce", str(bundle), "--out", str(tmp_path / "again")]) == 2
    assert "is broken (coverage/poison/mix summary says 'all is well'" in capsys.readouterr().err
