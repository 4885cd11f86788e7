"""The eval runs at a batch that the dispatcher declines: a green result about the wrong path."""

from tests.faults.planting import engine_fault

FAULT = engine_fault(
    "eval_batch_never_taken",
    title="The eval runs at a batch that the dispatcher declines: a green result about the wrong path.",
    report="vllm-project/vllm#46142",
    target="dispatcher",
    at="k3_decode.dispatch:Dispatcher._reason",
    fault={
        "(Reason.SWITCH_OFF, not self.is_on)": "(Reason.SWITCH_OFF, not self.is_on or len(facts.rows_by_request) > 4)"
    },
    repaired={
        "(Reason.SWITCH_OFF, not self.is_on)": "(Reason.SWITCH_OFF, not self.is_on or len(facts.rows_by_request) > 64)"
    },
    checks=("evals/mrcr_canary",),
    expected="evals",
)
