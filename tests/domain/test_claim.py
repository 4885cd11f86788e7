"""What a claim says of drafts, and that a claim without it is what it was."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from harness.documents import load_claim
from harness.domain.claim import Claim, Speculation

FOLDER = Path(__file__).parents[2] / "kernels" / "k3_decode"
K3 = load_claim(FOLDER / "claim.yaml")


def test_the_golden_curve_is_read_by_drafts() -> None:
    assert K3.speculation is not None
    assert [K3.speculation.golden_length(drafts) for drafts in (0, 1, 7, 8, 9)] == [
        None,
        1.84,
        3.78,
        3.88,
        None,
    ]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"golden": (1.5, 3.2), "golden_source": "x"}, "3.2 tokens a step for 2 drafts; 1 to 3 are possible"),
        ({"golden": (1.5,)}, "needs golden_source"),
        ({"synthetic_lengths": (0.5,)}, "a verify step keeps one token"),
    ],
)
def test_impossible_acceptances_are_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Speculation.model_validate(fields)


def test_a_claim_without_drafts_says_nothing_of_them() -> None:
    plain = K3.model_copy(update={"speculation": None})
    assert "speculation" not in plain.model_dump(mode="json")
    assert Claim.from_json(plain.canonical()) == plain
    assert Claim.from_json(K3.canonical()) == K3
    none = {"drafts": {"min": 0, "max": 0}}
    told = K3.model_dump(mode="json")
    with pytest.raises(ValidationError, match="drafts admits none"):
        Claim.model_validate(told | {"envelope": told["envelope"] | none})
