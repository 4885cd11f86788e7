"""Whether a reduction over ranks adds what it was given: every rank's part once, rounded once, alike on all
ranks.

The parts are drawn so that a wrong sum shows: one large value and small ones that a running sum in bf16
drops, parts of one sign that no error can cancel, and plain noise. Distances are in units in the last place
of bf16 at the exact sum. Arm `planted` is a sum that rounds after every rank (of two ranks, which round but
once, one that leaves a rank out), and must be seen.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

__all__ = ["observe_sums"]

Row = tuple[str, str, int, float, bool]
ROWS, COLUMNS = 4, 64


def observe_sums(
    reduce: Callable[[Sequence[Any]], Sequence[Any]], ranks: int, seed: int, device: str = "cpu"
) -> Iterator[Row]:
    """(arm, case, rank, worst distance in ulp, whether the rank's sum is rank 0's bit for bit)."""
    for case, parts in _cases(ranks, seed).items():
        exact = torch.stack([part.double() for part in parts]).sum(0)
        scale = torch.stack([part.double().abs() for part in parts]).sum(0)
        sums = [value.cpu() for value in reduce([part.to(device, copy=True) for part in parts])]
        planted = _rounding_sum(parts if ranks > 2 else parts[:-1])
        for arm, found in (("on", sums), ("planted", [planted] * ranks)):
            for rank, value in enumerate(found):
                is_alike = bool(torch.equal(value, found[0]))
                yield arm, case, rank, _ulps(value, exact, scale), is_alike


def _cases(ranks: int, seed: int) -> dict[str, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn(ROWS, COLUMNS, generator=generator)

    large = [normal().abs() + 256.0, *(normal().abs() * 0.2 + 0.5 for _ in range(ranks - 1))]
    return {
        "noise": [normal().bfloat16() for _ in range(ranks)],
        "one_sign": [(normal().abs() + 1).bfloat16() for _ in range(ranks)],
        "small_beside_large": [part.bfloat16() for part in large],
    }


def _rounding_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """A running sum in bf16, in rank order."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _ulps(value: torch.Tensor, exact: torch.Tensor, scale: torch.Tensor) -> float:
    """Largest distance in ulp of bf16 at the exact sum; where the parts cancel, at a 64th of their size, as
    fp32 then has few bits left.
    """
    exponent = torch.floor(torch.log2(torch.maximum(exact.abs(), scale / 64)))
    return float(((value.double() - exact).abs() / torch.exp2(exponent - 7)).max())
