"""Finishing a run: what the manifest binds, and what never gets in."""

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from harness.domain.bundle import VOLATILE_FIELDS, BundleState, Environment, Manifest
from harness.domain.check import Samples, SampleTable
from harness.evidence.bundle import write_bundle
from harness.evidence.run_folder import open_run
from harness.evidence.strict_json import parse_record
from harness.evidence.verify import verify
from tests.evidence.example_judge import judge
from tests.evidence.example_run import example_plan, example_samples, only, write_example


def _manifest(folder: Path) -> Manifest:
    return parse_record((folder / "manifest.json").read_bytes(), Manifest)


def test_two_runs_with_the_same_plan_and_outcomes_differ_only_in_the_volatile_fields(tmp_path: Path) -> None:
    plan = only(example_plan(), lambda c: c.stage in ("audit", "kernels"))
    first = write_example(tmp_path / "first", plan)
    with open_run(tmp_path / "second", plan) as run:
        for check in reversed(plan.checks):  # recorded in another order
            samples = example_samples(check, plan.tier)
            run.record(judge(check, samples), samples)
        (run.logs / "compile.log").write_text("compiled 9 variants for 3 architectures\n")
        (run.ledger / "decode.jsonl").write_text('{"step":0,"path":"optimised","reason":"taken"}\n')
        environment = Environment(
            command=("fasttrack", "validate", "--policy", "smoke"), variables=(("OMP_NUM_THREADS", "2"),)
        )
        write_bundle(run, environment, created=datetime(2027, 1, 1, tzinfo=UTC))
    one, two = _manifest(first).model_dump(), _manifest(tmp_path / "second").model_dump()
    assert {name for name in one if one[name] != two[name]} == set(VOLATILE_FIELDS)


def test_the_manifest_lists_every_file_but_itself(tmp_path: Path) -> None:
    folder = write_example(tmp_path / "run", only(example_plan(), lambda c: c.id == "audit/attn_res/sm_90a"))
    assert [f.path for f in _manifest(folder).files] == [
        "environment.json",
        "ledger/decode.jsonl",
        "logs/compile.log",
        "outcomes.jsonl",
        "plan.json",
        "samples/audit~attn_res~sm_90a/kernels.parquet",
        "samples/audit~attn_res~sm_90a/samples.json",
    ]


def test_logs_get_names_that_bundles_hold_and_links_are_no_logs(tmp_path: Path) -> None:
    plan = only(example_plan(scene="passing"), lambda c: c.id == "audit/attn_res/sm_90a")
    with open_run(tmp_path / "run", plan) as run:
        samples = example_samples(plan.checks[0], plan.tier)
        run.record(judge(plan.checks[0], samples), samples)
        (run.logs / "a b\u00e9.log").write_text("odd name")
        (run.logs / "link.log").symlink_to("/etc/passwd")
        os.mkfifo(run.logs / "pipe")
        write_bundle(run, Environment())
    names = [f.path for f in _manifest(tmp_path / "run").files if f.path.startswith("logs/")]
    assert len(names) == 1
    assert names[0].endswith("-a_b_.log")
    assert verify(tmp_path / "run", judge).state is BundleState.VERIFIED


def test_files_of_the_running_process_do_not_travel(tmp_path: Path) -> None:
    plan = only(example_plan(scene="passing"), lambda c: c.id == "audit/attn_res/sm_90a")
    with open_run(tmp_path / "run", plan) as run:
        (run.scratch / "job.json").write_text("{}")
        write_bundle(run, Environment())
    assert not (tmp_path / "run" / ".scratch").exists()


def test_a_secret_in_any_variable_never_reaches_a_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "wint3r-is-c0ming"
    for name in ("MY_SETTING", "HF_TOKEN", "DATABASE_URL"):
        monkeypatch.setenv(name, secret)
    monkeypatch.setenv("HOME", "/home/arya")
    plan = only(example_plan(scene="passing"), lambda c: c.id == "audit/attn_res/sm_90a")
    with open_run(tmp_path / "run", plan) as run:
        row = ("attn_res", 96, 0, 1024, 900)
        columns = ("kernel", "registers", "spill_bytes", "shared_bytes", "instructions")
        tables = (
            SampleTable(name="kernels", columns=columns, rows=(row,)),
            SampleTable(name="texts", columns=("text",), rows=((f"failed at /home/arya/x with {secret}",),)),
        )
        samples = run.clean(Samples(check=plan.checks[0].id, tier=plan.tier, tables=tables, detail=secret))
        run.record(judge(plan.checks[0], samples), samples)
        (run.logs / "child.log").write_text(
            f"Authorization: Bearer {secret}\ncurl https://u:{secret}@host/\n"
        )
        (run.logs / f"{secret} x.log").write_bytes(b"\xff\xfe" + secret.encode())
        write_bundle(run, Environment(command=("fasttrack", "validate", "--token", secret)))
    folder = tmp_path / "run"
    names = "".join(str(p.relative_to(folder)) for p in folder.rglob("*"))
    content = b"".join(p.read_bytes() for p in folder.rglob("*") if p.is_file())
    assert secret not in names
    assert secret.encode() not in content
    assert b"/home/arya" not in content
    assert verify(folder, judge).state is BundleState.VERIFIED
