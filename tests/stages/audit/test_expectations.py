"""What an audit found becomes the limits of the next one."""

import json

import pytest

from harness.domain.cell import Cell
from harness.domain.check import Check, Control, Figure, Finding, Outcome, Severity, StageName, Status
from harness.domain.errors import InputError
from harness.domain.policy import Tier
from harness.stages.audit.expectations import expectations, render_expectations

CHECK = Check(
    id="audit/gate_c2/sm_90a",
    stage=StageName.AUDIT,
    proves="x",
    cell=Cell(arch="sm_90a"),
    subject="gate_c2",
    parameters=(("variant", "gate_c2"),),
    cost_s=0,
)


def outcome(status: Status, *rules: str, registers: int = 57, share: float | None = 0.75) -> Outcome:
    return Outcome(
        check=CHECK.id,
        status=status,
        tier=Tier.SMOKE,
        summary="s",
        next_step="" if status is Status.PASS else "n",
        control=Control(kind="planted", description="d", failed=True, observed="o"),
        figures=(
            Figure(name="registers", value=registers),
            Figure(name="load16_share", value=share, missing=None if share is not None else "none"),
        ),
        findings=tuple(Finding(rule=r, severity=Severity.ERROR, message="m", remedy="r") for r in rules),
    )


def test_registers_are_limited_in_eights_and_wide_loads_to_the_percent() -> None:
    assert expectations([CHECK], [outcome(Status.PASS)]) == {
        "gate_c2": {"sm_90a.max_registers": 64, "sm_90a.min_wide_loads_percent": 74}
    }
    assert expectations([CHECK], [outcome(Status.PASS, registers=64, share=1.0)]) == {
        "gate_c2": {"sm_90a.max_registers": 64, "sm_90a.min_wide_loads_percent": 100}
    }


def test_a_kernel_without_loads_by_threads_has_no_limit_on_them() -> None:
    found = expectations([CHECK], [outcome(Status.PASS, share=None)])
    assert found == {"gate_c2": {"sm_90a.max_registers": 64}}


def test_an_audit_that_failed_its_old_limits_may_set_new_ones_and_one_with_a_fault_may_not() -> None:
    assert expectations([CHECK], [outcome(Status.FAIL, "registers", "wide_loads")])
    with pytest.raises(InputError, match="1 audits did not pass, first audit/gate_c2/sm_90a"):
        expectations([CHECK], [outcome(Status.FAIL, "registers", "load_before_wait")])


def test_a_bundle_without_audits_says_so() -> None:
    with pytest.raises(InputError, match="it holds no audit"):
        expectations([], [])


def test_the_file_is_sorted_json_with_a_variant_a_line() -> None:
    text = render_expectations({"b": {"sm_90a.max_registers": 8}, "a": {"y": 2, "x": 1}})
    assert text.splitlines() == ["{", '"a": {"x": 1, "y": 2},', '"b": {"sm_90a.max_registers": 8}', "}"]
    assert json.loads(text)["a"] == {"x": 1, "y": 2}
