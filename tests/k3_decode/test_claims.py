"""Every claim of the folder is whole, and templates promise nothing that was not published."""

from pathlib import Path

import pytest

from harness.documents.load import load_claim

FOLDER = Path(__file__).parents[2] / "kernels" / "k3_decode" / "claims"
FILES = sorted(p.name for p in FOLDER.glob("*.yaml"))


def test_the_announced_systems_have_a_claim_each() -> None:
    assert FILES == [
        "deepseek_v41_flash.yaml",
        "glm_53.yaml",
        "h200_rank.yaml",
        "muse_spark.yaml",
        "vllm_k3_gb300.yaml",
    ]


@pytest.mark.parametrize("name", FILES)
def test_a_claim_is_whole_opt_in_and_keeps_every_feature(name: str) -> None:
    claim = load_claim(FOLDER / name)
    assert claim.name in (name.removesuffix(".yaml"), "k3_decode_h200_rank")
    assert claim.switch.default == claim.switch.off
    assert len(claim.features) == 5


def test_published_gains_of_vllms_path_are_promised_as_steps_without_speculation() -> None:
    claim = load_claim(FOLDER / "vllm_k3_gb300.yaml")
    assert {(p.tp, p.batch): p.ratio for p in claim.speed} == {
        (8, 1): 1.58,
        (8, 64): 1.31,
        (16, 1): 1.88,
        (16, 64): 1.62,
    }
    assert {p.conditions for p in claim.speed} == {"no speculation, one NVLink domain with multicast"}


def test_a_figure_with_synthetic_acceptance_is_no_promise() -> None:
    assert load_claim(FOLDER / "muse_spark.yaml").speed == ()
