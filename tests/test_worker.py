"""Worker and collect: samples of a bare machine are bound to plan and code, and judged elsewhere."""

import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness import collect, worker
from harness.collect import collect_samples
from harness.domain.check import Check, Outcome, Samples, StageName, Status
from harness.domain.errors import EvidenceError
from harness.domain.plan import Plan
from harness.engines.packs import harness_digest, source_digest
from harness.evidence.run_folder import open_run
from harness.measure.machine import read_machine
from harness.planner import CodeDigests, make_plan
from harness.worker import Job, lay_out, read_samples, sample_check, serve_command, work
from tests.fakes.pack import FakePack
from tests.fakes.requests import plan_request, stage_context


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
    """One check on the fake pack, planned for this machine."""
    from dataclasses import replace

    pack = FakePack()
    monkeypatch.setattr(worker, "load_pack", lambda name: pack)
    monkeypatch.setattr(collect, "load_pack", lambda name: pack)
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


def test_a_repository_is_told_to_the_child_where_there_is_one(tmp_path: Path) -> None:
    with_one, without = lay_out(b"{}", tmp_path / "a", tmp_path / "b" / ".."), lay_out(b"{}", tmp_path / "c")
    assert Job.from_json(with_one.read_bytes()).repo == str(tmp_path)
    assert Job.from_json(without.read_bytes()).repo is None


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


def test_an_error_of_a_pack_that_lies_behind_a_link_is_the_candidates(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    space: dict[str, Any] = {}
    exec(
        compile("def sample(*_):\n    raise KeyError('x')\n", str(tmp_path / "link" / "a.py"), "exec"), space
    )
    monkeypatch.setattr(worker, "stage_of", lambda _stage: SimpleNamespace(sample=space["sample"]))
    context = stage_context(FakePack(), tmp_path)
    monkeypatch.setattr(FakePack, "root", tmp_path / "link")
    check = Check(id="sweep/x", stage=StageName.SWEEP, proves="it holds", cost_s=1.0)
    samples = sample_check(check, context)
    assert (samples.ended, samples.detail) == ("crashed", "the candidate raised KeyError: 'x'")


def _with_rows(out: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Edit the samples of a file as somebody with an editor could."""
    lines = gzip.decompress(out.read_bytes()).splitlines()
    samples = [json.loads(line) for line in lines[1:]]
    for one in samples:
        edit(one)
    body = b"\n".join([lines[0], *(json.dumps(one).encode() for one in samples)]) + b"\n"
    out.write_bytes(gzip.compress(body))


def _drop_column(samples: dict[str, Any]) -> None:
    for table in samples["tables"]:
        table["columns"] = table["columns"][:-1]
        table["rows"] = [row[:-1] for row in table["rows"]]


def _empty_cells(samples: dict[str, Any]) -> None:
    for table in samples["tables"]:
        table["rows"] = [[None] * len(row) for row in table["rows"]]


@pytest.mark.parametrize("edit", [_drop_column, _empty_cells])
def test_samples_that_were_edited_are_invalid_and_never_a_crash(
    plan: Plan, tmp_path: Path, edit: Callable[[dict[str, Any]], None]
) -> None:
    out = tmp_path / "samples.jsonl.gz"
    work(plan, out, tmp_path / "scratch", lambda _: None)
    _with_rows(out, edit)
    with open_run(tmp_path / "run", plan) as run:
        collect_samples(plan, out, run)
        (outcome,) = run.outcomes()
    assert outcome.status is Status.INVALID
    assert outcome.next_step.startswith("sample this check again")


@pytest.mark.parametrize(
    ("edit", "word"),
    [
        (lambda s: s["tables"][0]["rows"][0].__setitem__(1, 10**400), "not a complete sample file"),
        (lambda s: s.__setitem__("tier", "claim"), "say tier claim"),
    ],
)
def test_samples_that_no_bundle_can_hold_are_refused_in_words(
    plan: Plan, tmp_path: Path, edit: Callable[[dict[str, Any]], None], word: str
) -> None:
    out = tmp_path / "samples.jsonl.gz"
    work(plan, out, tmp_path / "scratch", lambda _: None)
    _with_rows(out, edit)
    with open_run(tmp_path / "run", plan) as run, pytest.raises(EvidenceError, match=word):
        collect_samples(plan, out, run)


def test_a_judge_that_breaks_gives_no_outcome_and_says_what_to_do(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from harness.stages.coverage import judging

    def broken(check: Check, samples: Samples) -> Outcome:
        raise ZeroDivisionError("division by zero")

    out = tmp_path / "samples.jsonl.gz"
    work(plan, out, tmp_path / "scratch", lambda _: None)
    monkeypatch.setattr(judging, "_judge_poison", broken)
    with open_run(tmp_path / "run", plan) as run:
        with pytest.raises(EvidenceError, match=r"cannot be judged \(ZeroDivisionError: division by zero\)"):
            collect_samples(plan, out, run)
        assert run.outcomes() == ()


@pytest.mark.parametrize("name", ["harness_digest", "pack_digest"])
def test_a_plan_of_other_code_is_not_collected_though_its_samples_fit_it(
    plan: Plan, tmp_path: Path, name: str
) -> None:
    other = plan.model_copy(update={name: "c" * 64})
    out = tmp_path / "samples.jsonl.gz"
    work(plan, out, tmp_path / "scratch", lambda _: None)
    lines = gzip.decompress(out.read_bytes()).splitlines(keepends=True)
    header = json.loads(lines[0]) | {"plan_digest": other.digest(), name: "c" * 64}
    out.write_bytes(gzip.compress(b"".join([json.dumps(header).encode() + b"\n", *lines[1:]])))
    with (
        open_run(tmp_path / "run", other) as run,
        pytest.raises(EvidenceError, match="the plan was made with"),
    ):
        collect_samples(other, out, run)


def test_a_harness_in_the_current_folder_does_not_judge_in_our_place(tmp_path: Path) -> None:
    shadow = tmp_path / "harness"
    shadow.mkdir()
    (shadow / "__init__.py").write_text("raise SystemExit('the wrong harness')", encoding="utf-8")
    command = serve_command(tmp_path / "no-such-job.json")
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert "the wrong harness" not in ran.stderr
    assert "no-such-job.json" in ran.stderr


def test_a_node_is_the_plans_machine_only_with_equal_code_hardware_and_libraries(plan: Plan) -> None:
    more_memory = plan.machine.model_copy(update={"memory_bytes": 1})
    assert worker.node_objections(plan.model_copy(update={"machine": more_memory}).canonical()) == ()
    machine = plan.machine.model_copy(update={"driver": "580.1"})
    other = plan.model_copy(update={"machine": machine, "harness_digest": "f" * 64})
    harness, driver = worker.node_objections(other.canonical())
    assert harness.endswith("'ffffffffffff' planned")
    assert driver == f"driver: {plan.machine.driver!r} here, '580.1' planned"


def test_a_child_whose_parent_is_gone_ends_with_all_that_it_started(tmp_path: Path) -> None:
    script = tmp_path / "child.py"
    script.write_text(
        "import threading, time\nfrom harness.worker import _end_with_parent\n"
        "threading.Thread(target=_end_with_parent, daemon=True).start()\n"
        "print('up', flush=True)\ntime.sleep(60)\n"
    )
    child = subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.readline() == b"up\n"
    child.stdin.close()
    assert child.wait(timeout=30) == -signal.SIGKILL
    child.stdout.close()
