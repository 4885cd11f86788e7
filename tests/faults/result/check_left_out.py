"""The plan of the bundle leaves out the check that would have failed."""

from pathlib import Path

from harness.domain.plan import Plan
from harness.faults.fault import Fault
from harness.faults.scenes import BundleScene
from tests.faults.result_edits import edit_plan


def without_opt_in(plan: Plan) -> Plan:
    return plan.model_copy(update={"checks": tuple(c for c in plan.checks if "opt_in" not in c.id)})


def edit(folder: Path, is_repaired: bool) -> None:
    edit_plan(folder, (lambda plan: plan) if is_repaired else without_opt_in)


FAULT = Fault(
    name="check_left_out",
    title="The plan of the bundle leaves out the check that would have failed.",
    report="vllm-project/vllm#46142",
    target="result",
    expected="bundle",
    scene=BundleScene(edit),
)
