"""Gathers and transposes of parts, and the MoE tail's sums: the kernels' source on overlapping threads."""

from typing import Any

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL (nvidia-cutlass-dsl) is not installed")

import torch
from k3_decode.cute import exchange_parts, moe_exchange
from k3_decode.ops.exchange import gathered, rank_ordered_sum, transposed
from k3_decode.ops.mailbox import MailboxLayout

from tests.k3_decode.cute.concurrent import Device

RANKS, ROWS = 4, 2


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (exchange_parts, moe_exchange):
        monkeypatch.setattr(module, "THREADS", 3)


def _bf16(*shape: int, seed: int) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    values[..., ::7] = -0.0
    return values


def _words(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().view(torch.int32)


def _exchange(device: Device, part: torch.Tensor, extra: torch.Tensor, is_transpose: bool) -> Any:
    """Both outputs for bf16 `part` [R,D,B,W] and fp32 `extra` [R,D,B,T]."""
    width, extra_width = part.shape[3] // 8, extra.shape[3]
    out = torch.zeros((RANKS, RANKS, ROWS, part.shape[3] // 2), dtype=torch.int32)
    extra_out = torch.zeros((RANKS, RANKS, ROWS, extra_width), dtype=torch.int32)
    placed = [device.memory.place(t) for t in (_words(part), _words(extra), out, extra_out)]
    tensors = (
        *placed[:2], device.mailboxes[0], device.reach, device.control, *placed[2:], device.launches,
    )  # fmt: skip
    constants = (RANKS, width, extra_width, device.layout.part_bytes, is_transpose, 0)
    device.run(exchange_parts, "_exchange_parts", tensors, constants, 2)
    received = device.memory.read(placed[2]).view(torch.bfloat16)
    return received, device.memory.read(placed[3]).view(torch.float32)


def test_everyone_gets_every_ranks_columns_and_scores_in_both_epochs() -> None:
    device = Device(RANKS, ROWS * (16 * 2 + 3 * 4) + 8)
    for seed in range(3):
        part = _bf16(RANKS, 1, ROWS, 16, seed=seed)
        scores = torch.randn(RANKS, 1, ROWS, 3, generator=torch.Generator().manual_seed(seed))
        scores[0, 0, 0] = torch.tensor([-0.0, torch.inf, -torch.inf])
        out, scores_out = _exchange(device, part, scores, False)
        whole = gathered(part[:, 0])
        assert all(torch.equal(rank.transpose(0, 1).flatten(1), whole) for rank in out)
        assert all(torch.equal(rank.view(torch.int32), scores[:, 0].view(torch.int32)) for rank in scores_out)


def test_each_owner_gets_what_every_rank_made_for_it() -> None:
    device = Device(RANKS, 256)
    partial = _bf16(RANKS, RANKS, ROWS, 16, seed=5)
    lse = torch.randn(RANKS, RANKS, ROWS, 1, generator=torch.Generator().manual_seed(5))
    lse[1] = -torch.inf
    out, lse_out = _exchange(device, partial, lse, True)
    assert torch.equal(out, transposed(partial))
    assert torch.equal(lse_out, lse.transpose(0, 1))


def test_the_moe_tail_adds_latents_everywhere_and_shared_columns_at_their_owner() -> None:
    device = Device(RANKS, 512)
    for seed in range(3):
        latent, shared = _bf16(RANKS, ROWS, 16, seed=seed), _bf16(RANKS, ROWS, 32, seed=seed + 9)
        latent_out, shared_out = torch.zeros_like(latent), torch.zeros((RANKS, ROWS, 8), dtype=torch.bfloat16)
        placed = [device.memory.place(t) for t in (latent, shared, latent_out, shared_out)]
        tensors = (
            *placed[:2], device.mailboxes[0], device.reach, device.control, *placed[2:], device.launches,
        )  # fmt: skip
        constants = (RANKS, 2, 4, device.layout.part_bytes, 0)
        device.run(moe_exchange, "_exchange_tail", tensors, constants, 2)
        assert all(torch.equal(rank, rank_ordered_sum(latent)) for rank in device.memory.read(placed[2]))
        own = rank_ordered_sum(shared).view(ROWS, RANKS, 8).transpose(0, 1)
        assert torch.equal(device.memory.read(placed[3]), own)


def test_what_does_not_fit_is_refused() -> None:
    part, nothing = torch.zeros((2, 1, 3, 8), dtype=torch.int32), torch.zeros(1)
    group: dict[str, Any] = {
        "mailbox": nothing, "reach": nothing, "control": nothing, "launches": nothing,
        "layout": MailboxLayout(2, 64), "first_rank": 0, "limit": 1,
    }  # fmt: skip
    with pytest.raises(ValueError, match="3 rows of 8 \\+ 0 words need 96 bytes of 64"):
        exchange_parts.exchange_parts(part=part, extra=None, out=part, extra_out=None, **group)
    rows = torch.zeros((2, 3, 16), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="3 rows of 16 \\+ 16 columns need 192 bytes of 64"):
        moe_exchange.moe_exchange(latent=rows, shared=rows, latent_out=rows, shared_out=rows, **group)
