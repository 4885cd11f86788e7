"""The composite action and the workflow examples: valid, pinned, closed to injection, right in codes."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
ACTION = ROOT / "action.yml"
WORKFLOWS = sorted((ROOT / "docs" / "workflows").glob("*.yml"))
STAND_IN = r"""#!/bin/bash
printf '%s\037' "$@" >> "$CALLS"; echo >> "$CALLS"
code="CODE_${1^^}"
while [ $# -gt 1 ]; do
  case "$1" in --html|--md|--sarif|--junit) echo "$1" > "$2" ;; esac
  shift
done
exit "${!code:-0}"
"""


def _load(path: Path) -> dict[str, Any]:
    # BaseLoader keeps `on` a word and not a truth value.
    content: dict[str, Any] = yaml.load(path.read_text(), yaml.BaseLoader)
    return content


def _steps(path: Path) -> list[dict[str, Any]]:
    content = _load(path)
    if "runs" in content:
        return list(content["runs"]["steps"])
    return [step for job in content["jobs"].values() for step in job["steps"]]


def _check(schema: str, path: Path) -> subprocess.CompletedProcess[str]:
    if find_spec("check_jsonschema") is None:
        pytest.skip("check-jsonschema is not installed")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("schema", "path"), [("github-actions", ACTION), *(("github-workflows", w) for w in WORKFLOWS)]
)
def test_the_file_is_valid_by_the_published_schema(schema: str, path: Path) -> None:
    found = _check(schema, path)
    assert found.returncode == 0, found.stdout


def test_the_schema_would_find_a_step_that_does_nothing(tmp_path: Path) -> None:
    bad = tmp_path / "action.yml"
    bad.write_text("name: x\ndescription: x\nruns:\n  using: composite\n  steps:\n    - nope: 1\n")
    assert _check("github-actions", bad).returncode == 1


@pytest.mark.parametrize("path", [ACTION, *WORKFLOWS], ids=lambda p: p.name)
def test_every_foreign_action_is_named_by_commit_and_version(path: Path) -> None:
    uses = re.findall(r"uses: (\S+)(.*)", path.read_text())
    assert uses
    for name, comment in uses:
        if name != "./":
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", name), name
            assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), name


@pytest.mark.parametrize("path", [ACTION, *WORKFLOWS], ids=lambda p: p.name)
def test_no_script_holds_an_expression(path: Path) -> None:
    """Text of an expression becomes text of the script: a branch name would be a command."""
    assert not [s["name"] for s in _steps(path) if "${{" in s.get("run", "")]


@pytest.mark.parametrize("path", [ACTION, *WORKFLOWS], ids=lambda p: p.name)
def test_every_script_is_sound_bash(path: Path) -> None:
    for step in _steps(path):
        if "run" in step:
            done = subprocess.run(
                ["bash", "-n"], input=step["run"], text=True, capture_output=True, check=False
            )
            assert (done.returncode, done.stderr) == (0, ""), step["name"]


def test_every_input_is_declared_and_used() -> None:
    used = set(re.findall(r"inputs\.([\w-]+)", ACTION.read_text()))
    assert used == set(_load(ACTION)["inputs"])


def test_the_workflows_give_only_inputs_that_the_action_has() -> None:
    known = set(_load(ACTION)["inputs"])
    given = [s["with"] for w in WORKFLOWS for s in _steps(w) if s.get("uses") == "./"]
    assert len(given) == 2
    assert all(set(g) <= known for g in given)


def test_the_workflow_that_runs_foreign_code_cannot_write_and_the_other_runs_none() -> None:
    folder = ROOT / "docs" / "workflows"
    validate, publish = (_load(folder / f"{name}.yml") for name in ("fasttrack", "fasttrack-publish"))
    assert validate["permissions"] == {"contents": "read"}
    assert "secrets." not in (folder / "fasttrack.yml").read_text()
    assert publish["on"] == {"workflow_run": {"workflows": ["fasttrack"], "types": ["completed"]}}
    checkouts = [s for j in publish["jobs"].values() for s in j["steps"] if "checkout" in s.get("uses", "")]
    assert [s["with"] for s in checkouts] == [{"persist-credentials": "false"}]


class Runner:
    """Runs the action's scripts as a runner would, with a stand-in for `fasttrack`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.outputs: dict[str, dict[str, str]] = {}
        tool = folder / "bin" / "fasttrack"
        tool.parent.mkdir()
        tool.write_text(STAND_IN)
        tool.chmod(0o755)

    def run(self, inputs: dict[str, str], **codes: int) -> int:
        """Exit code of the action; `codes` are those of fasttrack's commands."""
        values = {n: i.get("default", "") for n, i in _load(ACTION)["inputs"].items()} | inputs
        for step in _steps(ACTION):
            if "run" not in step or step["name"] == "Install fasttrack" or not self._is_wanted(step, values):
                continue
            if code := self._run_step(step, values, codes):
                return code
        return 0

    def calls(self) -> list[list[str]]:
        """Command lines that fasttrack was given."""
        lines = (self.folder / "calls").read_text().split("\n")[:-1]
        return [line.split("\x1f")[:-1] for line in lines]

    def _is_wanted(self, step: dict[str, Any], values: dict[str, str]) -> bool:
        conditions = {
            "inputs.bundle == ''": values["bundle"] == "",
            "inputs.publish == 'true'": values["publish"] == "true",
        }
        return conditions[step["if"]] if "if" in step else True

    def _run_step(self, step: dict[str, Any], values: dict[str, str], codes: dict[str, int]) -> int:
        files = {n: self.folder / n.lower() for n in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
        files["GITHUB_OUTPUT"].write_text("")
        environment = {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "CALLS": str(self.folder / "calls"),
            **{f"CODE_{name.upper()}": str(code) for name, code in codes.items()},
            **{name: str(path) for name, path in files.items()},
            **{name: self._value(text, values) for name, text in step["env"].items()},
        }
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=self.folder, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        lines = files["GITHUB_OUTPUT"].read_text().splitlines()
        self.outputs[step.get("id", "")] = dict(line.split("=", 1) for line in lines)
        return done.returncode

    def _value(self, text: str, values: dict[str, str]) -> str:
        match = re.fullmatch(r"\$\{\{ (?:inputs\.([\w-]+)|steps\.(\w+)\.outputs\.([\w-]+)) \}\}", text)
        assert match, text
        return values[match[1]] if match[1] else self.outputs.get(match[2], {}).get(match[3], "")


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


@pytest.mark.parametrize(
    ("fail_on", "validate", "gate", "expected"),
    [
        ("gate", 0, 0, 0), ("gate", 0, 1, 1), ("gate", 1, 1, 1), ("gate", 0, 2, 2), ("validate", 0, 1, 0),
        ("validate", 1, 1, 1), ("never", 1, 2, 0), ("luck", 0, 0, 2),
    ],
)  # fmt: skip
def test_the_action_fails_when_it_was_asked_to(
    fail_on: str, validate: int, gate: int, expected: int, runner: Runner
) -> None:
    assert runner.run({"fail-on": fail_on}, validate=validate, gate=gate) == expected


@pytest.mark.parametrize(
    ("code", "verdict"), [(0, "admitted"), (1, "rejected"), (2, "could_not_judge"), (130, "could_not_judge")]
)
def test_the_verdict_follows_from_the_gate_s_exit_code(code: int, verdict: str, runner: Runner) -> None:
    runner.run({}, gate=code)
    assert runner.outputs["gate"] == {
        "bundle": "fasttrack-out/bundle", "exit-code": str(code), "verdict": verdict,
    }  # fmt: skip


def test_a_run_that_could_not_judge_ends_there(runner: Runner) -> None:
    assert runner.run({"fail-on": "never"}, validate=2) == 2
    assert [call[0] for call in runner.calls()] == ["validate"]


def test_a_bundle_that_is_given_is_gated_for_its_head_and_not_made(runner: Runner) -> None:
    assert runner.run({"bundle": "some where/b", "head": "a" * 40, "policy": "smoke"}) == 0
    calls = runner.calls()
    assert [call[0] for call in calls] == ["gate", "gate", "report"]
    assert calls[0] == ["gate", "some where/b", "--policy", "smoke", "--head", "a" * 40]
    assert (runner.folder / "github_step_summary").read_text() == "--md\n"


def test_a_bundle_that_was_made_here_is_gated_with_the_checkout_and_the_start_of_the_change(
    runner: Runner,
) -> None:
    assert runner.run({"repo": "the clone", "base": "main", "policy": "smoke"}) == 0
    gated = next(call for call in runner.calls() if call[0] == "gate")
    assert gated == [
        "gate", "fasttrack-out/bundle", "--policy", "smoke", "--repo", "the clone", "--base", "main",
    ]  # fmt: skip


def test_publishing_names_the_pull_request_and_the_account(runner: Runner) -> None:
    assert runner.run({"publish": "true", "pr": "o/r#5", "token": "t0ken"}, gate=1) == 1
    assert runner.calls()[-1] == [
        "publish", "fasttrack-out/bundle", "--pr", "o/r#5", "--as", "github-actions[bot]", "--policy",
        "fast_track",
    ]  # fmt: skip


def test_an_input_that_looks_like_a_command_stays_one_argument(runner: Runner) -> None:
    hostile = "$(touch pwned); `touch pwned` \"' | touch pwned"
    assert runner.run({"head": hostile, "policy": hostile, "repo": hostile}) == 0
    assert not (runner.folder / "pwned").exists()
    assert runner.calls()[0][1:8:2] == ["--repo", "--base", "--head", "--pack"]
    assert runner.calls()[0][6] == hostile


def test_the_options_that_the_action_uses_exist() -> None:
    import typer

    from harness.cli import gate, publish, report, validate

    scripts = " ".join(s["run"] for s in _steps(ACTION) if "run" in s)
    for name, module in (("validate", validate), ("gate", gate), ("report", report), ("publish", publish)):
        command: Any = typer.main.get_command(module.app)
        known = {option for parameter in command.params for option in parameter.opts}
        lines = re.findall(rf"fasttrack {name} (?:.*\\\n)*.*", scripts)
        used = set(re.findall(r"(?<= )--[a-z-]+", " ".join(lines)))
        assert used <= known, name
    assert "--head" in {option for p in typer.main.get_command(gate.app).params for option in p.opts}
