"""What the samples of each feature amount to, from rows written by hand."""

import json
from typing import Any

import numpy as np
import pytest

from harness.domain.check import Check, Samples, SampleTable, StageName, Status
from harness.domain.machine import Tier
from harness.domain.policy import Proof
from harness.domain.record import Scalar
from harness.stages.evals import judge, plan
from harness.stages.evals.features import FEATURES
from harness.stages.evals.planning import FEATURE_ITEMS, FEATURE_TOKENS
from harness.stages.evals.tables import FEATURE_SHAPES
from tests.fakes.requests import POLICY, plan_request
from tests.stages.spoiled_tables import spoiled

Rows = list[tuple[Scalar, ...]]
GOOD = '{"unit":"us","name":"abc","is_fast":true}'


def _check(name: str, **asked: Any) -> Check:
    proofs = tuple(
        Proof(stage=p.stage, subjects=(name,)) if p.stage is StageName.EVALS else p for p in POLICY.proofs
    )
    (check,) = plan(plan_request(policy=POLICY.model_copy(update={"proofs": proofs})))
    parameters = dict(check.parameters) | asked
    return check.model_copy(update={"parameters": tuple(parameters.items())})


def _samples(name: str, path: str = "optimised", **tables: Rows) -> Samples:
    columns = {shape: tuple(FEATURE_SHAPES[shape].columns) for shape in tables}
    steps = [("optimised", "decode", path, "taken", 40), ("stock", "decode", "stock", "switch_off", 40)]
    return Samples(
        check=_check(name).id,
        tier=Tier.SMOKE,
        tables=(
            *(SampleTable(name=n, columns=columns[n], rows=tuple(rows)) for n, rows in tables.items()),
            SampleTable(
                name="steps", columns=("arm", "phase", "path", "reason", "tokens"), rows=tuple(steps)
            ),
        ),
    )


def _draws(arm: str, share: float, n: int = 120, seed: int = 1) -> Rows:
    """Draws of two tokens stated 0.7 and 0.3, of which the first really comes with `share`."""
    source = np.random.default_rng(seed)
    first = source.random(n) < share
    return [(arm, "a", k, int(not f), 0.0 if f else 0.7, 0.7 if f else 0.3) for k, f in enumerate(first)]


def test_every_feature_has_a_number_of_items_and_tokens() -> None:
    assert set(FEATURES) == set(FEATURE_ITEMS) == set(FEATURE_TOKENS)


@pytest.mark.parametrize(
    ("share", "poison", "status"),
    [
        (0.7, 0.2, Status.PASS),
        (0.35, 0.2, Status.FAIL),
        (0.7, 0.7, Status.NO_EVIDENCE),
        (1.0, 0.2, Status.FAIL),
    ],
)
def test_drawn_tokens_are_held_to_what_stock_states(share: float, poison: float, status: Status) -> None:
    check = _check("temperature_sampling", items=6, max_tokens=20)
    rows = [*_draws("optimised", share), *_draws("poison", poison, seed=2)]
    assert judge(check, _samples("temperature_sampling", draws=rows)).status is status


def test_a_drawn_token_without_a_finite_probability_fails() -> None:
    rows = [*_draws("optimised", 0.7), ("optimised", "b", 0, 3, None, None)]
    outcome = judge(_check("temperature_sampling"), _samples("temperature_sampling", draws=rows))
    assert outcome.status is Status.FAIL


def test_too_few_draws_are_no_evidence() -> None:
    rows = [*_draws("optimised", 0.7, n=9), *_draws("poison", 0.2)]
    outcome = judge(_check("temperature_sampling"), _samples("temperature_sampling", draws=rows))
    assert outcome.status is Status.NO_EVIDENCE
    assert outcome.summary == "only 9 tokens were drawn"


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (GOOD, Status.PASS),
        (GOOD[:-1], Status.FAIL),
        ('{"unit":"s","name":"abc","is_fast":true}', Status.FAIL),
        ('{"unit":"us","name":"abcd","is_fast":true}', Status.FAIL),
        ('{"unit":"us","name":"abc","is_fast":"true"}', Status.FAIL),
        ('{"unit":"us","name":"abc"}', Status.FAIL),
        ('{"unit":"us","name":"abc","is_fast":true,"more":1}', Status.FAIL),
        (f"Sure: {GOOD}", Status.FAIL),
        ("", Status.FAIL),
    ],
)
def test_an_answer_under_a_schema_must_parse_under_it(answer: str, status: Status) -> None:
    rows: Rows = [
        ("stock", "a", "", GOOD, "stop"), ("optimised", "a", "", answer, "stop"),
        ("control", "a", "", "no json", "length"),
    ]  # fmt: skip
    outcome = judge(_check("structured_output", items=1), _samples("structured_output", texts=rows))
    assert outcome.status is status


@pytest.mark.parametrize(
    ("optimised", "status", "own"),
    [
        ([["marlin", 2, 5.0], ["k3_experts", 1, 2.5]], Status.PASS, 1),
        ([["marlin", 2, 5.0]], Status.NO_EVIDENCE, 0),
    ],
)
def test_a_server_whose_profiler_saw_stocks_kernels_alone_proves_nothing(
    optimised: list[list[object]], status: Status, own: int
) -> None:
    rows: Rows = [
        ("stock", "a", "", GOOD, "stop"), ("optimised", "a", "", GOOD, "stop"),
        ("control", "a", "", "no json", "length"),
    ]  # fmt: skip
    told: Rows = [
        ("stock", "profile.kernels", json.dumps([["marlin", 3, 7.5]])),
        ("optimised", "profile.kernels", json.dumps(optimised)),
    ]
    samples = _samples("structured_output", texts=rows, settings=told)
    outcome = judge(_check("structured_output", items=1), samples)
    assert outcome.status is status
    assert next(f.value for f in outcome.figures if f.name == "own_kernels") == own


def test_a_schema_that_is_met_without_being_asked_for_proves_nothing() -> None:
    rows: Rows = [(arm, "a", "", GOOD, "stop") for arm in ("stock", "optimised", "control")]
    outcome = judge(_check("structured_output", items=1), _samples("structured_output", texts=rows))
    assert outcome.status is Status.NO_EVIDENCE
    assert "the control did not fail" in outcome.summary


@pytest.mark.parametrize(
    ("stock", "optimised", "status"),
    [
        (("ab", "stop"), ("ab", "stop"), Status.PASS),
        (("ab", "stop"), ("abc", "stop"), Status.FAIL),
        (("ab", "stop"), ("ab", "length"), Status.FAIL),
        (("abc", "stop"), ("ab", "stop"), Status.NO_EVIDENCE),
    ],
)
@pytest.mark.parametrize("name", ["stop_handling", "full_context"])
def test_texts_must_be_what_was_expected_and_end_by_themselves(
    name: str, stock: tuple[str, str], optimised: tuple[str, str], status: Status
) -> None:
    rows: Rows = [
        ("stock", "a", "ab", *stock), ("optimised", "a", "ab", *optimised),
        ("control", "a", "ab", "abcd", "length"),
    ]  # fmt: skip
    assert judge(_check(name, items=1), _samples(name, texts=rows)).status is status


def test_an_item_that_one_arm_left_out_is_invalid() -> None:
    rows: Rows = [("stock", "a", "x", "x", "stop"), ("control", "a", "x", "y", "stop")]
    assert (
        judge(_check("stop_handling", items=1), _samples("stop_handling", texts=rows)).status
        is Status.INVALID
    )


def _gaps(stock: float | None, optimised: float | None, control: float | None) -> Rows:
    return [("stock", "a", 0, stock), ("optimised", "a", 0, optimised), ("control", "a", 0, control)]


@pytest.mark.parametrize(
    ("gaps", "status"),
    [
        (_gaps(0.0, 0.04, 3.0), Status.PASS),
        (_gaps(0.0, 0.06, 3.0), Status.FAIL),
        (_gaps(0.01, 0.06, 3.0), Status.PASS),
        (_gaps(0.0, None, 3.0), Status.FAIL),
        (_gaps(0.0, 0.0, 0.01), Status.NO_EVIDENCE),
        ([], Status.NO_EVIDENCE),
    ],
)
def test_a_request_may_move_among_others_no_more_than_twice_stocks_own_and_a_near_tie(
    gaps: Rows, status: Status
) -> None:
    assert judge(_check("batch_mates"), _samples("batch_mates", spreads=gaps)).status is status


def test_stock_without_a_spread_of_its_own_is_no_evidence_against_anybody() -> None:
    outcome = judge(_check("batch_mates"), _samples("batch_mates", spreads=_gaps(None, None, None)))
    assert outcome.status is Status.NO_EVIDENCE
    assert outcome.summary.startswith("stock's own answers part at once")


@pytest.mark.parametrize(("hits", "status"), [(1, Status.PASS), (0, Status.NO_EVIDENCE)])
def test_a_prefix_that_was_never_hit_proves_nothing(hits: int, status: Status) -> None:
    counters: Rows = [("stock", "prefix_hits", 1), ("optimised", "prefix_hits", hits)]
    samples = _samples("prefix_caching", spreads=_gaps(0.0, 0.0, 3.0), counters=counters)
    assert judge(_check("prefix_caching"), samples).status is status


def test_a_feature_shown_on_the_stock_path_is_no_evidence() -> None:
    samples = _samples("batch_mates", path="stock", spreads=_gaps(0.0, 0.0, 3.0))
    assert judge(_check("batch_mates"), samples).status is Status.NO_EVIDENCE


def test_rows_of_features_that_do_not_fit_are_invalid_and_never_a_crash() -> None:
    rows: Rows = [("stock", "a", "ab", "ab", "stop"), ("optimised", "a", "ab", "ab", "stop")]
    texts = _samples("stop_handling", texts=rows)
    draws = _samples("temperature_sampling", draws=_draws("optimised", 0.7, n=3))
    spreads = _samples("batch_mates", spreads=_gaps(0.0, 0.0, 3.0))
    for name, samples in (
        ("stop_handling", texts),
        ("temperature_sampling", draws),
        ("batch_mates", spreads),
    ):
        for done, bad in spoiled(samples, FEATURE_SHAPES):
            assert judge(_check(name), bad).status is Status.INVALID, done
