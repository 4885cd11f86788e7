"""`fasttrack history` from the outside: tables, JSON, drawings, exit codes."""

import json
from pathlib import Path

import pytest

from harness.cli.main import _exit_code
from harness.domain.check import Status
from tests.history.many_bundles import RATIO, write_bundles


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Thirty bundles: slower from pull request 1018 on, and each second head asked twice."""
    made = tmp_path_factory.mktemp("history") / "bundles"
    write_bundles(
        made,
        30,
        lambda day: {
            "ratio": (1.5 if day < 18 else 1.3) + 0.002 * (day % 7), "pr": 1000 + day,
            "head": f"{day // 2:040x}", "status": Status.FAIL if day == 5 else Status.PASS,
        },
    )  # fmt: skip
    return str(made)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("harness.cli.console.out.width", 400)


def test_the_index_says_what_it_holds(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code(["history", "index", folder]) == 0
    assert (
        capsys.readouterr().out
        == "30 bundles: 30 read now, 0 gone, 0 further copies, 0 refused; 0 fault scores\n"
    )
    assert _exit_code(["history", "index", folder, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "schema_version": 1, "bundles": 30, "new": 0, "gone": 0, "copies": 0, "scores": 0, "refused": [],
        "refused_count": 0,
    }  # fmt: skip
    assert [p.suffix for p in Path("out/cache/history").iterdir()] == [".duckdb"]


def test_a_trend_is_a_row_with_its_course(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code(["history", "trend", folder, "--metric", "ratio"]) == 0
    printed = capsys.readouterr().out
    row = next(line for line in printed.splitlines() if RATIO in line)
    cells = [cell.strip() for cell in row.split("│")[1:-1]]
    assert f"{RATIO} · ratio, Example CPU, 2 cores" in cells[0]
    assert cells[1:5] == ["30", "1.50\u00d7", "1.31\u00d7", "-13.2%"]
    assert cells[5][0] in "▇█"
    assert cells[5][-1] in "▁▂"


def test_a_regression_names_its_pull_request(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    svg = tmp_path / "moves.svg"
    assert _exit_code(["history", "regressions", folder, "--svg", str(svg)]) == 0
    text = capsys.readouterr().out
    row = next(line for line in text.splitlines() if "regression" in line)
    assert [cell.strip() for cell in row.split("│")[1:-1]] == [
        "regression", RATIO, "ratio", "1.50\u00d7", "1.31\u00d7", "-13.2%", "2026-09-19", "#1018", "-",
    ]  # fmt: skip
    assert text.endswith("4 series, 0 of them too short to tell; at most 5 % of moves false\n")
    assert "#1018 -13.2%" in svg.read_text()


def test_json_is_one_document_and_nothing_else(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    commands = {"trend": "trends", "regressions": "moves", "flaky": "checks", "catch-rate": "rates"}
    for command, key in commands.items():
        assert _exit_code(["history", command, folder, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["schema_version"] == 1
        assert document[key]


def test_the_flaky_check_is_listed(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code(["history", "flaky", folder]) == 0
    text = capsys.readouterr().out
    row = next(line for line in text.splitlines() if RATIO in line)
    assert [cell.strip() for cell in row.split("│")[2:5]] == ["1", "15", "7%"]
    assert text.endswith("3 checks were run more than once about the same thing\n")


def test_catch_rates_are_listed_by_month(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code(["history", "catch-rate", folder, "--per", "month", "--check", "sweep/"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "sweep" in line]
    assert [[cell.strip() for cell in row.split("│")[1:-1]] for row in rows] == [
        ["2026-09-01", "sweep", "planted", "30", "30", "100.0%", "88.6% to 100.0%"]
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trend", "/nowhere"], "there is no such folder"),
        (["trend", "FOLDER", "--metric", "speed"], "no bundle has a metric 'speed'"),
        (["trend", "FOLDER", "--last", "0"], "--last 0 is out of range"),
        (["catch-rate", "FOLDER", "--per", "year"], "give day, week or month"),
        (["trend", "FOLDER", "--index", "FOLDER/b00000/manifest.json"], "an index's name ends in .duckdb"),
    ],
)
def test_bad_input_is_one_paragraph_and_exit_code_2(
    arguments: list[str], words: str, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _exit_code(["history", *(a.replace("FOLDER", folder) for a in arguments)]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.strip().splitlines()) == 1


def test_refused_bundles_are_counted_on_standard_error_and_named_by_index(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_bundles(tmp_path / "b", 2, lambda day: {})
    (tmp_path / "b" / "b00001" / "outcomes.jsonl").write_text("\x1b[2J")
    assert _exit_code(["history", "catch-rate", str(tmp_path / "b")]) == 0
    assert "1 bundles refused" in capsys.readouterr().err
    assert _exit_code(["history", "index", str(tmp_path / "b")]) == 0
    assert "refused b00001: outcomes.jsonl is not the file that the manifest lists" in capsys.readouterr().out
