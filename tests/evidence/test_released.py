"""Bundles as earlier versions wrote them: each stays readable, and is told apart where it shows less.

One archive below `released/` for each form that bundles ever had. Never make one anew: they are what readers
out there hold.
"""

import shutil
from pathlib import Path

import pytest

from harness.cli.gate import verdict_words
from harness.domain.bundle import BundleState
from harness.domain.check import Status
from harness.evidence.pack import bundle_folder
from harness.evidence.reader import open_bundle
from harness.evidence.verify import Replanned, verify
from harness.gate import decide, load_submission
from harness.history import open_index
from harness.report import build_view, render_html
from tests.evidence.example_judge import judge
from tests.evidence.example_run import example_policy

RELEASED = Path(__file__).parent / "released"
FIRST = RELEASED / "schema-1-samples-without-plan.tar.zst"


@pytest.mark.parametrize("archive", sorted(RELEASED.glob("*.tar.zst")), ids=lambda path: path.stem)
def test_a_released_bundle_is_opened_with_its_samples_rendered_and_indexed(
    archive: Path, tmp_path: Path
) -> None:
    with bundle_folder(archive) as folder:
        bundle = open_bundle(folder)
        rows = {o.check: bundle.samples(o.check) for o in bundle.outcomes if o.status is not Status.SKIPPED}
        page = render_html(build_view(bundle))
    assert len(bundle.outcomes) == len(bundle.plan.checks) == 7
    assert all(samples is not None and samples.tables for samples in rows.values())
    assert all(check.id in page for check in bundle.plan.checks)
    (tmp_path / "bundles").mkdir()
    shutil.copy(archive, tmp_path / "bundles")
    with open_index(tmp_path / "index.duckdb") as index:
        assert index.refresh(tmp_path / "bundles").bundles == 1
        assert index.rows("SELECT check_id, status FROM outcome ORDER BY check_id") == sorted(
            (o.check, o.status.value) for o in bundle.outcomes
        )


def test_samples_from_before_they_named_their_plan_are_unconfirmed_and_count_for_nothing() -> None:
    with bundle_folder(FIRST) as folder:
        found = verify(folder, judge, lambda plan: Replanned("9" * 64, plan.pack_digest, plan.checks))
        submission = load_submission(
            folder, judge, lambda plan: Replanned("9" * 64, plan.pack_digest, plan.checks)
        )
    assert found.state is BundleState.UNCONFIRMED
    assert [p.message[:26] for p in found.problems] == ["its samples name no plan, "] * 6
    assert [o.check for o in submission.outcomes] == ["evals/aime25/canary"]
    assert verdict_words(decide([submission], example_policy())).startswith("rejected")
