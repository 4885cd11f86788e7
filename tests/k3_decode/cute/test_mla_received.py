"""Decode context parallelism's kernels, sender and receiver: their source in lockstep over a mailbox a rank,
against float64 attention over the whole context; words; refusals.
"""

import math
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL (nvidia-cutlass-dsl) is not installed")

import torch
from k3_decode.cute import mla_send, mla_value, mla_value_received
from k3_decode.cute.variant import COMPILED, DISPATCHED
from k3_decode.ops import OPS
from k3_decode.ops.contract import LAUNCH_SLOTS
from k3_decode.ops.log_base import LogBase
from k3_decode.ops.mailbox import CONTROL_WORDS, SENTINEL, MailboxLayout

from tests.k3_decode.cute.lockstep import run_kernel
from tests.k3_decode.op_errors import deviation

RANKS, OWN, LATENT, V_DIM = 2, 1, 512, 128
HEADS = RANKS * OWN
MARK = SENTINEL - (1 << 32)


class Mail:
    """Mailboxes, controls and counters of ranks that are all here."""

    def __init__(self, rows: int, epoch: int) -> None:
        self.layout = MailboxLayout(RANKS, mla_send.bytes_of(rows, OWN))
        self.boxes = torch.full((RANKS, self.layout.size // 4), MARK, dtype=torch.int32)
        self.reach = torch.arange(RANKS, dtype=torch.int64) * self.layout.size
        self.control = torch.zeros((RANKS, CONTROL_WORDS), dtype=torch.int32)
        self.control[:, 0] = epoch
        self.launches = torch.zeros(LAUNCH_SLOTS, dtype=torch.int32)

    def send(self, partial: torch.Tensor, lse: torch.Tensor, base: LogBase) -> None:
        tensors = [partial, lse, self.boxes, self.reach, self.control, self.launches]
        run_kernel(
            mla_send, "_merge_and_send", [*tensors, 0, math.log2(base), RANKS, self.layout.part_bytes],
            grid=(HEADS, partial.shape[2], RANKS), cluster=1, threads=mla_send.THREADS,
        )  # fmt: skip

    def receive(self, uv: torch.Tensor, gate: torch.Tensor, base: LogBase) -> torch.Tensor:
        out, tokens = torch.full_like(gate, -3.0), mla_value.tokens_of(gate.shape[1])
        tensors = [self.boxes, self.reach, self.control, uv, gate, out, self.launches]
        run_kernel(
            mla_value_received, "_receive_and_project",
            [*tensors, 0, 1, math.log2(base), tokens, RANKS, self.layout.part_bytes],
            grid=(mla_value.CLUSTER, OWN, RANKS), cluster=mla_value.CLUSTER, threads=mla_value.THREADS,
            dynamic_bytes=mla_value_received._shared_bytes(tokens),
        )  # fmt: skip
        return out


def _case(rows: int, splits: int, base: LogBase, empty: str) -> dict[str, torch.Tensor]:
    """What every rank's attention left, and the weights; shards of unlike weight, some without keys."""
    generator = torch.Generator().manual_seed(rows * 100 + splits)
    partial = torch.randn(RANKS, splits, rows, HEADS, LATENT, generator=generator)
    partial[1] *= 8
    lse = torch.randn(RANKS, splits, rows, HEADS, generator=generator) * 4 + 6
    if empty == "rank":
        partial[1], lse[1] = torch.nan, -torch.inf
    if empty == "all":
        partial[:, :, 0], lse[:, :, 0] = torch.nan, -torch.inf
    if empty == "splits":
        partial[0, 0], lse[0, 0] = torch.nan, torch.nan
    partial[:, :, :, :, 3] = -0.0
    return {
        "partial": partial.to(torch.bfloat16),
        "lse": lse / math.log(base),
        "uv": (torch.randn(RANKS, OWN, LATENT, V_DIM, generator=generator) * LATENT**-0.5).to(torch.bfloat16),
        "gate": torch.randn(RANKS, rows, OWN * V_DIM, generator=generator).to(torch.bfloat16),
    }


def _truth(case: dict[str, torch.Tensor], rank: int, base: LogBase) -> torch.Tensor:
    """Float64 values of a rank's heads from every rank's splits at once."""
    mine = slice(rank * OWN, (rank + 1) * OWN)
    found = OPS["mla_value"].oracle(
        {
            "partial": case["partial"][..., mine, :].flatten(0, 1), "uv_weight": case["uv"][rank],
            "partial_lse": case["lse"][..., mine].flatten(0, 1), "gate": case["gate"][rank],
            "lse_base": base,
        }
    )  # fmt: skip
    return found["out"]


@pytest.mark.parametrize(
    ("rows", "splits", "base", "empty", "epoch"),
    [
        (1, 1, LogBase.E, "", 0),
        (2, 3, LogBase.E, "rank", 1),
        (2, 40, LogBase.TWO, "splits", 0),
        (3, 2, LogBase.E, "all", 5),
        (34, 1, LogBase.TWO, "", 2),
    ],
)
def test_the_sources_in_lockstep_agree_with_the_oracle_and_leave_the_mailbox_as_it_was(
    rows: int, splits: int, base: LogBase, empty: str, epoch: int
) -> None:
    mail, case = Mail(rows, epoch), _case(rows, splits, base, empty)
    mail.send(case["partial"], case["lse"], base)
    sent = (mail.boxes != MARK).sum(1) * 4
    assert sent.tolist() == [RANKS * mla_send.bytes_of(rows, OWN)] * RANKS
    out = mail.receive(case["uv"], case["gate"], base)
    for rank in range(RANKS):
        assert deviation(out[rank], _truth(case, rank, base)) < 0.01
        if empty == "all":
            assert not out[rank, 0].any()
    assert (mail.boxes == MARK).all()
    assert mail.launches[14] == 2


def test_the_other_base_gives_other_values() -> None:
    """The control: sums of one base merged as if they were the other's."""
    mail, case = Mail(2, 0), _case(2, 2, LogBase.E, "")
    mail.send(case["partial"], case["lse"], LogBase.E)
    out = mail.receive(case["uv"], case["gate"], LogBase.TWO)
    assert deviation(out[0], _truth(case, 0, LogBase.E)) > 0.01


def test_a_rank_that_sent_nothing_makes_its_rows_nan() -> None:
    mail, case = Mail(1, 0), _case(1, 1, LogBase.E, "")
    mail.send(case["partial"], case["lse"], LogBase.E)
    mail.boxes[1, 7] = MARK  # a word of rank 0's latent in rank 1's mailbox
    out = mail.receive(case["uv"], case["gate"], LogBase.E)
    assert not out[0].isnan().any()
    assert out[1].isnan().all()


def test_what_does_not_fit_is_refused() -> None:
    group: dict[str, Any] = {
        "mailbox": None, "reach": None, "control": None, "launches": None,
        "layout": MailboxLayout(2, 1056), "first_rank": 0, "limit": 1, "lse_base": LogBase.E,
    }  # fmt: skip
    partial = torch.zeros(1, 1, 2, 2, 512, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"2 rows of 2 heads over 2 ranks.* need 2112 bytes of 1056"):
        mla_send.mla_send(partial=partial, partial_lse=partial[..., 0], **group)
    rows = torch.zeros(1, 65, 128, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"65 rows outside 1\.\.64"):
        mla_value_received.mla_value_received(
            uv_weight=torch.zeros(1, 1, 512, 128), gate=rows, out=rows, **group
        )


@pytest.mark.parametrize("architecture", DISPATCHED + COMPILED)
def test_every_variant_has_a_name_of_its_own_and_all_architectures(architecture: str) -> None:
    variants = (*mla_send.variants(), *mla_value_received.variants())
    assert len({variant.name for variant in variants}) == 12
    assert all(architecture in variant.architectures for variant in variants)
