"""The bundles that lie in this repository: whole for ever, and confirmed by the code here or told apart.

A bundle is bound to the code that made it, and code moves on; so none of these tests asks for equal digests.
What must always hold is that the files are those of the run, and that a bundle which this code plans or
judges otherwise is never called verified, and says which harness made it. `make example` makes the example
anew.
"""

from pathlib import Path

import pytest

from harness.cli.gate import gate_submissions, judge_of, replan_of
from harness.documents import load_policy_set
from harness.domain.bundle import BundleState, Verification
from harness.domain.resources import data_folder
from harness.domain.verdict import Verdict
from harness.engines.packs import harness_digest
from harness.evidence.pack import bundle_folder
from harness.evidence.verify import conclusion, verify

BUNDLES = data_folder("bundles")
EXAMPLE = BUNDLES / "examples" / "smoke.tar.zst"
FOR_EVER = (
    "tree",
    "manifest",
    "listing",
    "digests",
    "schemas",
    "binding",
    "outcomes",
    "samples",
    "attestation",
)


CUT_SHORT: frozenset[str] = frozenset()
"""Runs whose machine went before every check was sampled: their bundles say so, and count for less."""


def _verified(path: Path) -> Verification:
    with bundle_folder(path) as folder:
        return verify(folder, judge_of(folder), replan_of())


@pytest.mark.parametrize("path", sorted(BUNDLES.rglob("*.tar.zst")), ids=lambda path: path.stem)
def test_a_committed_bundle_is_whole_and_confirmed_or_names_the_harness_that_made_it(path: Path) -> None:
    result = _verified(path)
    steps = [step for step in result.steps if step.name in FOR_EVER]
    assert [step.name for step in steps if step.problems or step.differing] == []
    is_cut_short = path.stem in CUT_SHORT
    assert [step.name for step in steps if step.missing] == ["outcomes"] * is_cut_short
    if is_cut_short:
        assert result.state is BundleState.INCOMPLETE
    elif result.state is not BundleState.VERIFIED:
        assert result.state is BundleState.UNCONFIRMED
        assert str(result.made_with)[:12] in conclusion(result)
        is_same_harness = result.made_with == harness_digest()
        assert not is_same_harness or "another version of its pack" in conclusion(result)


@pytest.fixture(scope="module")
def verdict() -> Verdict:
    return gate_submissions([EXAMPLE], load_policy_set("smoke"))[0]


def test_the_gate_admits_the_example_or_says_which_checks_this_code_asks_and_the_example_lacks(
    verdict: Verdict,
) -> None:
    (use,) = verdict.bundles
    assert verdict.exit_code in (0, 1)
    if verdict.exit_code == 1:
        is_of_other_demands = bool(use.refused) or use.state is BundleState.UNCONFIRMED
        assert is_of_other_demands
        assert all(not row.is_met or row.passed == row.checks for row in verdict.rows)
        assert not any(status in ("FAIL", "INVALID") for row in verdict.rows for status, _ in row.statuses)


def test_the_example_holds_evidence_of_every_stage(verdict: Verdict) -> None:
    assert {row.stage.value for row in verdict.rows} == {
        "isolation", "audit", "kernels", "coverage", "evals", "sweep",
    }  # fmt: skip
