"""Pareto fronts, heat maps and their tones."""

import re

import pytest

from harness.report.heat_map import heat_map, tone_of
from harness.report.scatter import Axes, Cloud, Mark, front, scatter_plot
from harness.report.svg import log_ticks


def test_a_front_keeps_what_no_other_point_beats_both_ways() -> None:
    marks = [Mark(10, 500, "b64"), Mark(30, 200, "b8"), Mark(25, 180, "b4"), Mark(50, 50, "b1")]
    assert [mark.name for mark in front(marks)] == ["b64", "b8", "b1"]


@pytest.mark.parametrize(
    ("value", "tone"),
    [(1.0, "even"), (1.019, "even"), (1.1, "gain-1"), (2.0, "gain-4"), (9.0, "gain-5"), (0.5, "loss-4")],
)
def test_a_field_is_coloured_by_how_far_it_is_from_even(value: float, tone: str) -> None:
    assert tone_of(value) == tone


def test_a_heat_map_says_every_value_and_leaves_others_empty() -> None:
    svg = str(heat_map(["<b>"], ["1", "8"], {("<b>", "1"): 1.5}, ("gain", "batch")))
    assert re.findall(r'class="value mid"[^>]*>([^<]*)', svg) == ["1.50"]
    assert 'class="field empty"' in svg
    assert "<b>" not in svg


def test_ticks_are_round_and_enclose_what_is_drawn() -> None:
    assert log_ticks(61.0, 430.0) == [50.0, 100.0, 200.0, 500.0]


def test_a_scatter_plot_draws_the_ceiling_above_every_point() -> None:
    cloud = Cloud("stock", (Mark(100.0, 2000.0, "b1"),))
    svg = str(scatter_plot([cloud], Axes("roof", "MB", "GB/s", 4400.0, "ceiling")))
    ceiling = float(re.findall(r'class="baseline"[^>]*y1="([\d.]+)"', svg)[0])
    (dot,) = re.findall(r'<circle class="dot s0" cx="[\d.]+" cy="([\d.]+)" r="4.5"', svg)
    assert ceiling < float(dot)
