"""Drafts of servers: read from their command line, told, and held to their label and to the claim."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from harness.documents import load_claim
from harness.engines.served import Acceptance, ServedArm, ServerSettings
from harness.engines.speculation import speculative_of
from harness.stages.evals.opening import claim_objection

CLAIM = load_claim(Path(__file__).parents[2] / "kernels" / "k3_decode" / "claims" / "vllm_k3_gb300.yaml")
DSPARK = {
    "method": "dspark", "num_speculative_tokens": 7, "draft_sample_method": "probabilistic",
    "rejection_sample_method": "block",
}  # fmt: skip
FORCED = DSPARK | {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 6}
MEASURED = Acceptance(label="measured", drafts=7, golden=3.78)


def settings(config: dict[str, object], acceptance: Acceptance | None) -> ServerSettings:
    """Two arms that draft alike."""
    return ServerSettings(
        model="m", served_name="m", common=(f"--speculative-config={json.dumps(config)}",),
        optimised=ServedArm(arguments=("--fast",)), acceptance=acceptance,
    )  # fmt: skip


def test_a_command_line_says_how_drafts_come_about() -> None:
    found = speculative_of(["serve", "--speculative-config", json.dumps(FORCED)])
    assert found is not None
    assert found.words() == "dspark, 7 drafts, probabilistic drafting, synthetic rejection of length 6"
    assert speculative_of(["serve", "m"]) is None
    assert settings(DSPARK, MEASURED).speculation("optimised") == (
        "dspark, 7 drafts, probabilistic drafting, block rejection"
    )


def test_an_option_is_read_in_either_spelling() -> None:
    found = speculative_of(["--speculative_config", json.dumps(FORCED)])
    assert found is not None
    assert found.is_synthetic


@pytest.mark.parametrize(
    "arguments",
    [
        ("--speculative-config.num_speculative_tokens", "7"),
        ("--speculative-conf={}",),
        ("--config", "a.yaml"),
    ],
)
def test_drafts_that_are_said_in_a_form_that_is_not_read_are_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="is not read here"):
        speculative_of(arguments)


@pytest.mark.parametrize(
    ("config", "acceptance", "words"),
    [
        (DSPARK, None, "say under `acceptance` how it comes about"),
        (FORCED, MEASURED, "acceptance is labelled measured, and the servers reject by 'synthetic'"),
        (
            DSPARK,
            Acceptance(label="synthetic", drafts=7),
            "labelled synthetic, and the servers reject by 'block'",
        ),
        (DSPARK, Acceptance(label="measured", drafts=3), "said of 3 drafts, and the servers make 7"),
        ({"method": "dspark"}, MEASURED, "must be JSON with num_speculative_tokens"),
    ],
)
def test_an_acceptance_whose_label_does_not_fit_is_refused(
    config: dict[str, object], acceptance: Acceptance | None, words: str
) -> None:
    with pytest.raises(ValidationError, match=words):
        settings(config, acceptance)


def test_arms_that_draft_in_unlike_ways_are_refused() -> None:
    drafts = f"--speculative-config={json.dumps(DSPARK)}"
    with pytest.raises(
        ValidationError, match="the arms draft in unlike ways: no drafts and dspark, 7 drafts"
    ):
        ServerSettings(model="m", served_name="m", optimised=ServedArm(arguments=(drafts,)))


@pytest.mark.parametrize(
    ("length", "words"),
    [
        (3.70, "3.700 (measured, in line with the golden 3.78 for 7 drafts)"),
        (2.00, "2.000 (measured, below the golden 3.78 for 7 drafts)"),
    ],
)
def test_a_measured_length_is_held_to_the_golden_curve(length: float, words: str) -> None:
    assert MEASURED.words(length) == words


def test_a_forced_length_is_never_compared() -> None:
    assert Acceptance(label="synthetic", drafts=7).words(6.0) == "6.000 (synthetic)"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, None),
        ({"method": "mtp"}, "the servers draft by mtp where the claim says dspark"),
        ({"draft_sample_method": "greedy"}, "greedy where the claim says probabilistic"),
        ({"rejection_sample_method": "standard"}, "standard where the claim says block"),
        ({"num_speculative_tokens": 8}, "the servers make 8 drafts, and the claim takes 0 to 7"),
        (FORCED, None),
        (FORCED | {"synthetic_acceptance_length": 5}, "the claim forces no acceptance of 5"),
    ],
)
def test_servers_draft_as_the_claim_says(changed: dict[str, object], words: str | None) -> None:
    config = DSPARK | changed
    is_forced = config["rejection_sample_method"] == "synthetic"
    told = Acceptance.model_validate(
        {"label": "synthetic" if is_forced else "measured", "drafts": config["num_speculative_tokens"]}
    )
    found = claim_objection(settings(config, told), CLAIM)
    assert found is None if words is None else found is not None and words in found
