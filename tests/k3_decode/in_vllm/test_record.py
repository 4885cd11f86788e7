"""The committed record of a run inside vLLM: its tables are what its measurements amount to."""

from pathlib import Path
from typing import Any

import pytest
from k3_decode.in_vllm.compare import load_arms, render_table, summarise

from harness.domain.check import Status
from harness.evidence.pack import bundle_folder
from harness.evidence.reader import open_bundle
from harness.stages.evals import judge

RECORD = Path(__file__).parents[3] / "bundles" / "h200-vllm"


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return summarise(load_arms(RECORD / "engines"))


def test_the_readme_shows_the_tables_that_the_measurements_give(found: dict[str, Any]) -> None:
    rows = set((RECORD / "README.md").read_text(encoding="utf-8").splitlines())
    missing = [row for row in render_table(found).splitlines() if row and row not in rows]
    assert missing == []


def test_every_batch_took_the_path_and_no_other_arm_launched_its_kernels(found: dict[str, Any]) -> None:
    assert set(found["launches"]["optimised"]) == {"1", "8"}
    assert all(count > 0 for count in found["launches"]["optimised"].values())
    assert found["launches"]["stock"] == found["launches"]["switch_off"] == {}


def test_with_the_switch_off_one_request_has_stocks_log_probabilities_to_the_bit(
    found: dict[str, Any],
) -> None:
    assert found["agreement"]["switch_off"]["1"]["largest"] == 0.0


def test_log_probabilities_are_as_near_to_stock_as_stocks_other_backends(found: dict[str, Any]) -> None:
    for rows in ("1", "8"):
        ours, stock, poison = (
            found["agreement"][name][rows] for name in ("optimised", "spread_other", "poison")
        )
        assert ours["mean"] <= stock["mean"]
        assert ours["shared"] >= stock["shared"]
        assert poison["mean"] > 3 * stock["mean"]


def test_the_bundle_of_engines_passes_and_says_how_its_samples_were_made() -> None:
    with bundle_folder(RECORD / "engine.tar.zst") as folder:
        bundle = open_bundle(folder)
        (check,) = bundle.plan.checks
        samples = bundle.samples(check.id)
    assert samples is not None
    assert judge(check, samples).status is Status.PASS
    settings = samples.table("settings")
    assert settings is not None
    told = {str(row["value"]) for row in settings.records() if row["name"] == "worker"}
    assert [word.partition(" was ended at its time limit")[0] for word in told] == ["the worker"]
