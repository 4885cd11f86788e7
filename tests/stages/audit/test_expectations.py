"""What an audit found becomes the limits of the next one."""

import json

import pytest

from harness.domain.cell import Cell
from harness.domain.check import Check, Control, Figure, Finding, Outcome, Severity, StageName, Status
from harness.domain.errors import InputError
from harness.domain.machine import Tier
from harness.stages.audit.expectations import accepted, expectations, merged, render_expectations

CHECK = Check(
    id="audit/gate_c2/sm_90a",
    stage=StageName.AUDIT,
    proves="x",
    cell=Cell(arch="sm_90a"),
    subject="gate_c2",
    parameters=(("variant", "gate_c2"), ("architectures", "sm_90a")),
    cost_s=0,
)
TWO = CHECK.model_copy(
    update={"parameters": (("variant", "gate_c2"), ("set", "smoke"), ("architectures", "sm_90a sm_100a"))}
)
OTHER = TWO.model_copy(update={"id": "audit/gate_c2/sm_100a", "cell": Cell(arch="sm_100a")})


def outcome(
    status: Status, *rules: str, registers: int = 57, share: float | None = 0.75, spilled: int = 0,
    check: Check = CHECK,
) -> Outcome:  # fmt: skip
    return Outcome(
        check=check.id,
        status=status,
        tier=Tier.SMOKE,
        summary="s",
        next_step="" if status is Status.PASS else "n",
        control=Control(kind="planted", description="d", failed=True, observed="o"),
        figures=(
            Figure(name="registers", value=registers),
            Figure(name="spill_bytes", value=spilled),
            Figure(name="load16_share", value=share, missing=None if share is not None else "none"),
        ),
        findings=tuple(Finding(rule=r, severity=Severity.ERROR, message="m", remedy="r") for r in rules),
    )


def test_registers_are_limited_in_eights_and_wide_loads_to_the_percent() -> None:
    assert expectations([CHECK], [outcome(Status.PASS)]) == {
        "gate_c2": {"max_registers": 64, "min_wide_loads_percent": 74}
    }
    assert expectations([CHECK], [outcome(Status.PASS, registers=64, share=1.0)]) == {
        "gate_c2": {"max_registers": 64, "min_wide_loads_percent": 100}
    }


def test_a_kernel_without_loads_by_threads_has_no_limit_on_them() -> None:
    found = expectations([CHECK], [outcome(Status.PASS, share=None)])
    assert found == {"gate_c2": {"max_registers": 64}}


def test_an_audit_that_failed_its_old_limits_may_set_new_ones_and_one_with_a_fault_may_not() -> None:
    assert expectations([CHECK], [outcome(Status.FAIL, "registers", "wide_loads")])
    with pytest.raises(InputError, match="1 audits did not pass, first audit/gate_c2/sm_90a"):
        expectations([CHECK], [outcome(Status.FAIL, "registers", "load_before_wait")])


def test_a_spill_is_expected_only_where_a_person_accepts_it() -> None:
    spilled = outcome(Status.FAIL, "spill", spilled=16)
    with pytest.raises(InputError, match="1 audits did not pass"):
        expectations([CHECK], [spilled])
    found = expectations([CHECK], [spilled], accepts_spills=True)
    assert found["gate_c2"]["spill_bytes"] == 16


def test_a_limit_that_differs_between_architectures_names_them() -> None:
    outcomes = [outcome(Status.PASS), outcome(Status.PASS, registers=70, check=OTHER)]
    assert expectations([TWO, OTHER], outcomes) == {
        "gate_c2": {
            "sm_90a.max_registers": 64,
            "sm_100a.max_registers": 72,
            "min_wide_loads_percent": 74,
        }
    }


def test_an_audit_of_one_architecture_limits_no_other() -> None:
    found = expectations([TWO], [outcome(Status.PASS)])
    assert found == {"gate_c2": {"sm_90a.max_registers": 64, "sm_90a.min_wide_loads_percent": 74}}
    old = {"gate_c2": {"sm_90a.max_registers": 48, "sm_100a.max_registers": 40, "spill_bytes": 8}}
    assert merged(old, found, [TWO]) == {
        "gate_c2": {
            "sm_90a.max_registers": 64,
            "sm_90a.min_wide_loads_percent": 74,
            "sm_100a.max_registers": 40,
            "spill_bytes": 8,
        }
    }


def test_a_looser_limit_is_written_only_with_a_reason_which_the_file_keeps() -> None:
    old = {"gate": {"max_registers": 64, "min_wide_loads_percent": 90}, "other": {"max_registers": 64}}
    written = {"gate": {"max_registers": 72, "min_wide_loads_percent": 80, "spill_bytes": 8}, "new": {}}
    with pytest.raises(InputError) as caught:
        accepted(old, written, None)
    assert "3 limits would be looser than they are: gate: spill_bytes 0 -> 8; " in str(caught.value)
    assert "gate: max_registers 64 -> 72; gate: min_wide_loads_percent 90 -> 80;" in str(caught.value)
    looser = accepted(old, written, "two rows more a warp")
    assert looser == {
        "gate": {
            "spill_bytes": (0, 8, "two rows more a warp"),
            "max_registers": (64, 72, "two rows more a warp"),
            "min_wide_loads_percent": (90, 80, "two rows more a warp"),
        }
    }
    text = render_expectations(written, looser)
    assert '"max_registers": [64, 72, "two rows more a warp"]' in text
    again = json.loads(text)
    assert accepted(again, written, None) == looser


def test_a_limit_that_became_tighter_needs_no_reason_and_ends_what_was_accepted() -> None:
    old = {"gate": {"max_registers": 72}, "_accepted": {"gate": {"max_registers": [64, 72, "why"]}}}
    assert accepted(old, {"gate": {"max_registers": 64}}, None) == {}


def test_of_a_limit_loosened_twice_the_first_value_is_kept() -> None:
    old = {"gate": {"max_registers": 72}, "_accepted": {"gate": {"max_registers": [64, 72, "why"]}}}
    assert accepted(old, {"gate": {"max_registers": 80}}, "more") == {
        "gate": {"max_registers": (64, 80, "more")}
    }


def test_an_audit_of_some_kernels_leaves_the_limits_of_the_others() -> None:
    old, found = {"gate_c2": {"x": 1}, "gate_c7": {"x": 2}}, {"gate_c2": {"x": 3}}
    smoke, full = (
        CHECK.model_copy(update={"parameters": (("variant", "gate_c2"), ("set", name))})
        for name in ("smoke", "full")
    )
    assert merged(old, found, [smoke]) == {"gate_c2": {"x": 3}, "gate_c7": {"x": 2}}
    assert merged(old, found, [full], only=("gate",)) == {"gate_c2": {"x": 3}, "gate_c7": {"x": 2}}
    assert merged(old, found, [full]) == found


def test_a_bundle_without_audits_says_so() -> None:
    with pytest.raises(InputError, match="it holds no audit"):
        expectations([], [])


def test_the_file_is_sorted_json_with_a_variant_a_line() -> None:
    text = render_expectations({"b": {"sm_90a.max_registers": 8}, "a": {"y": 2, "x": 1}})
    assert text.splitlines() == ["{", '"a": {"x": 1, "y": 2},', '"b": {"sm_90a.max_registers": 8}', "}"]
    assert json.loads(text)["a"] == {"x": 1, "y": 2}
