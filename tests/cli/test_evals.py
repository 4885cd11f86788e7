"""`fasttrack evals`: what there is, and where the rows of a task come from."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.cli.evals import _asked_proof, _subjects
from harness.cli.main import app
from harness.documents import load_policy_set
from harness.domain.check import StageName
from harness.domain.errors import InputError
from harness.domain.policy import Proof
from harness.stages.evals.data import FOLDER_VARIABLE


def test_the_list_names_every_eval_with_its_scorer_and_its_data() -> None:
    done = CliRunner().invoke(app, ["evals", "list", "--json"])
    assert done.exit_code == 0
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert list(rows) == [
        "drift", "mrcr_canary", "chain_canary", "mrcr_2needle", "mrcr_4needle", "mrcr_8needle", "aime25",
        "temperature_sampling", "structured_output", "stop_handling", "full_context",
        "prefix_caching", "batch_mates",
    ]  # fmt: skip
    assert rows["aime25"]["scorer"] == "aime-integer/1 and lm-eval-aime25/0.4.13"
    assert rows["mrcr_8needle"]["scorer"] == "mrcr-official/1"
    assert rows["mrcr_8needle"]["revision"] == "f4c69fae7cf81f7ca26b9fee34b392a50f6b8a1d"
    assert len(rows["mrcr_8needle"]["files"]) == 2


def test_a_task_that_there_is_not_is_told_with_those_that_there_are() -> None:
    done = CliRunner().invoke(app, ["evals", "run", "--task", "mrcr_9needle"])
    assert isinstance(done.exception, InputError)
    assert "--task mrcr_9needle: there is no such eval" in str(done.exception)
    assert "mrcr_8needle" in str(done.exception)


def test_where_rows_come_from_is_part_of_what_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, "")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    assert _subjects(["aime25", "stop_handling"], None) == ("aime25", "stop_handling")
    assert _subjects(["aime25"], "hub") == ("aime25",)
    assert _subjects(["aime25", "drift"], "fixture") == ("aime25_fixture", "drift")
    assert _subjects(["mrcr", "drift"], str(rows)) == ("mrcr_local", "drift_local")
    assert os.environ[FOLDER_VARIABLE] == str(rows)
    assert _subjects(["mrcr"], str(tmp_path)) == ("mrcr",)
    assert os.environ[FOLDER_VARIABLE] == str(tmp_path)


@pytest.mark.parametrize(
    ("tasks", "data", "words"),
    [
        (["stop_handling"], "fixture", "name one of them with --task"),
        (["drift"], "hub", "name one of them with --task"),
        (["aime25"], "nowhere.parquet", "no such file or folder"),
    ],
)
def test_data_that_nobody_reads_or_finds_is_an_error(
    tasks: list[str], data: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, "")
    with pytest.raises(InputError, match=words):
        _subjects(tasks, data)


@pytest.mark.parametrize(
    ("subjects", "demanded"), [(("mrcr",), {"mrcr"}), (("structured_output_served",), set())]
)
def test_evals_of_ones_own_choice_are_asked_for_no_cell_of_others(
    subjects: tuple[str, ...], demanded: set[str]
) -> None:
    policy, _, _ = load_policy_set("fast_track")
    (proof,) = (p for p in policy.proofs if p.stage is StageName.EVALS)
    asked = _asked_proof(proof, subjects)
    assert asked.subjects == subjects
    assert {name for cell in asked.cells for name in cell.evals} == demanded
    assert Proof.from_json(asked.canonical()) == asked
