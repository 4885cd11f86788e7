"""What counts as a detection, and three rows of the published table measured again."""

from collections.abc import Mapping

import numpy as np
import pytest
from k3_decode.canary.export import read_safetensors
from k3_decode.canary.faults import FAULTS
from k3_decode.canary.replay import BENIGN, Model, Path, load_model
from k3_decode.canary.sensitivity import (
    FAULTY_ROUNDINGS,
    RESULTS_FOLDER,
    SETS,
    Measured,
    detected,
    measure,
    prepare,
    read_results,
    thresholds,
)
from k3_decode.canary.table import (
    ACCURACY_FILE,
    read_accuracy,
    render,
    render_accuracy,
    render_thresholds,
    smallest_detected,
)
from k3_decode.session import CANARY_FILE
from k3_decode.shapes import CANARY

REPEATED = (("own_row", 1.0), ("conv_seam", 1.0), ("missing_source", 0.3))
BY_NAME = {fault.name: fault for fault in FAULTS}


def _arm(arm: str, exact: tuple[bool, ...], drift: float, peak: float, shift: float = 0.0) -> Measured:
    n = len(exact)
    return Measured("set", arm, exact, (drift,) * n, (peak,) * n, (shift,) * n, 0.5)


def _results(*arms: Measured) -> Mapping[tuple[str, str], Measured]:
    stock = _arm("stock", (True, True, True, True), 0.0, 0.0)
    benign = [_arm(f"benign/{name}", (True, True, True, True), 0.01, 0.1, -0.001) for name in BENIGN]
    return {(m.set, m.arm): m for m in (stock, *benign, *arms)}


def test_a_figure_no_larger_than_what_right_kernels_give_is_no_detection() -> None:
    results = _results(_arm("x/1", (True, True, True, True), 0.01, 0.1, 0.001))
    found = detected(results["set", "x/1"], results["set", "stock"], thresholds(results, "set"))
    assert found == {"exact": False, "drift": False, "peak": False, "shift": False}


@pytest.mark.parametrize(
    ("exact", "drift", "peak", "shift", "measure_name"),
    [
        ((True, True, True, False), 0.01, 0.1, 0.0, "exact"),
        ((True, True, True, True), 0.011, 0.1, 0.0, "drift"),
        ((True, True, True, True), 0.01, 0.11, 0.0, "peak"),
        ((True, True, True, True), 0.01, 0.1, 0.0011, "shift"),
        ((True, True, True, True), 0.01, 0.1, -0.0011, "shift"),
    ],
)
def test_each_measure_detects_alone(
    exact: tuple[bool, ...], drift: float, peak: float, shift: float, measure_name: str
) -> None:
    results = _results(_arm("x/1", exact, drift, peak, shift))
    found = detected(results["set", "x/1"], results["set", "stock"], thresholds(results, "set"))
    assert [name for name, is_found in found.items() if is_found] == [measure_name]


def test_the_smallest_detected_size_ends_at_the_first_size_that_is_missed() -> None:
    fault = BY_NAME["dropped_rank"]
    drifts = {1.0: 0.5, 0.1: 0.2, 0.01: 0.005, 0.001: 0.3}
    arms = [_arm(f"dropped_rank/{size:g}", (True,) * 4, d, 0.0) for size, d in drifts.items()]
    results = _results(*arms)
    limit = thresholds(results, "set")
    assert smallest_detected(results, "set", fault, "drift", limit) == 0.1
    assert smallest_detected(results, "set", fault, "peak", limit) is None


def test_a_size_is_no_smallest_one_unless_every_grosser_one_was_tried() -> None:
    fault = BY_NAME["dropped_rank"]
    results = _results(*(_arm(f"dropped_rank/{size:g}", (True,) * 4, 0.5, 0.0) for size in (1.0, 0.01)))
    assert smallest_detected(results, "set", fault, "drift", thresholds(results, "set")) == 1.0


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(read_safetensors(CANARY_FILE), CANARY)


def test_three_rows_of_the_published_table_come_out_again(model: Model) -> None:
    published = read_results(RESULTS_FOLDER)
    questions = next(s for s in SETS if s.name == "chain_504")
    prepared = prepare(model, questions.samples())
    measure(model, prepared, Path(), questions.name, "stock")
    for name, size in REPEATED:
        arm = f"{name}/{size:g}"
        again = measure(model, prepared, BY_NAME[name].planted(size, FAULTY_ROUNDINGS), questions.name, arm)
        wanted = published[questions.name, arm]
        assert again.exact == wanted.exact
        # rounding order differs between machines by less than right kernels differ among themselves
        assert np.mean(again.drift) == pytest.approx(np.mean(wanted.drift), rel=0.1, abs=2e-3)


def test_changes_of_opposite_sign_are_a_drift_and_no_shift() -> None:
    apart = Measured("set", "x/1", (True,) * 4, (0.02,) * 4, (0.1,) * 4, (0.02, -0.02, 0.02, -0.02), 0.5)
    results = _results(apart)
    found = detected(apart, results["set", "stock"], thresholds(results, "set"))
    assert (found["drift"], found["shift"]) == (True, False)


def test_the_readme_holds_the_tables_of_the_published_results() -> None:
    published = read_results(RESULTS_FOLDER)
    readme = RESULTS_FOLDER.with_name("README.md").read_text()
    assert render_accuracy(read_accuracy(ACCURACY_FILE)) in readme
    assert render_thresholds(published) in readme
    assert render(published) in readme
