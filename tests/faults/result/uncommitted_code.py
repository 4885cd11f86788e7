"""The bundle was made from uncommitted code, and is bound to no commit."""

from pathlib import Path

from harness.domain.plan import Plan
from harness.faults.fault import Fault
from harness.faults.scenes import BundleScene
from tests.faults.result_edits import edit_plan


def dirty(plan: Plan) -> Plan:
    return plan.model_copy(update={"change": plan.change.model_copy(update={"is_dirty": True})})


def edit(folder: Path, is_repaired: bool) -> None:
    edit_plan(folder, (lambda plan: plan) if is_repaired else dirty)


FAULT = Fault(
    name="uncommitted_code",
    title="The bundle was made from uncommitted code, and is bound to no commit.",
    report="SemiAnalysisAI/InferenceX#1580",
    target="result",
    expected="bundle",
    scene=BundleScene(edit),
)
