"""The packaged policies, zone maps and rules."""

import json
import shutil
import subprocess
from datetime import date
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.cli.policy import app
from harness.documents import load_policy_set, load_rules, load_zone_map
from harness.domain.check import StageName
from harness.domain.machine import Tier
from harness.domain.policy import Rule
from harness.domain.resources import data_folder
from harness.stages.isolation.detectors import DETECTORS
from harness.stages.isolation.examples import try_rule
from harness.stages.isolation.policy_check import check_policy
from harness.stages.isolation.zones import ZoneIndex

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("rule", load_rules(), ids=lambda rule: rule.id)
def test_every_rule_does_as_its_examples_say(rule: Rule) -> None:
    assert [trial for trial in try_rule(rule) if not trial.is_right] == []


def test_every_pattern_is_shown_to_work_by_an_example() -> None:
    zones, policy = load_zone_map("fasttrack"), load_policy_set("smoke").policy
    report = check_policy(policy, zones, load_rules(), None, date(2026, 1, 1))
    assert {rule.rule: rule.unexercised for rule in report.rules if rule.unexercised} == {}


def test_every_family_has_rules_and_every_detector_is_used() -> None:
    rules = load_rules()
    assert {rule.family for rule in rules} == {"reach", "opt_in", "blast_radius", "features", "hygiene"}
    assert {rule.detector for rule in rules} == set(DETECTORS)


def test_smoke_asks_every_stage_for_smoke_evidence_drift_and_the_canary() -> None:
    policy = load_policy_set("smoke").policy
    assert {p.stage: p.tier for p in policy.proofs} == dict.fromkeys(StageName, Tier.SMOKE)
    evals = policy.proof(StageName.EVALS)
    assert evals is not None
    assert evals.subjects == (
        "drift", "mrcr_canary", "chain_canary", "temperature_sampling", "stop_handling",
    )  # fmt: skip


def test_the_fast_track_wants_real_hardware_where_the_path_runs() -> None:
    policy = load_policy_set("fast_track").policy
    assert {p.stage.value: p.tier for p in policy.proofs} == {
        "isolation": Tier.SMOKE, "audit": Tier.SMOKE, "kernels": Tier.RANK, "coverage": Tier.NODE,
        "evals": Tier.CLAIM, "sweep": Tier.CLAIM,
    }  # fmt: skip
    assert policy.outside_pack_families == policy.rule_families


def test_every_file_of_this_repository_has_a_zone() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no git checkout: the list of files is missing")
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, check=True, text=True
    )
    paths = listed.stdout.split("\0")[:-1]
    zones = ZoneIndex(load_zone_map("fasttrack"), frozenset(paths))
    assert [path for path in paths if zones.zone_of(path) == "unknown"] == []


@pytest.mark.parametrize(
    ("path", "zone"),
    [
        ("vllm/models/kimi_k3/nvidia/kda.py", "model_code"),
        ("csrc/kimi_k3/attn_res_kernel.cu", "model_code"),
        ("benchmarks/kernels/benchmark_kimi_k3_attn_res.py", "model_code"),
        ("vllm/models/deepseek_v41/nvidia/model.py", "other_models"),
        ("vllm/models/common/ops/rope.py", "shared_core"),
        ("vllm/model_executor/models/registry.py", "shared_core"),
        ("vllm/model_executor/models/llama.py", "other_models"),
        ("vllm/v1/core/sched/scheduler.py", "shared_core"),
        ("vllm/v1/worker/gpu_model_runner.py", "shared_core"),
        ("csrc/activation_kernels.cu", "shared_core"),
        ("rust/src/chat/src/lib.rs", "shared_core"),
        ("rust/src/chat/Cargo.toml", "build"),
        ("tests/models/kimi_k3/test_kda.py", "tests"),
        ("vllm/models/kimi_k3/README.md", "docs"),
        ("requirements/cuda.txt", "build"),
        (".buildkite/pipeline.yaml", "ci"),
        ("benchmarks/benchmark_serving.py", "benchmarks"),
        ("AGENTS.md", "policy"),
        ("new_top_level/file.py", "unknown"),
    ],
)
def test_paths_of_vllms_tree_lie_where_a_maintainer_would_put_them(path: str, zone: str) -> None:
    assert ZoneIndex(load_zone_map("vllm"), frozenset()).zone_of(path) == zone


def copied(tmp_path: Path) -> Path:
    folder = tmp_path / "policies"
    shutil.copytree(data_folder("policies"), folder)
    return folder


def test_policy_check_answers_0_for_the_packaged_policies() -> None:
    result = CliRunner().invoke(app, ["check", "--policy", "smoke", "--json"])
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["policy"] == "smoke"
    assert len(report["rules"]) == len(load_rules())
    assert all(rule["problems"] == [] for rule in report["rules"])


def test_policy_check_answers_1_and_names_the_example_that_came_out_wrong(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    rule = folder / "rules/class_replaced.yaml"
    rule.write_text(rule.read_text().replace("__class__ = $CLASS", "__klass__ = $CLASS"))
    result = CliRunner().invoke(app, ["check", "--policy", str(folder / "smoke.yaml")])
    assert result.exit_code == 1
    assert "WRONG class_replaced: example 'the class of an object' must match at line 1" in result.stdout


def test_policy_check_names_a_pattern_that_no_example_exercises(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    rule = folder / "rules/class_replaced.yaml"
    rule.write_text(rule.read_text().replace("patterns:\n", 'patterns:\n  - "never($A)"\n', 1))
    result = CliRunner().invoke(app, ["check", "--policy", str(folder / "smoke.yaml")])
    assert result.exit_code == 0
    assert "no example exercises class_replaced: never($A)" in result.stdout


def test_policy_check_answers_1_for_an_unknown_detector(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    rule = folder / "rules/hidden_text.yaml"
    rule.write_text(rule.read_text().replace("detector: hidden_text", "detector: hiden_text"))
    result = CliRunner().invoke(app, ["check", "--policy", str(folder / "smoke.yaml")])
    assert result.exit_code == 1
    assert "detector 'hiden_text' does not exist" in result.stdout


def test_policy_check_answers_1_for_a_pattern_that_ast_grep_refuses(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    rule = folder / "rules/class_replaced.yaml"
    rule.write_text(
        rule.read_text().replace("patterns:\n", 'patterns:\n  - "rule: {kind: no_such_kind}"\n', 1)
    )
    result = CliRunner().invoke(app, ["check", "--policy", str(folder / "smoke.yaml")])
    assert result.exit_code == 1
    assert "ast-grep refuses" in result.stdout


def commit(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    for arguments in (["add", "-A"], ["commit", "-q", "-m", "m"]):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@a", *arguments], cwd=root, check=True)


def test_policy_replay_says_which_past_changes_an_edit_would_have_judged_otherwise(tmp_path: Path) -> None:
    root = tmp_path / "repo"
    root.mkdir()
    subprocess.run(["git", "init", "-q", "-b", "main", str(root)], check=True)
    commit(root, {"README.md": "text\n"})
    commit(root, {"kernels/k3_decode/a.py": "import socket\n"})
    commit(root, {"kernels/k3_decode/b.py": "x = 1\n"})
    folder = copied(tmp_path)
    (folder / "rules/outside_world.yaml").unlink()
    command = [
        "replay",
        "--repo",
        str(root),
        "--policy",
        str(folder / "smoke.yaml"),
        "--against",
        "smoke",
        "--json",
    ]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    changes = json.loads(result.stdout)["changes"]
    assert [change["files"] for change in changes] == [1, 1, 1]
    reach = [
        (dict(change["new"])["isolation/reach"], dict(change["old"])["isolation/reach"]) for change in changes
    ]
    assert reach == [("PASS", "PASS"), ("PASS", "FAIL"), ("PASS", "PASS")]
