"""What exchanges between ranks compute: the bits that every rank must get, and float64 truth.

Not an op of the step's table: an exchange serves ops. Parts are [R, ...], rank r's in place r.
"""

import torch

__all__ = ["SENT_AS", "gathered", "rank_ordered_sum", "sent", "sum_bound", "transposed", "true_sum"]

SENT_AS = "-0.0 counts as 0.0"


def sent(parts: torch.Tensor) -> torch.Tensor:
    """Parts as they arrive: bf16 -0.0 has become 0.0."""
    return torch.where(parts == 0, torch.zeros_like(parts), parts)


def rank_ordered_sum(parts: torch.Tensor) -> torch.Tensor:
    """bf16 parts [R, ...] added in fp32 by ascending rank and rounded once: what every rank gets, bit for bit
    but for the payload of a NaN.
    """
    total = sent(parts[0]).float()
    for part in parts[1:]:
        total = total + sent(part).float()
    return total.to(parts.dtype)


def true_sum(parts: torch.Tensor) -> torch.Tensor:
    """The sum in float64."""
    return parts.double().sum(0)


def sum_bound(parts: torch.Tensor) -> torch.Tensor:
    """Most by which a rank-ordered fp32 sum, rounded once to bf16, may differ from the true one: half an ulp
    of bf16, and an fp32 rounding for each addition at the size of the parts.
    """
    largest = parts.double().abs().sum(0)
    return true_sum(parts).abs() * 2.0**-8 + largest * (len(parts) * 2.0**-23) + 2.0**-133


def gathered(parts: torch.Tensor) -> torch.Tensor:
    """Parts [R, B, W] side by side along the last axis."""
    return torch.cat(tuple(sent(parts)), dim=-1)


def transposed(parts: torch.Tensor) -> torch.Tensor:
    """Of [R, R, ...], what rank s made for rank d in place [s, d]: [d, s], what rank d gets from rank s."""
    return sent(parts).transpose(0, 1)
