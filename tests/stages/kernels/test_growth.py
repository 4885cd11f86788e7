"""Errors over the context: a slope above the policy's fails, and rounding's own does not."""

from dataclasses import replace
from pathlib import Path

import pytest

from harness.documents import load_claim
from harness.domain.check import Check, Outcome, Samples, SampleTable, Status
from harness.domain.machine import Tier
from harness.domain.policy import Proof
from harness.engines.packs import load_pack
from harness.stages.kernels import judge, plan, sample
from harness.stages.kernels.growth import COLUMNS, context_slope
from tests.fakes.pack import FakePack
from tests.fakes.requests import POLICY, plan_request, stage_context


@pytest.fixture(scope="module")
def check() -> Check:
    """The one check of the real pack."""
    (found,) = checks_of(())
    return found


def checks_of(thresholds: tuple[tuple[str, float], ...]) -> list[Check]:
    pack = load_pack("k3_decode")
    proofs = tuple(
        Proof(stage=p.stage, thresholds=thresholds if p.stage == "kernels" else ()) for p in POLICY.proofs
    )
    policy = POLICY.model_copy(update={"proofs": proofs})
    request = replace(plan_request(policy=policy), pack=pack, claim=load_claim(pack.claim_file()))
    return [c for c in plan(request) if "/growth/" in c.id]


def judged(check: Check, errors: tuple[float, float, float, float], *, steep: float = 2.0) -> Outcome:
    """The outcome of one candidate whose `out` has these shares of what is allowed, at 128 to 8192 tokens."""
    rows = [
        (length, 0, arm, output, 0, share, 1.0)
        for output in ("out", "lse")
        for number, length in enumerate((128, 512, 2048, 8192))
        for arm, share in (("optimised", errors[number]), ("planted", 0.5 * steep**number))
    ]
    table = SampleTable(name="growth", columns=COLUMNS, rows=tuple(rows))
    return judge(check, Samples(check=check.id, tier=Tier.SMOKE, tables=(table,)))


def test_only_the_op_whose_work_grows_with_the_context_is_asked(check: Check) -> None:
    assert check.id == "kernels/mla_attend/growth/cpu"
    assert check.parameter("contexts") == "128,512,2048,8192"
    assert check.parameter("outputs") == "out,lse"


def test_the_policy_says_how_steep_is_too_steep() -> None:
    (found,) = checks_of((("max_context_slope", 0.1),))
    assert found.number("max_context_slope") == 0.1


def test_a_slope_is_of_log_error_to_log_context() -> None:
    assert context_slope({128: 0.1, 512: 0.2, 2048: 0.4}) == pytest.approx(0.5)
    assert context_slope({128: 0.3, 512: 0.3}) == pytest.approx(0.0)
    assert context_slope({128: 0.3}) is None


def test_an_error_that_keeps_pace_with_stocks_passes(check: Check) -> None:
    outcome = judged(check, (0.3, 0.28, 0.33, 0.31))

    assert outcome.status is Status.PASS
    assert outcome.control is not None
    assert outcome.control.observed == "out: slope 0.50, lse: slope 0.50"


def test_an_error_within_its_bound_everywhere_that_grows_fails(check: Check) -> None:
    outcome = judged(check, (0.1, 0.2, 0.4, 0.8))

    assert outcome.status is Status.FAIL
    assert "out 0.50, lse 0.50 (limit 0.25)" in outcome.summary


def test_a_planted_growth_that_is_not_noticed_proves_nothing(check: Check) -> None:
    assert judged(check, (0.3, 0.3, 0.3, 0.3), steep=1.0).status is Status.NO_EVIDENCE


def test_a_context_that_was_left_out_makes_the_samples_invalid(check: Check) -> None:
    table = SampleTable(name="growth", columns=COLUMNS, rows=((128, 0, "optimised", "out", 0, 0.1, 1.0),))

    assert judge(check, Samples(check=check.id, tier=Tier.SMOKE, tables=(table,))).status is Status.INVALID


def test_the_real_attention_is_tried_at_every_context(check: Check, tmp_path: Path) -> None:
    short = tuple((n, "64,128,256" if n == "contexts" else v) for n, v in check.parameters)
    check = check.model_copy(update={"parameters": short})
    context = replace(stage_context(FakePack(), tmp_path), pack=load_pack("k3_decode"))

    outcome = judge(check, sample(check, context))

    assert outcome.status is Status.PASS, outcome.summary
