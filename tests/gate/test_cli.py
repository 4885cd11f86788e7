"""`fasttrack gate`, `bundle` and `report` from the outside: exit codes and what is printed."""

import json
import shutil
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from harness.cli import bundle as bundle_commands
from harness.cli import gate as gate_command
from harness.cli import report as report_command
from harness.domain.bundle import Verification
from harness.domain.plan import Plan
from harness.domain.verdict import Verdict
from harness.evidence.verify import Replanned
from tests.evidence.example_judge import judge
from tests.evidence.example_run import BASE, HEAD, as_planned, example_plan, example_policy_set, write_example

RUN = CliRunner()


@pytest.fixture(autouse=True)
def _example_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example's judge and planner stand in for the stages'."""
    import harness.documents

    monkeypatch.setattr(gate_command, "judge_of", lambda folder: judge)
    monkeypatch.setattr(gate_command, "replan_of", lambda: as_planned)
    monkeypatch.setattr(harness.documents, "load_policy_set", example_policy_set)


@pytest.fixture(scope="module")
def passing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_example(tmp_path_factory.mktemp("cli") / "passing", scene="passing")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_example(tmp_path_factory.mktemp("cli") / "mixed")


def _call(app: typer.Typer, *words: object) -> tuple[int, str]:
    result = RUN.invoke(app, [str(w) for w in words], catch_exceptions=True)
    return result.exit_code, result.stdout


def test_the_gate_admits_rejects_or_cannot_judge(passing: Path, mixed: Path, tmp_path: Path) -> None:
    assert _call(gate_command.app, passing, "--policy", "smoke")[0] == 0
    assert _call(gate_command.app, mixed, "--policy", "smoke")[0] == 1
    broken = Path(shutil.copytree(passing, tmp_path / "broken"))
    (broken / "plan.json").write_text("{}")
    assert _call(gate_command.app, broken, "--policy", "smoke")[0] == 2


def test_the_gate_prints_the_table_the_waivers_and_the_commands(mixed: Path) -> None:
    _, text = _call(gate_command.app, mixed, "--policy", "smoke")
    assert "rejected under policy smoke" in text
    assert "waiver new_dependency on kernels/k3_decode/peers/**: gatekeeper" in text
    assert "--tier smoke --stage sweep" in text


def test_the_gates_json_is_the_verdict(mixed: Path) -> None:
    code, text = _call(gate_command.app, mixed, "--policy", "smoke", "--json")
    verdict = Verdict.model_validate_json(text)
    assert (code, verdict.exit_code, verdict.head) == (1, 1, HEAD)


def test_the_smallest_rerun_is_printed_as_commands(mixed: Path) -> None:
    _, text = _call(gate_command.app, mixed, "--policy", "smoke", "--plan")
    first, *lines = text.splitlines()
    assert first == f"git worktree add --detach ../judged-aaaaaaaaaaaa {HEAD}  # once, in a clone"
    assert all(f" --repo ../judged-aaaaaaaaaaaa --base {BASE} --head {HEAD} " in line for line in lines)
    commands = [line.partition("  # ")[0].partition(" --tier smoke ")[2] for line in lines]
    assert commands == [
        "--stage isolation --only zones",
        "--stage audit --only kda_step",
        "--stage kernels --only kernels/router/cpu.tp1.dcp1.b64.c512.d0.bf16.decode "
        "--only kernels/experts/cpu.tp1.dcp1.b64.c512.d0.bf16.decode",
        "--stage coverage --only attn_res",
        "--stage evals --only mrcr_canary",
        "--stage sweep --only sweep/decode/cpu.tp1.dcp1.b64.c512.d0.bf16.decode",
    ]


def test_without_a_policy_the_fast_track_is_asked_for(passing: Path) -> None:
    code, text = _call(gate_command.app, passing)
    assert code == 1
    assert "another policy than 'fast_track'" in text


def test_a_row_without_evidence_says_nothing_well_and_the_table_fits_80_columns(mixed: Path) -> None:
    _, text = _call(gate_command.app, mixed, "--policy", "fast_track")
    rows = [line for line in text.splitlines() if line.startswith("│kernels sm_90a")]
    assert [cell.strip() for cell in rows[0].strip("│").split("│")] == [
        "kernels sm_90a", "any at rank", "nothing", "-", "-", "-", "no",
    ]  # fmt: skip
    assert max(len(line) for line in text.splitlines() if line.startswith(("│", "┃", "┏", "└"))) <= 80


def test_a_bundle_is_worded_alike_by_the_gate_its_json_and_the_report(passing: Path, tmp_path: Path) -> None:
    _, text = _call(gate_command.app, passing, "--policy", "smoke")
    _, raw = _call(gate_command.app, passing, "--policy", "smoke", "--json")
    words = Verdict.model_validate_json(raw).bundles[0].words()
    assert (
        words == "passing: of bbbbbbbbbbbb..aaaaaaaaaaaa, verified, unsigned, made with harness 111111111111"
    )
    assert f"bundle {words}\n" in text
    _call(report_command.app, passing, "--html", tmp_path / "r.html", "--md", tmp_path / "r.md")
    assert words in (tmp_path / "r.html").read_text()
    assert f"- bundle `{words}`" in (tmp_path / "r.md").read_text()


def test_a_change_that_starts_elsewhere_than_it_should_is_refused(passing: Path) -> None:
    code, text = _call(gate_command.app, passing, "--policy", "smoke", "--base", "c" * 40)
    assert code == 1
    assert "its change starts at bbbbbbbbbbbb and the one that is judged at cccccccccccc" in text
    assert _call(gate_command.app, passing, "--policy", "smoke", "--base", BASE)[0] == 0
    result = RUN.invoke(gate_command.app, [str(passing), "--base", "main"])
    assert "--base 'main' is no full commit id" in str(result.exception)


def test_a_short_head_is_refused_in_words(passing: Path) -> None:
    result = RUN.invoke(gate_command.app, [str(passing), "--head", "abc123"])
    assert "give all 40 hex digits" in str(result.exception)


def test_verify_prints_each_step_and_exits_with_two_for_a_broken_bundle(
    passing: Path, tmp_path: Path
) -> None:
    code, text = _call(bundle_commands.app, "verify", passing)
    assert code == 0
    assert "10 rederivation  ok" in text
    broken = Path(shutil.copytree(passing, tmp_path / "broken"))
    (broken / "logs" / "compile.log").write_text("edited")
    code, text = _call(bundle_commands.app, "verify", broken)
    assert code == 2
    assert "logs/compile.log: has" in text
    code, text = _call(bundle_commands.app, "verify", broken, "--json")
    assert Verification.model_validate_json(text).state == "broken"


def test_verify_does_not_say_ok_where_another_harness_plans_otherwise(
    passing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fewer(plan: Plan) -> Replanned:
        return Replanned("9" * 64, plan.pack_digest, plan.checks[1:])

    monkeypatch.setattr(gate_command, "replan_of", lambda: fewer)
    code, text = _call(bundle_commands.app, "verify", passing)
    assert code == 2
    assert " 6 binding       ok" in text
    assert " 7 planning      differs" in text
    assert "isolation/zones/change: is in the plan, but claim and policy do not call for it" in text
    assert "unconfirmed: its files hold together, but it was made with harness 111111111111" in text


def test_a_packed_bundle_is_verified_gated_and_shown_like_its_folder(passing: Path, tmp_path: Path) -> None:
    archive = tmp_path / "b.tar.zst"
    assert _call(bundle_commands.app, "pack", passing, "--out", archive)[0] == 0
    assert _call(bundle_commands.app, "verify", archive)[0] == 0
    assert _call(gate_command.app, archive, "--policy", "smoke")[0] == 0
    code, text = _call(bundle_commands.app, "show", archive)
    assert code == 0
    assert "43 PASS" in text
    assert _call(bundle_commands.app, "unpack", archive, "--out", tmp_path / "out")[0] == 0
    assert (tmp_path / "out" / "manifest.json").read_bytes() == (passing / "manifest.json").read_bytes()


def test_one_check_is_shown_with_its_samples(mixed: Path) -> None:
    code, text = _call(bundle_commands.app, "show", mixed, "--check", "audit/kda_step/sm_100a")
    shown = json.loads(text)
    assert code == 0
    assert shown["outcome"]["status"] == "FAIL"
    assert shown["samples"]["tables"][0]["rows"][0][2] == 48


def test_diff_says_alike_different_or_not_comparable(passing: Path, mixed: Path, tmp_path: Path) -> None:
    assert _call(bundle_commands.app, "diff", passing, passing)[0] == 0
    code, text = _call(bundle_commands.app, "diff", passing, mixed)
    assert code == 1
    assert text.index("conditions:") < text.index("results:")
    other = example_plan(scene="passing", checks=())
    assert _call(bundle_commands.app, "diff", passing, write_example(tmp_path / "other", other))[0] == 2


def test_a_report_is_written_where_it_was_asked_for(mixed: Path, tmp_path: Path) -> None:
    page, comment = tmp_path / "r.html", tmp_path / "r.md"
    assert (
        _call(report_command.app, mixed, "--html", page, "--md", comment, "--ai-use", "wrote the kernel")[0]
        == 0
    )
    assert "<title>Rejected" in page.read_text()
    assert "- AI use: `wrote the kernel`" in comment.read_text()


def test_a_report_is_printed_in_the_form_that_was_asked_for(mixed: Path, tmp_path: Path) -> None:
    code, text = _call(report_command.app, mixed, "--format", "sarif", "--junit", tmp_path / "r.xml")
    assert code == 0
    assert json.loads(text)["runs"][0]["tool"]["driver"]["name"] == "fasttrack"
    code, text = _call(report_command.app, mixed, "--format", "junit")
    assert code == 0
    assert text.strip() == (tmp_path / "r.xml").read_text().strip()
    assert text.startswith('<?xml version="1.0"')
    code, text = _call(report_command.app, mixed)
    assert text.startswith("<!-- fasttrack:report -->") or "Rejected" in text


def test_a_broken_bundles_outcomes_are_not_shown_to_other_tools(passing: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(passing, tmp_path / "broken"))
    (broken / "logs" / "compile.log").write_text("edited")
    code, text = _call(report_command.app, broken, "--format", "junit")
    assert code == 0
    assert '<testsuites name="fasttrack k3_decode" tests="1" failures="0" errors="1" skipped="0">' in text
    assert "logs/compile.log" in text
