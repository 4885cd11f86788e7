"""`sweep reconcile`, `null --read` and `replay` as people call them: what they print and how they exit."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.cli.main import app
from harness.domain.resources import data_folder

BUNDLES = data_folder("bundles")


def _called(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["sweep", *words])
    return done.exit_code, done.stdout


def test_a_committed_null_record_is_judged_again_without_a_run() -> None:
    code, said = _called("null", "--read", str(BUNDLES / "null" / "cpu_decode_step.json"))
    assert code == 0
    assert said.startswith("0 of 50 runs of stock against itself are false alarms (14 undecided), inside")


def test_bundles_whose_cells_name_no_parts_have_nothing_to_reconcile() -> None:
    code, said = _called("reconcile", str(BUNDLES / "examples" / "smoke.tar.zst"), "--json")
    assert (code, json.loads(said)) == (2, {"levels": []})


def test_whole_layers_of_a_committed_bundle_are_held_against_their_ops_as_sweeps_name_them_today() -> None:
    """The bundle times no ops beside its layers, so nothing explains what they save."""
    code, said = _called("reconcile", str(BUNDLES / "k3_decode" / "h200-layers-kda.tar.zst"), "--json")
    levels = [one for one in json.loads(said)["levels"] if "/kda_moe.whole/" in one["check"]]
    assert code == 1
    assert levels
    assert all(one["saved"][0] > 0 and not one["is_explained"] for one in levels)


@pytest.mark.parametrize("words", [("replay",), ("reconcile",)])
def test_a_command_without_what_it_needs_is_a_wrong_call(words: tuple[str, ...]) -> None:
    assert _called(*words)[0] == 2


def test_a_trace_that_is_none_is_told_before_any_server_starts(tmp_path: Path) -> None:
    settings = tmp_path / "server.yaml"
    settings.write_text(
        "schema_version: 1\nmodel: m\nserved_name: m\noptimised: {arguments: [--fast]}\nprogram: [/no/such]\n"
    )
    trace = tmp_path / "trace.jsonl"
    trace.write_text("{}\n")
    done = CliRunner().invoke(app, ["sweep", "replay", "--server", str(settings), "--trace", str(trace)])
    assert done.exit_code != 0
    assert "no such" not in str(done.exception)
    assert "Field required" in str(done.exception)
