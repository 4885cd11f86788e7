"""The bundle was judged by an edited harness that calls itself this one."""

from pathlib import Path

from harness.domain.plan import Plan
from harness.faults.fault import Fault
from harness.faults.scenes import BundleScene
from tests.faults.result_edits import edit_plan


def another(plan: Plan) -> Plan:
    return plan.model_copy(update={"harness_version": "9.9.9"})


def edit(folder: Path, is_repaired: bool) -> None:
    edit_plan(folder, (lambda plan: plan) if is_repaired else another, binds=False)


FAULT = Fault(
    name="another_judge",
    title="The bundle was judged by an edited harness that calls itself this one.",
    report="google-deepmind/eval_hub#8",
    target="result",
    expected="bundle",
    scene=BundleScene(edit),
)
