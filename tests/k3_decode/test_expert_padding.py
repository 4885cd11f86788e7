"""Experts without the padding of their shard."""

import torch
from k3_decode.expert_padding import without_padding
from k3_decode.ops import OPS
from k3_decode.shapes import CANARY, K3


def padded_weights(width: int, padded: int) -> dict[str, torch.Tensor]:
    """Four experts of latent 64 whose columns from `width` on are zero, scales aside."""
    generator = torch.Generator().manual_seed(3)

    def bytes_of(*size: int, low: int = 0, high: int = 256) -> torch.Tensor:
        return torch.randint(low, high, size, generator=generator, dtype=torch.uint8)

    w13, w2 = bytes_of(4, 2 * padded, 32), bytes_of(4, 64, padded // 2)
    w13.view(4, 2, padded, 32)[:, :, width:] = 0x80  # -0 and 0
    w2[..., width // 2 :] = 0
    return {
        "w13": w13, "w13_scale": bytes_of(4, 2 * padded, 2, low=118, high=126),
        "w2": w2, "w2_scale": bytes_of(4, 64, padded // 32, low=118, high=126),
    }  # fmt: skip


def output(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of two tokens with two experts each, in float64."""
    latent = torch.randn(2, 64, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    ids = torch.tensor([[0, 3], [2, 1]], dtype=torch.int32)
    out: torch.Tensor = OPS["experts"].oracle(
        {"latent": latent, "ids": ids, "weights": torch.tensor([[0.25, 0.75], [0.5, 0.5]]), **weights}
    )["out"]
    return out


def test_zero_columns_are_dropped_and_no_sum_changes() -> None:
    weights = padded_weights(32, 64)
    cut = without_padding(weights, 32)
    assert [tuple(cut[name].shape) for name in ("w13", "w13_scale", "w2", "w2_scale")] == [
        (4, 64, 32), (4, 64, 2), (4, 64, 16), (4, 64, 1),
    ]  # fmt: skip
    assert torch.equal(cut["w13"][:, 32:], weights["w13"][:, 64:96])  # up rows follow gate rows
    assert torch.equal(output(cut), output(weights))


def test_columns_that_hold_anything_stay() -> None:
    weights = padded_weights(32, 64)
    weights["w13"][3, 40, 5] = 1
    assert without_padding(weights, 32) is weights


def test_only_k3_at_tp16_has_padding() -> None:
    ranks = [K3.rank(tp) for tp in (1, 8, 16)] + [CANARY.rank(1)]
    assert [(rank.expert_width, rank.expert_inter) for rank in ranks] == [
        (3072, 3072), (384, 384), (192, 256), (CANARY.expert_inter, CANARY.expert_inter),
    ]  # fmt: skip
