"""The plan of the bundle judges by a looser limit than the policy sets."""

from pathlib import Path

from harness.domain.check import Threshold
from harness.domain.plan import Plan
from harness.faults.fault import Fault
from harness.faults.scenes import BundleScene
from tests.faults.result_edits import edit_plan


def loosened(plan: Plan) -> Plan:
    def loose(threshold: Threshold) -> Threshold:
        is_it = threshold.name == "drift_factor"
        return threshold.model_copy(update={"value": 1000.0}) if is_it else threshold

    checks = tuple(
        c.model_copy(update={"thresholds": tuple(loose(t) for t in c.thresholds)}) for c in plan.checks
    )
    return plan.model_copy(update={"checks": checks})


def edit(folder: Path, is_repaired: bool) -> None:
    edit_plan(folder, (lambda plan: plan) if is_repaired else loosened)


FAULT = Fault(
    name="limit_loosened",
    title="The plan of the bundle judges by a looser limit than the policy sets.",
    report="vllm-project/vllm#56644",
    target="result",
    expected="bundle",
    scene=BundleScene(edit),
)
