"""A chain of layers: sharded layouts, splits of the context, and slices of one rank."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from k3_decode.bound_layers import Layout, share_of
from k3_decode.collectives import Collective, Exchange, run_alone, run_ranks
from k3_decode.decode import OptimisedStep
from k3_decode.op_table import FusedOp, OpTable, load_ops
from k3_decode.shapes import NANO
from k3_decode.state import Pool

from tests.k3_decode.models import ranks

CPU = torch.device("cpu")
TOKENS = torch.tensor([5, 17, 200])


def cpu_table(tp: int) -> OpTable:
    return load_ops("cpu", NANO.rank(tp), CPU)


def step_logits(table: OpTable, tp: int, layout: Layout = "whole") -> torch.Tensor:
    """Logits of a first step of three requests, over `tp` ranks in this process."""
    weights = ranks("nano", tp)
    pool = Pool(
        [w.shapes for w in weights], max_requests=3, max_context=80, drafts=0, kv_dtype="bf16", device=CPU
    )
    requests = [pool.admit() for _ in TOKENS]
    inputs = pool.step_inputs(requests, 1)
    steps = [
        OptimisedStep(w, caches, table, 3, layout) for w, caches in zip(weights, pool.caches, strict=True)
    ]
    with torch.no_grad():
        return run_ranks([step.forward(TOKENS, inputs) for step in steps])[0].clone()


def test_a_sharded_router_and_sharded_latents_give_what_whole_ones_give() -> None:
    """Each rank's columns come from the same rows of weights, so nothing but fp32 summation may differ."""
    whole, sharded = (step_logits(cpu_table(2), 2, layout) for layout in ("whole", "sharded"))
    assert whole.std() > 0.5
    assert (whole - sharded).abs().max() <= 2e-2 * whole.std()


def test_a_rank_keeps_the_rows_of_its_place_alone() -> None:
    assert [share_of(896, 8, rank) for rank in (0, 7)] == [slice(0, 112), slice(784, 896)]


def test_columns_that_ranks_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="10 columns cannot be divided over 4 ranks"):
        share_of(10, 4, 0)


def split_in(parts: int, op: FusedOp) -> FusedOp:
    """Attention that leaves all keys to its second split: the others are empty, with lse -inf and NaN."""

    def run(*, out: torch.Tensor, lse: torch.Tensor, **arguments: Any) -> None:
        assert out.shape[0] == lse.shape[0] == parts
        out.fill_(torch.nan)
        lse.fill_(-torch.inf)
        op.run(out=out[1], lse=lse[1], **arguments)

    return replace(op, run=run, splits_of=lambda _requests, _rows, _heads: parts)


def test_attention_in_three_splits_gives_the_same_step_bit_for_bit() -> None:
    table = cpu_table(1)
    split = {**table, "mla_attend": split_in(3, table["mla_attend"])}
    assert torch.equal(step_logits(table, 1), step_logits(split, 1))


def test_a_rank_alone_keeps_its_sums_and_finds_its_peers_columns_in_the_buffer() -> None:
    def rank(whole: torch.Tensor) -> Exchange:
        mine = yield Collective("reduce", torch.tensor([3.0]))
        whole[:1] = mine
        return (yield Collective("gather", whole[:1], whole))

    assert run_alone(rank(torch.tensor([0.0, 7.0]))).tolist() == [3.0, 7.0]
