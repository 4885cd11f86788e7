"""When a stored outcome is what its samples give."""

from typing import Any

import pytest

from harness.domain.check import Control, Figure, Outcome, Status
from harness.domain.machine import Tier
from harness.evidence.rederive import differences

CONTROL = Control(kind="poison", description="output x 1.05", failed=True, observed="relative L2 0.05")


def _outcome(**changes: Any) -> Outcome:
    values: dict[str, Any] = {
        "check": "kernels/kda_step/cpu",
        "status": Status.PASS,
        "tier": Tier.SMOKE,
        "summary": "relative L2 0.00342 over 128 rows",
        "control": CONTROL,
        "figures": (Figure(name="relative_l2", value=0.00342), Figure(name="rows", value=128)),
    }
    return Outcome(**{**values, **changes})


def test_equal_outcomes_do_not_differ() -> None:
    assert differences(_outcome(), _outcome()) == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"figures": (Figure(name="relative_l2", value=0.00342 * (1 + 1e-8)), Figure(name="rows", value=128))},
        {"figures": (Figure(name="relative_l2", value=0.00342), Figure(name="rows", value=128.0))},
        {"summary": "relative L2 0.00343 over 128 rows"},
    ],
)
def test_what_another_library_version_may_change_is_no_difference(changes: dict[str, Any]) -> None:
    assert differences(_outcome(), _outcome(**changes)) == ()


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"status": Status.FAIL, "next_step": "mend it"}, "status is PASS"),
        ({"tier": Tier.RANK}, "tier is smoke"),
        ({"summary": "relative L2 0.00342 over 129 rows"}, "summary says"),
        ({"summary": "relative L2 0.00352 over 128 rows"}, "summary says"),
        ({"summary": "relative L1 0.00342 over 128 rows"}, "summary says"),
        ({"control": CONTROL.model_copy(update={"kind": "planted"})}, "control is poison"),
        ({"control": CONTROL.model_copy(update={"observed": "nothing"})}, "control.observed"),
        (
            {"figures": (Figure(name="relative_l2", value=0.00343), Figure(name="rows", value=128))},
            "relative_l2",
        ),
        (
            {"figures": (Figure(name="relative_l2", value=0.00342), Figure(name="rows", value=127))},
            "rows.value",
        ),
        ({"figures": (Figure(name="relative_l2", value=0.00342),)}, "figures are"),
        (
            {
                "figures": (
                    Figure(name="relative_l2", value=None, missing="?"),
                    Figure(name="rows", value=128),
                )
            },
            "relative_l2.value",
        ),
    ],
)
def test_every_part_of_an_outcome_is_compared(changes: dict[str, Any], word: str) -> None:
    assert any(word in difference for difference in differences(_outcome(), _outcome(**changes)))
