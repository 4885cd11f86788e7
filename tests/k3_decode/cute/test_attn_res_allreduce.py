"""The fused all-reduce: what it refuses; on a GPU every fused exchange against the kernels it replaces."""

from typing import Any

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL (nvidia-cutlass-dsl) is not installed")

import torch
from k3_decode.cute import attn_res_allreduce as op
from k3_decode.cute import exchange_multicast, oproj_allreduce
from k3_decode.ops.mailbox import MailboxLayout

NOTHING = torch.zeros(1)
GROUP: dict[str, Any] = {
    "mailbox": NOTHING, "control": NOTHING, "launches": NOTHING, "layout": MailboxLayout(2, 64),
    "first_rank": 0, "limit": 1,
}  # fmt: skip


def _residual(local: int, rows: int, columns: int, blocks_read: int) -> dict[str, Any]:
    prefix = torch.zeros((local, rows, columns), dtype=torch.bfloat16)
    blocks = torch.zeros((local, rows, 2, columns), dtype=torch.bfloat16)
    return {
        "part": None, "prefix": prefix, "blocks": blocks, "blocks_read": blocks_read, "write_index": -1,
        "score_weight": NOTHING, "norm_weight": NOTHING, "out": prefix, "eps": 1e-5, "reach": NOTHING,
    }  # fmt: skip


def test_more_blocks_than_there_are_are_refused() -> None:
    with pytest.raises(ValueError, match="blocks_read 3 outside 0\\.\\.2"):
        op.attn_res_allreduce(**_residual(1, 1, 16, 3), **GROUP)


def test_rows_beyond_the_mailbox_are_refused() -> None:
    with pytest.raises(ValueError, match="3 rows of 16 columns need 96 bytes of 64"):
        op.attn_res_allreduce(**_residual(1, 3, 16, 1), **GROUP)


def test_rows_that_leave_threads_of_a_warp_without_columns_are_refused() -> None:
    """Such a thread looks once for words that nobody holds back for it, and its NaN would reach the sums."""
    assert op.serves(7168)
    assert not op.serves(128)
    room = {**GROUP, "layout": MailboxLayout(2, 4096)}
    with pytest.raises(ValueError, match="128 columns do not fill whole warps"):
        op.attn_res_allreduce(**_residual(1, 3, 128, 1), **room)


def test_played_ranks_that_cannot_all_be_on_the_device_are_refused() -> None:
    wide = {**GROUP, "layout": MailboxLayout(16, 64 * 7168 * 2)}
    with pytest.raises(ValueError, match="16 local ranks of 4 rows do not fit a device at once"):
        op.attn_res_allreduce(**_residual(16, 4, 7168, 1), **wide)


def test_a_projection_of_too_many_rows_is_refused() -> None:
    x, weight = torch.zeros((65, 32)), torch.zeros((16, 32))
    with pytest.raises(ValueError, match="65 rows outside 1\\.\\.64"):
        oproj_allreduce.oproj_allreduce(x=x, weight=weight, reach=NOTHING, **GROUP)


def test_multicast_is_refused_where_the_group_has_none() -> None:
    part = torch.zeros((1, 16), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="no multicast address; use `exchange`"):
        exchange_multicast.exchange_multicast(part=part, multicast=None, out=part, **GROUP)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_fused_exchanges_give_the_bits_of_the_separate_kernels_on_the_gpu(ranks: int, gpu: Any) -> None:
    from k3_decode.collectives.groups import played
    from k3_decode.collectives.trial_fused import run_cases

    records: list[dict[str, Any]] = []
    assert run_cases(lambda room: played(ranks, room, gpu), records.append)
    assert {record["wrong_words"] for record in records if not record["is_control"]} == {0}


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_exchanges_stay_right_under_skew_replays_and_aborts_on_the_gpu(ranks: int, gpu: Any) -> None:
    from k3_decode.collectives.groups import played
    from k3_decode.collectives.trial import run_trials

    assert run_trials(lambda room: played(ranks, room, gpu), 500, lambda _: None)
