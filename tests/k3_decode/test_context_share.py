"""A context divided over ranks: which token lies where, and a step over shares beside one over the whole."""

from dataclasses import replace

import pytest
import torch
from k3_decode.collectives import run_ranks
from k3_decode.context_share import ContextShare, shared_step
from k3_decode.decode import OptimisedStep
from k3_decode.op_table import load_ops
from k3_decode.ops.mla_query import PAGE_SIZE
from k3_decode.shapes import NANO
from k3_decode.state import KdaState, Pool, RankCaches, Request, StepInputs

from tests.k3_decode.models import ranks

CPU = torch.device("cpu")
LENGTHS = (1, 130, 70)
"""One token alone: the other rank's shard of that request is empty."""


@pytest.mark.parametrize(("count", "interleave"), [(2, 1), (3, 1), (4, 16), (8, 64)])
def test_every_position_lies_on_one_rank_and_shares_have_no_holes(count: int, interleave: int) -> None:
    positions = torch.arange(300)
    shares = [ContextShare(count, rank, interleave) for rank in range(count)]
    here = torch.stack([share.is_here(positions) for share in shares])
    assert (here.sum(0) == 1).all()
    for share, mine in zip(shares, here, strict=True):
        assert share.place(positions[mine]).tolist() == list(range(int(mine.sum())))
        assert share.count(torch.arange(301)).tolist() == [0, *mine.cumsum(0).tolist()]


def test_positions_go_round_over_the_ranks_by_the_interleave() -> None:
    share = ContextShare(2, 1, 4)
    assert share.is_here(torch.arange(16)).tolist() == ([False] * 4 + [True] * 4) * 2
    assert share.count(torch.tensor([3, 6, 8, 13])).tolist() == [0, 2, 4, 5]


def _served(rows: int) -> tuple[Pool, list[Request]]:
    """Requests of nano on two ranks with random contexts, the same cache on both."""
    shapes = [weights.shapes for weights in ranks("nano", 2)]
    pool = Pool(shapes, max_requests=3, max_context=192, drafts=1, kv_dtype="bf16", device=CPU)
    generator = torch.Generator().manual_seed(8)
    for layer in pool.caches[0].mla:
        content = torch.randn(pool.caches[0].mla[layer].shape, generator=generator).to(torch.bfloat16)
        for caches in pool.caches:
            caches.mla[layer].copy_(content)
    requests = [pool.admit() for _ in LENGTHS]
    for request, length in zip(requests, LENGTHS, strict=True):
        pool.reserve(request, length + rows)
        request.length = length
    return pool, requests


def _local(
    caches: RankCaches, requests: list[Request], share: ContextShare
) -> tuple[RankCaches, torch.Tensor]:
    """A rank's share of the caches, in pages 1, 2, ... of its own, and their table."""
    table = torch.arange(1, 1 + 2 * len(requests), dtype=torch.int32).view(len(requests), 2)
    mla = {}
    for layer, cache in caches.mla.items():
        mine = torch.full((1 + table.numel(), *cache.shape[1:]), torch.nan, dtype=cache.dtype)
        for request, pages in zip(requests, table, strict=True):
            positions = torch.arange(request.length)
            positions = positions[share.is_here(positions)]
            rows = cache[request.pages].flatten(0, 1)[positions]
            mine[pages.long()] = torch.nan
            mine.flatten(0, 1)[int(pages[0]) * PAGE_SIZE :][: len(rows)] = rows
        mla[layer] = mine
    kda = {layer: KdaState(one.conv.clone(), one.recurrent.clone()) for layer, one in caches.kda.items()}
    return RankCaches(kda, mla, caches.kv_scale), table


def _logits(rows: int, interleave: int | None, shift: int = 0) -> torch.Tensor:
    """Of one step of `rows` rows a request; over shares of the context where an interleave is given."""
    pool, requests = _served(rows)
    step = pool.step_inputs(requests, rows)
    tokens = torch.arange(len(requests) * rows) * 7 + 3
    table = load_ops("cpu", NANO.rank(2), CPU)
    forwards = []
    for weights, caches in zip(ranks("nano", 2), pool.caches, strict=True):
        mine: StepInputs = step
        if interleave is not None:
            share = ContextShare(2, weights.rank, interleave)
            caches, pages = _local(caches, requests, share)
            mine = shared_step(step, share, pages)
            mine = replace(mine, lengths=(mine.lengths - shift).clamp(min=0))
        optimised = OptimisedStep(weights, caches, table, 6, context_ranks=1 if interleave is None else 2)
        forwards.append(optimised.forward(tokens, mine))
    with torch.no_grad():
        return run_ranks(forwards)[0].clone()


@pytest.mark.parametrize(("rows", "interleave"), [(1, 1), (2, 1), (1, 16)])
def test_a_step_over_shares_of_the_context_gives_what_the_whole_context_gives(
    rows: int, interleave: int
) -> None:
    """Only roundings of partial attentions to bf16 may differ; a token left out shows far above them."""
    whole = _logits(rows, None)
    error = (_logits(rows, interleave) - whole).abs().max() / whole.std()
    control = (_logits(rows, interleave, shift=1) - whole).abs().max() / whole.std()
    assert error < 0.03
    assert control > 4 * error


def test_a_context_divided_over_some_of_the_ranks_is_refused() -> None:
    pool, _requests = _served(1)
    with pytest.raises(ValueError, match="a context divided over 3 of 2 ranks"):
        OptimisedStep(
            ranks("nano", 2)[0], pool.caches[0], load_ops("cpu", NANO.rank(2), CPU), 3, context_ranks=3
        )
