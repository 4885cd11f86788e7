"""Published pairs of figures: which are fair, and why the others are not."""

from pathlib import Path

import pytest

from harness.domain.check import Status
from harness.domain.errors import InputError
from harness.stages.sweep.published import (
    at_acceptance,
    load_published,
    put_side_by_side,
    verify_steps_per_s,
)

K3 = load_published(Path("sweeps/published/kimi_k3_gb300.yaml"))


@pytest.mark.parametrize(
    ("one", "two", "status", "words"),
    [
        ("specialised_synthetic", "stock_synthetic", Status.PASS, "differ in the path alone"),
        (
            "specialised_synthetic", "stock_measured", Status.INVALID,
            "acceptance synthetic against measured; acceptance length 6.0 against None",
        ),
        ("agentx_16", "agentx_8", Status.INVALID, "gpus 16 against 8"),
        (
            "stock_measured", "stock_no_drafts", Status.INVALID,
            "drafts 7 against 0; acceptance measured against none",
        ),
    ],
)  # fmt: skip
def test_a_published_pair_is_comparable_only_where_the_path_alone_differs(
    one: str, two: str, status: Status, words: str
) -> None:
    found = put_side_by_side(K3.figure(one), K3.figure(two))
    assert (found.status, found.words) == (status, words)
    assert (found.ratio is None) is (status is Status.INVALID)


def test_the_fair_pair_is_1_73_times_as_fast() -> None:
    found = put_side_by_side(K3.figure("specialised_synthetic"), K3.figure("stock_synthetic"))
    assert found.ratio == pytest.approx(1.73, abs=0.005)


def test_842_tokens_at_a_synthetic_6_are_140_steps_and_would_be_530_tokens_at_the_golden_length() -> None:
    figure = K3.figure("specialised_synthetic")
    assert verify_steps_per_s(figure) == pytest.approx(140.3, abs=0.05)
    assert at_acceptance(figure, K3.golden_length(7)) == pytest.approx(530, abs=0.5)


def test_a_measured_figure_without_its_acceptance_length_gives_no_steps() -> None:
    assert verify_steps_per_s(K3.figure("stock_measured")) is None


def test_the_gain_of_the_published_table_falls_with_the_batch_and_is_larger_at_tp16() -> None:
    rows = K3.table.rows
    assert [row.batch for row in rows] == [1, 2, 4, 8, 16, 32, 64]
    assert all(row.tp16_speedup > row.tp8_speedup for row in rows)
    assert rows[0].tp8_speedup > rows[-1].tp8_speedup


def test_a_figure_without_its_gpus_is_refused(tmp_path: Path) -> None:
    text = Path("sweeps/published/kimi_k3_gb300.yaml").read_text().replace("gpus: 8, ", "")
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(InputError, match="no published figures can be read here"):
        load_published(tmp_path / "bad.yaml")
