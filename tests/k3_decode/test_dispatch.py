"""The run-time guard: derived from the claim, one reason a step, told to the observer before the step."""

import dataclasses
from pathlib import Path

import pytest
import yaml
from k3_decode.dispatch import CLAIM_FILE, Decision, Dispatcher, Reason, Site, StepFacts, load_guard

SITE = Site(arch="cpu", tp=1, dcp=1, kv_dtype="bf16", layers=3, is_supported_model=True)
FACTS = StepFacts(
    step=7, phase="decode", rows_by_request=(1, 1), is_graph=False, context_min=10, context_max=20
)


def decide(site: Site = SITE, facts: StepFacts = FACTS, *, is_on: bool = True) -> Decision:
    dispatcher = Dispatcher(load_guard(), site)
    dispatcher.is_on = is_on
    return dispatcher.decide(facts)


def other_site(**changes: object) -> Site:
    return dataclasses.replace(SITE, **changes)  # type: ignore[arg-type]


def other_facts(**changes: object) -> StepFacts:
    return dataclasses.replace(FACTS, **changes)  # type: ignore[arg-type]


def test_a_step_inside_the_envelope_is_taken_on_every_layer() -> None:
    assert decide() == Decision(
        step=7, phase="decode", requests=2, rows=1, tokens=2, batch_bucket=2, is_graph=False, tp=1, dcp=1,
        drafts=0, context_min=10, context_max=20, path="optimised", reason=Reason.TAKEN, layer_paths="ooo",
        collective="none",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("site", "facts", "reason"),
    [
        (other_site(is_supported_model=False), FACTS, Reason.MODEL_NOT_SUPPORTED),
        (other_site(arch="sm_100a"), FACTS, Reason.ARCH_COMPILED_ONLY),
        (other_site(arch="sm_103a"), FACTS, Reason.ARCH_COMPILED_ONLY),
        (other_site(arch="sm_80"), FACTS, Reason.ARCH_NOT_CLAIMED),
        (other_site(tp=3), FACTS, Reason.TP_NOT_CLAIMED),
        (other_site(dcp=2), FACTS, Reason.DCP_NOT_CLAIMED),
        (other_site(collective="multicast"), FACTS, Reason.COLLECTIVE_NOT_CLAIMED),
        (other_site(kv_dtype="int8"), FACTS, Reason.KV_DTYPE_NOT_CLAIMED),
        (SITE, other_facts(phase="prefill", rows_by_request=(8,)), Reason.PHASE_NOT_CLAIMED),
        (SITE, other_facts(phase="mixed", rows_by_request=(1, 30)), Reason.PHASE_NOT_CLAIMED),
        (SITE, other_facts(phase="verify", rows_by_request=(4, 3)), Reason.ROWS_NOT_UNIFORM),
        (SITE, other_facts(rows_by_request=(1,) * 65), Reason.BATCH_OUT_OF_ENVELOPE),
        (SITE, other_facts(phase="verify", rows_by_request=(9,)), Reason.DRAFTS_OUT_OF_ENVELOPE),
        (SITE, other_facts(phase="verify", rows_by_request=(8,) * 9), Reason.ROWS_OVER_LIMIT),
        (SITE, other_facts(context_max=1_048_577), Reason.CONTEXT_OUT_OF_ENVELOPE),
    ],
)
def test_outside_the_envelope_a_step_is_declined_with_its_reason(
    site: Site, facts: StepFacts, reason: Reason
) -> None:
    decision = decide(site, facts)
    assert (decision.path, decision.reason, decision.layer_paths) == ("stock", reason, "sss")


def test_the_switch_is_the_first_reason() -> None:
    assert decide(other_site(arch="sm_100a", tp=3), is_on=False).reason is Reason.SWITCH_OFF


def test_every_reason_can_be_given_and_there_are_no_others() -> None:
    """The cases above, the switch and `taken` are the whole list."""
    marks = test_outside_the_envelope_a_step_is_declined_with_its_reason.pytestmark  # type: ignore[attr-defined]
    declined = {case[2] for case in marks[0].args[1]}
    assert declined | {Reason.TAKEN, Reason.SWITCH_OFF} == set(Reason)


@pytest.mark.parametrize(
    ("requests", "bucket"), [(1, 1), (2, 2), (3, 4), (8, 8), (33, 64), (64, 64), (65, None)]
)
def test_a_step_falls_into_the_smallest_bucket_that_holds_it(requests: int, bucket: int | None) -> None:
    assert decide(facts=other_facts(rows_by_request=(1,) * requests)).batch_bucket == bucket


def test_the_joint_limit_admits_eight_rows_for_eight_requests() -> None:
    full = decide(facts=other_facts(phase="verify", rows_by_request=(8,) * 8))
    assert (full.reason, full.tokens, full.drafts) == (Reason.TAKEN, 64, 7)


def test_the_observer_hears_every_decision() -> None:
    heard: list[Decision] = []
    dispatcher = Dispatcher(load_guard(), SITE, heard.append)
    first = dispatcher.decide(FACTS)
    dispatcher.is_on = True
    second = dispatcher.decide(FACTS)
    assert heard == [first, second]
    assert [d.reason for d in heard] == [Reason.SWITCH_OFF, Reason.TAKEN]


def test_the_guard_follows_the_claim_and_restates_nothing(tmp_path: Path) -> None:
    """A narrower claim narrows the guard, with no other change."""
    claim = yaml.safe_load(CLAIM_FILE.read_text())
    claim["envelope"]["batch"]["max"] = 1
    claim["envelope"]["batch_buckets"] = [1]
    narrow = tmp_path / "claim.yaml"
    narrow.write_text(yaml.safe_dump(claim))
    dispatcher = Dispatcher(load_guard(narrow), SITE)
    dispatcher.is_on = True
    assert dispatcher.decide(FACTS).reason is Reason.BATCH_OUT_OF_ENVELOPE


def test_the_switch_is_opt_in_and_knows_two_values() -> None:
    switch = load_guard().switch
    assert not switch.is_on(None)
    assert switch.is_on("latency_specialized")
    with pytest.raises(ValueError, match="decode_backend is 'fast'"):
        switch.is_on("fast")


def test_the_claim_is_valid_for_the_harness_and_both_read_the_same_envelope() -> None:
    from harness.domain.cell import Cell
    from harness.domain.claim import Claim

    claim = Claim.model_validate(yaml.safe_load(CLAIM_FILE.read_text()))
    for batch, drafts, context, kv_dtype in (
        (1, 0, 1, "bf16"),
        (64, 0, 8192, "fp8"),
        (8, 7, 64, "bf16"),
        (9, 7, 64, "bf16"),
    ):
        phase = "verify" if drafts else "decode"
        cell = Cell.model_validate(
            {"batch": batch, "drafts": drafts, "context": context, "kv_dtype": kv_dtype, "phase": phase}
        )
        decision = decide(
            other_site(kv_dtype=kv_dtype),
            other_facts(
                phase=phase, rows_by_request=(drafts + 1,) * batch, context_min=context, context_max=context
            ),
        )
        assert claim.envelope.admits(cell) == (decision.reason is Reason.TAKEN)
