"""Worker and collect: samples of a bare machine are bound to plan and code, and judged elsewhere."""

import gzip
import subprocess
import sys
from pathlib import Path

import pytest

from harness import worker
from harness.collect import collect_samples
from harness.domain.check import StageName, Status
from harness.domain.errors import EvidenceError
from harness.domain.plan import Plan
from harness.engines.packs import harness_digest, source_digest
from harness.evidence.run_folder import open_run
from harness.measure.machine import read_machine
from harness.planner import CodeDigests, make_plan
from harness.worker import read_samples, work
from tests.fakes.pack import FakePack
from tests.fakes.requests import plan_request


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
    """One check on the fake pack, planned for this machine."""
    from dataclasses import replace

    pack = FakePack()
    monkeypatch.setattr(worker, "load_pack", lambda name: pack)
    monkeypatch.setattr(
        worker, "serve_command", lambda job: (sys.executable, "-m", "tests.fakes.serve", str(job), "honest")
    )
    request = replace(plan_request(pack), machine=read_machine())
    digests = CodeDigests(harness_digest(), source_digest(pack.root))
    return make_plan(request, digests, "0" * 16, (StageName.COVERAGE,), ("mix",))


def test_worker_samples_are_judged_elsewhere_into_a_run(plan: Plan, tmp_path: Path) -> None:
    out = tmp_path / "samples.jsonl.gz"
    assert work(plan, out, tmp_path / "scratch", lambda _: None) == 1
    with open_run(tmp_path / "run", plan) as run:
        header, count = collect_samples(plan, out, run)
        assert count == 1
        assert header.plan_digest == plan.digest()
        assert [outcome.status for outcome in run.outcomes()] == [Status.PASS]


def test_samples_of_another_plan_are_refused(plan: Plan, tmp_path: Path) -> None:
    out = tmp_path / "samples.jsonl.gz"
    work(plan, out, tmp_path / "scratch", lambda _: None)
    other = plan.model_copy(update={"nonce": "1" * 16})
    with pytest.raises(EvidenceError, match="not for this plan"):
        read_samples(out, other)


def test_a_truncated_sample_file_is_refused(plan: Plan, tmp_path: Path) -> None:
    out = tmp_path / "samples.jsonl.gz"
    work(plan, out, tmp_path / "scratch", lambda _: None)
    out.write_bytes(out.read_bytes()[:-20])
    with pytest.raises(EvidenceError, match="not a complete sample file"):
        read_samples(out, plan)


def test_doubled_samples_are_refused(plan: Plan, tmp_path: Path) -> None:
    out = tmp_path / "samples.jsonl.gz"
    work(plan, out, tmp_path / "scratch", lambda _: None)
    lines = gzip.decompress(out.read_bytes()).splitlines(keepends=True)
    out.write_bytes(gzip.compress(b"".join([*lines, lines[-1]])))
    with open_run(tmp_path / "run", plan) as run, pytest.raises(EvidenceError, match="doubled"):
        collect_samples(plan, out, run)


def test_a_plan_made_with_other_code_is_refused(plan: Plan, tmp_path: Path) -> None:
    other = plan.model_copy(update={"harness_digest": "c" * 64})
    with pytest.raises(EvidenceError, match="the harness here"):
        work(other, tmp_path / "x.gz", tmp_path / "scratch", lambda _: None)


def test_the_worker_needs_no_command_line_packages() -> None:
    code = (
        "import sys; import harness.worker; "
        "heavy = ('typer', 'rich', 'yaml', 'jinja2', 'pandas', 'ast_grep_py', 'pathspec'); "
        "sys.exit(', '.join(m for m in heavy if m in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
