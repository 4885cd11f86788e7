"""Claims for a part of the pack's scope."""

from pathlib import Path

import pytest

from harness.documents.load import load_claim
from harness.stages.kernels.planning import edge_cells

PACK = Path(__file__).parents[2] / "kernels" / "k3_decode"


@pytest.mark.parametrize("file", ["h200_rank.yaml"])
def test_a_claim_for_a_part_lies_inside_the_claim_in_force(file: str) -> None:
    whole, part = load_claim(PACK / "claim.yaml"), load_claim(PACK / "claims" / file)
    assert part.pack == whole.pack
    cells = edge_cells(part.envelope, "sm_90a", is_smoke=False)
    assert cells
    assert [cell.label() for cell in cells if not whole.envelope.admits(cell)] == []
