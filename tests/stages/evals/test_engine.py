"""Inside a real engine: the path by three witnesses, the switch off, and numbers held to stock's spread."""

from typing import Any

import pytest

from harness.domain.check import Check, Outcome, Samples, SampleTable, StageName, Status
from harness.domain.machine import Tier
from harness.engines.measured import MeasuredEngine
from harness.stages.evals.engine_sampling import engine_tables
from harness.stages.evals.judging import judge

CHECK = Check(
    id="evals/engine/inside", stage=StageName.EVALS, proves="the path", subject="engine", cost_s=1,
    tier=Tier.RANK, parameters=(("batches", "1"), ("kind", "engine"), ("told", "1")),
)  # fmt: skip
KERNELS = {"stock": ("marlin", "attn_res"), "optimised": ("experts", "mix")}


def engine(arm: str, shift: float, **changed: Any) -> MeasuredEngine:
    """One request, the prompt's step and two decode steps of which the second has three likely tokens, one of
    them moved; three kernels a step where the arm is the candidate's.
    """
    is_own = arm in ("optimised", "poison")
    first, later = {7: -0.5, 8: -1.0}, {1: -1.0, 2: -2.0 - shift, 3: -3.0}
    kernels, us = (3, 80.0) if is_own else (5, 120.0)
    told: dict[str, Any] = {
        "selected": {"decode": arm},
        "forced": {1: {"top": [[first, later, later]], "ids": [[4, 5, 6]], "is_forced": True,
                       "launches": [4, 2] if is_own else []}},
        "cut": {1: {"layers": [(0, 0, "kda_moe", kernels, us), (0, 1, "model", kernels, us + 10)],
                    "names": [(name, 2, 9.0) for name in KERNELS["optimised" if is_own else "stock"]]}},
        "replays": {1: {"all_us": [us - 1, us, us + 1]}},
        "steps": {1: {"all_us": [3000.0]}},
        "decisions": [(1, "optimised", "taken"), (1, "stock", "a piecewise graph")] if is_own else [],
    }  # fmt: skip
    return MeasuredEngine.model_validate(told | changed)


def arms(**changed: MeasuredEngine) -> dict[str, MeasuredEngine]:
    """Stock's own spread is 0.3 nats on average, ours 0.2, the poisoned arm's 3."""
    found = {
        "stock": engine("stock", 0.0), "optimised": engine("optimised", 0.6),
        "switch_off": engine("switch_off", 0.0), "spread": engine("spread", 0.9),
        "poison": engine("poison", 9.0),
    }  # fmt: skip
    return found | changed


def outcome(found: dict[str, MeasuredEngine]) -> Outcome:
    tables = engine_tables(found, {"stock": "--model /models/private/k3"}, {1})
    return judge(CHECK, Samples(check=CHECK.id, tier=Tier.RANK, tables=tables))


def test_arms_on_the_path_and_within_stocks_spread_pass_with_their_gains() -> None:
    found = outcome(arms())
    assert found.status is Status.PASS
    assert found.summary == (
        "every decode step is the optimised path's; log-probabilities part from stock's by 0.2 nats at "
        "batch 1 (0.65 allowed); batches 1"
    )
    assert found.control is not None
    assert found.control.observed == "3 nats at batch 1, over 0.65"
    figures = {figure.name: (figure.value, figure.note) for figure in found.figures}
    assert figures["kda_moe_gain.b1"] == (1.5, "120.0 and 80.0 us; 5.0 and 3.0 kernels")
    assert figures["graph_gain.b1"] == (1.5, "120.0 and 80.0 us; no profiler")
    assert figures["path_share"] == (1.0, "of batches 1")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"decisions": [(1, "stock", "rows")]}, "batch 1: the dispatcher took no step"),
        ({"cut": {}}, "6 launches were counted in 2 steps, and the profile shows no kernels a step"),
        (
            {"cut": {1: {"layers": [(0, 0, "model", 3, 9.0)], "names": [("marlin", 1, 1.0)]}}},
            "batch 1: stock's kernel marlin runs in the optimised steps",
        ),
        (
            {"cut": {1: {"layers": [(0, 0, "model", 4, 9.0)], "names": [("mix", 1, 1.0)]}}},
            "the profile shows 4 kernels a step",
        ),
    ],
)  # fmt: skip
def test_a_witness_that_does_not_see_the_path_makes_it_no_evidence(changed: Any, words: str) -> None:
    found = outcome(arms(optimised=engine("optimised", 0.6, **changed)))
    assert found.status is Status.NO_EVIDENCE
    assert words in found.summary


def test_a_switch_that_changes_stock_when_off_fails() -> None:
    found = outcome(arms(switch_off=engine("switch_off", 0.001)))
    assert found.status is Status.FAIL
    assert found.summary == "with the switch off log-probabilities part from stock's by 0.001"


def test_log_probabilities_beyond_stocks_spread_fail() -> None:
    found = outcome(arms(optimised=engine("optimised", 2.1)))
    assert found.status is Status.FAIL
    assert found.summary == "log-probabilities part from stock's by 0.7 nats on average at batch 1, over 0.65"


def test_without_stocks_own_spread_nothing_is_proved() -> None:
    found = arms()
    del found["spread"]
    assert outcome(found).status is Status.NO_EVIDENCE


def test_a_poisoned_arm_that_stays_near_takes_the_pass_away() -> None:
    found = outcome(arms(poison=engine("poison", 0.6)))
    assert found.status is Status.NO_EVIDENCE
    assert "the control did not fail (0.2 nats at batch 1, over 0.65)" in found.summary


def test_arms_along_other_texts_are_invalid() -> None:
    forced = {"top": [[{7: -0.5}]], "ids": [[9]], "is_forced": True}
    found = outcome(arms(spread=engine("spread", 0.9, forced={1: forced})))
    assert found.status is Status.INVALID
    assert "the spread engine was not forced along stock's text at batch 1" in found.summary


def test_no_folder_of_the_machine_travels_with_the_samples() -> None:
    tables = {t.name: t for t in engine_tables(arms(), {"stock": "--model /models/private/k3"}, {1})}
    assert ("stock", "arguments", "--model .../k3") in tables["settings"].rows


def test_tables_of_another_shape_are_invalid() -> None:
    table = SampleTable(name="told", columns=("arm",), rows=(("stock",),))
    found = judge(CHECK, Samples(check=CHECK.id, tier=Tier.RANK, tables=(table,)))
    assert found.status is Status.INVALID
