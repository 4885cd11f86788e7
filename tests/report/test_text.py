"""Values and foreign text as words."""

import pytest

from harness.domain.check import Figure
from harness.report.text import anchor, figure_text, label, number, plain, source_link


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("ratio", 1.5, "1.50\u00d7"),
        ("stock_us", 9930, "9,930 µs"),
        ("path_share", 0.951, "95.1%"),
        ("noise_floor", 0.02, "2.0%"),
        ("shared_bytes", 96256, "96,256 B"),
        ("optimised_relative_l2", 0.00342, "3.42e-3"),
        ("poison_kl", 1.1e-9, "1.10e-9"),
        ("verify_steps_per_s", 92.37, "92.4/s"),
        ("registers", 168, "168"),
        ("spill_bytes", 0, "0 B"),
        ("score_difference", -0.03125, "-0.031"),
        ("duration_s", 2.5, "2.5 s"),
    ],
)
def test_a_number_has_the_unit_of_its_name(name: str, value: float, text: str) -> None:
    assert number(name, value) == text


def test_a_figure_that_was_not_measured_is_no_zero() -> None:
    assert figure_text(Figure(name="ratio", value=None, missing="no GPU")) == "not measured"
    assert (
        figure_text(Figure(name="ratio", value=2, low=1.5, high=2.5)) == "2.00\u00d7 [1.50\u00d7, 2.50\u00d7]"
    )


def test_names_become_words_without_their_unit() -> None:
    assert label("optimised_relative_l2") == "optimised relative L2"
    assert label("latency_us") == "latency"
    assert label("worst_kl_to_stock") == "worst KL to stock"


def test_plain_text_has_nothing_that_acts() -> None:
    assert plain("a\nb\tc") == "a b c"
    assert plain("x\u202ey\x00\u200bz\ufeff") == "x\\u202ey\\u0000\\u200bz\\ufeff"
    assert plain("abcdef", 3) == "abc…"


def test_links_are_made_for_github_alone() -> None:
    sha = "a" * 40
    assert (
        source_link("https://github.com/o/r.git", sha, "a b/c.py", 7)
        == f"https://github.com/o/r/blob/{sha}/a%20b/c.py#L7"
    )
    assert (
        source_link("https://github.com/o/r", sha, 'x"><script>')
        == f"https://github.com/o/r/blob/{sha}/x%22%3E%3Cscript%3E"
    )
    for elsewhere in (
        "https://evil.example/o/r",
        "https://github.com.evil/o/r",
        "https://github.com/o/r/x",
        "folder",
        "javascript:x",
    ):
        assert source_link(elsewhere, sha, "a.py") is None


def test_anchors_hold_no_character_that_ends_an_attribute() -> None:
    assert anchor("kernels/kda_step/cpu.tp1") == "check-kernels-kda_step-cpu.tp1"
