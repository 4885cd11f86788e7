"""Drawings are one well-formed SVG file that loads nothing and in which no text of a bundle acts."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from harness.history import Index, open_index
from harness.history.catches import catch_rates
from harness.history.flaky import FlakyChecks, find_flaky
from harness.history.moves import Moves, find_moves
from harness.history.plots import draw_catches, draw_flaky, draw_moves, draw_trends
from harness.history.series import Selection, trends
from tests.evidence.example_run import example_machine
from tests.history.many_bundles import write_bundles

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "</text><script>alert(1)</script>\x1b[2J\u202e&quot;"


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    folder = tmp_path_factory.mktemp("plots")
    machine = example_machine().model_copy(update={"cpu_model": HOSTILE})
    write_bundles(
        folder / "b",
        24,
        lambda day: {"ratio": (1.5 if day < 12 else 1.2) + 0.001 * (day % 5), "pr": day, "machine": machine},
    )
    with open_index(folder / "i.duckdb") as opened:
        opened.refresh(folder / "b")
        yield opened


def _texts(svg: str) -> list[str]:
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    allowed = {"svg", "title", "style", "g", "line", "circle", "polyline", "text"}
    assert {e.tag.removeprefix(SVG) for e in root.iter()} <= allowed
    names = {name for e in root.iter() for name in e.attrib}
    assert not any(n.startswith("on") or n.endswith("href") for n in names)
    return [e.text or "" for e in root.iter(f"{SVG}text")]


def test_each_move_is_marked_with_its_pull_request(index: Index) -> None:
    found = find_moves(index, Selection(metrics=("ratio",)))
    texts = _texts(draw_moves(found, trends(index, Selection(metrics=("ratio",)))))
    assert "#12 -19.9%" in texts
    assert {"2026-09-01", "2026-09-24"} <= set(texts)


def test_every_point_of_a_trend_is_drawn_and_hostile_names_are_only_read(index: Index) -> None:
    svg = draw_trends(trends(index, Selection(metrics=("ratio",))))
    texts = _texts(svg)
    assert sum(e.tag == f"{SVG}circle" for e in ElementTree.fromstring(svg).iter()) == 24
    assert any("</text><script>" in text for text in texts)
    assert "\u202e" not in svg
    assert "\x1b" not in svg


def test_catch_rates_are_drawn_from_none_to_all(index: Index) -> None:
    texts = _texts(draw_catches(catch_rates(index, Selection(), "week")))
    assert "sweep, planted: controls noticed" in texts
    assert {"0%", "50%", "100%"} <= set(texts)


def test_flaky_checks_are_rows_and_their_absence_is_said(index: Index) -> None:
    assert "no check gave two answers about one thing" in _texts(draw_flaky(find_flaky(index, Selection())))
    check = {
        "check": "sweep/a", "stage": "sweep", "repeats": 4, "pairs": 3, "disagreeing": 1, "share": 0.33,
        "low": 0.06, "high": 0.79, "statuses": (("PASS", 3), ("FAIL", 1)),
    }  # fmt: skip
    assert "sweep/a" in _texts(draw_flaky(FlakyChecks.model_validate({"repeated": 1, "checks": (check,)})))


def test_an_empty_answer_is_a_drawing_that_says_so() -> None:
    assert _texts(draw_moves(Moves(series=0, too_short=0, moves=()), ())) == ["nothing to show"]


def test_more_panels_than_fit_are_counted(index: Index) -> None:
    one = trends(index, Selection(metrics=("ratio",)))
    assert "and 6 more in the table" in _texts(draw_trends(one * 30))


def test_a_single_point_is_drawn(index: Index, tmp_path: Path) -> None:
    texts = _texts(draw_trends(trends(index, Selection(metrics=("ratio",), last=1))))
    assert "2026-09-24" in texts
