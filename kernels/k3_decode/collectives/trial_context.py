"""Trials of decode context parallelism: queries to everyone, attention of each rank's share of a context, and
partials to the heads' owners, who merge, project and gate them.

Cases of `trial_fused`. Contexts are uneven and shards empty; sums of both bases are merged.
"""

from typing import Any

import torch

from k3_decode.collectives.trial_bench import Bench, Case
from k3_decode.cute.exchange_parts import exchange_parts
from k3_decode.cute.mla_attend import mla_attend
from k3_decode.cute.mla_send import mla_send
from k3_decode.cute.mla_value import mla_value
from k3_decode.cute.mla_value_received import mla_value_received
from k3_decode.ops.exchange import gathered, sent, transposed
from k3_decode.ops.log_base import LogBase
from k3_decode.ops.mla_attend import LSE_BASE
from k3_decode.ops.mla_query import PAGE_SIZE
from k3_decode.ops.mla_value import oracle
from k3_decode.shapes import K3

__all__ = ["CASES"]

SPLITS = 3
"""Of every rank's share, as `mla_attend` leaves them."""
MOST_ERROR = 2.0**-6
"""Of a row, relative: two roundings to bf16, and bf16 products."""


def context_parallel(bench: Bench, rows: int) -> int:
    """Queries of all heads to everyone; partial attentions and their sums to the owners of the heads."""
    heads, width, wrong = K3.heads // bench.ranks, K3.kv_lora + K3.qk_rope, 0
    for _ in range(bench.turns):
        queries = bench.bf16(bench.ranks, rows, heads * width)
        every = bench.poisoned(bench.local, rows, bench.ranks, heads * width)
        exchange_parts(
            part=queries[bench.mine].view(torch.int32).unsqueeze(1), extra=None, extra_out=None,
            out=every.view(torch.int32).transpose(1, 2), launches=bench.launches, **bench.group.arguments(),
        )  # fmt: skip
        wrong += bench.differing(every.flatten(2), gathered(queries).expand(bench.local, -1, -1))
        partial = bench.bf16(bench.ranks, rows, bench.ranks, heads * K3.kv_lora)
        shape = (bench.ranks, rows, bench.ranks, heads)
        lse = torch.randn(shape, generator=bench.generator, device=bench.device)
        lse[-1] = -torch.inf  # a shard without tokens
        lse[0, 0] = torch.nan
        received = bench.poisoned(bench.local, bench.ranks, rows, heads * K3.kv_lora)
        received_lse = bench.poisoned(bench.local, bench.ranks, rows, heads, dtype=torch.float32)
        exchange_parts(
            part=partial[bench.mine].view(torch.int32).transpose(1, 2),
            extra=lse[bench.mine].view(torch.int32).transpose(1, 2),
            out=received.view(torch.int32), extra_out=received_lse.view(torch.int32),
            launches=bench.launches, **bench.group.arguments(),
        )  # fmt: skip
        wrong += bench.differing(received, transposed(partial.transpose(1, 2))[bench.mine])
        wrong += bench.differing(received_lse, lse.transpose(1, 2).transpose(0, 1)[bench.mine])
    return wrong


def values_received(bench: Bench, rows: int) -> int:
    """Partials sent as they are merged, and merged over ranks on arrival with W_UV and gate, against float64;
    the second of two equal exchanges must give the same bits. Both bases, by turns.
    """
    ranks, own, wrong = bench.ranks, K3.heads // bench.ranks, 0
    for turn in range(bench.turns):
        base = LogBase.TWO if turn % 2 else LogBase.E
        partial = bench.bf16(ranks, SPLITS, rows, K3.heads, K3.kv_lora)
        shape = (ranks, SPLITS, rows, K3.heads)
        lse = torch.randn(shape, generator=bench.generator, device=bench.device) * 3 + 6
        lse[-1, :, 0], partial[-1, :, 0] = -torch.inf, torch.nan  # a rank without tokens of the first row
        lse[0, 0], partial[0, 0] = torch.nan, torch.nan
        lse[:, :, rows - 1, ::2], partial[:, :, rows - 1, ::2] = -torch.inf, torch.nan
        uv = bench.bf16(ranks, own, K3.kv_lora, K3.v_dim, scale=K3.kv_lora**-0.5)
        gate = bench.bf16(ranks, rows, own * K3.v_dim)
        outs = []
        for _ in range(2):
            out = bench.poisoned(bench.local, rows, own * K3.v_dim)
            _send_and_receive(bench, partial[bench.mine], lse[bench.mine], uv, gate, base, out)
            outs.append(out)
        wrong += bench.differing(outs[1], outs[0])
        for index in range(bench.local):
            rank = bench.group.first_rank + index
            mine = slice(rank * own, (rank + 1) * own)
            truth = oracle(
                partial=partial[..., mine, :].flatten(0, 1), partial_lse=lse[..., mine].flatten(0, 1),
                uv_weight=uv[rank], gate=gate[rank], lse_base=base,
            )["out"]  # fmt: skip
            wrong += _wrong_rows(outs[0][index], truth)
            heads = outs[0][index, rows - 1].view(own, K3.v_dim)
            wrong += int((heads[rank * own % 2 :: 2] != 0).sum())
    return wrong


def _send_and_receive(
    bench: Bench,
    partial: torch.Tensor,
    lse: torch.Tensor,
    uv: torch.Tensor,
    gate: torch.Tensor,
    base: LogBase,
    out: torch.Tensor,
) -> None:
    """Partials [L,S,B,H,512] of the local ranks to their gated values; weights and gates are all ranks'."""
    group = bench.group.arguments()
    mla_send(partial=partial, partial_lse=lse, lse_base=base, launches=bench.launches, **group)
    mla_value_received(
        uv_weight=uv[bench.mine], gate=gate[bench.mine], lse_base=base, out=out, launches=bench.launches,
        **group,
    )  # fmt: skip


def _wrong_rows(out: torch.Tensor, truth: torch.Tensor) -> int:
    """Rows further from float64 than rounding explains; NaN is one."""
    error = (out.double() - truth).norm(dim=-1)
    return int((~(error <= MOST_ERROR * truth.norm(dim=-1))).sum())


def attention_of_shards(bench: Bench, rows: int) -> int:
    """MLA whose context is divided over the ranks: queries to everyone, attention of each rank's share,
    partials to the heads' owners, and their merge with value projection and gate.

    Position p lies on rank p mod R; the first request has one token, so that all other ranks' shards are
    empty. Compared with one process that holds every shard, bit for bit, and with float64.
    """
    ranks, wrong = bench.ranks, 0
    own, width = K3.heads // ranks, K3.kv_lora + K3.qk_rope
    lengths = [1 + 37 * request for request in range(rows)]
    scale = (K3.qk_nope + K3.qk_rope) ** -0.5
    for _ in range(bench.turns):
        queries = bench.bf16(ranks, rows, own, width)
        keys = [bench.bf16(length, width) for length in lengths]
        uv = bench.bf16(K3.heads, K3.kv_lora, K3.v_dim, scale=K3.kv_lora**-0.5)
        gate = bench.bf16(rows, K3.heads, K3.v_dim)
        every_query = sent(queries).transpose(0, 1).reshape(rows, K3.heads, width)
        partials = [
            _partial(bench, every_query, [k[rank::ranks] for k in keys], scale) for rank in range(ranks)
        ]
        for index in range(bench.local):
            rank = bench.group.first_rank + index
            mine = slice(rank * own, (rank + 1) * own)
            want, out = bench.poisoned(rows, own * K3.v_dim), bench.poisoned(rows, own * K3.v_dim)
            value: dict[str, Any] = {
                "uv_weight": uv[mine].contiguous(), "gate": gate[:, mine].reshape(rows, -1).contiguous(),
                "lse_base": LSE_BASE, "launches": bench.launches,
            }  # fmt: skip
            shards = torch.stack([sent(partial[:, mine]) for partial, _ in partials])
            mla_value(
                partial=shards,
                partial_lse=torch.stack([lse[:, mine] for _, lse in partials]),
                out=want,
                **value,
            )
            truth = _attention(every_query[:, mine], keys, scale, uv[mine], gate[:, mine])
            wrong += _wrong_rows(want, truth)
            if index:
                continue  # the launches below serve all local ranks; compared for the first
            mine_of_all = _own_partials(bench, queries, keys, scale)
            received, received_lse = _exchanged_partials(bench, mine_of_all)
            mla_value(partial=received, partial_lse=received_lse, out=out, **value)
            wrong += bench.differing(out, want)
            outs = bench.poisoned(bench.local, rows, own * K3.v_dim)
            _send_and_receive(
                bench, torch.stack([one for one, _ in mine_of_all])[:, None],
                torch.stack([one for _, one in mine_of_all])[:, None], uv.view(ranks, own, *uv.shape[1:]),
                gate.view(rows, ranks, -1).transpose(0, 1).contiguous(), LSE_BASE, outs,
            )  # fmt: skip
            wrong += _wrong_rows(outs[0], truth)
    return wrong


def _own_partials(
    bench: Bench, queries: torch.Tensor, keys: list[torch.Tensor], scale: float
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Every local rank's attention, over its share, of the queries that all ranks sent."""
    ranks, local, (_, rows, own, width) = bench.ranks, bench.local, queries.shape
    flat = queries.flatten(2)
    every = bench.poisoned(local, rows, ranks, own * width)
    exchange_parts(
        part=flat[bench.mine].view(torch.int32).unsqueeze(1), extra=None, extra_out=None,
        out=every.view(torch.int32).transpose(1, 2), launches=bench.launches, **bench.group.arguments(),
    )  # fmt: skip
    found = []
    for index in range(local):
        rank = bench.group.first_rank + index
        query = every[index].view(rows, K3.heads, width)
        found.append(_partial(bench, query, [k[rank::ranks] for k in keys], scale))
    return found


def _exchanged_partials(
    bench: Bench, mine: list[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """[R, B, H/R, 512] and fp32 [R, B, H/R] that the first local rank gets of all ranks' attentions."""
    ranks, local, rows, own = bench.ranks, bench.local, len(mine[0][0]), K3.heads // bench.ranks
    mixed = torch.stack([partial for partial, _ in mine]).view(local, rows, ranks, own * K3.kv_lora)
    lse = torch.stack([one for _, one in mine]).view(local, rows, ranks, own)
    received = bench.poisoned(local, ranks, rows, own * K3.kv_lora)
    received_lse = bench.poisoned(local, ranks, rows, own, dtype=torch.float32)
    exchange_parts(
        part=mixed.view(torch.int32).transpose(1, 2), extra=lse.view(torch.int32).transpose(1, 2),
        out=received.view(torch.int32), extra_out=received_lse.view(torch.int32),
        launches=bench.launches, **bench.group.arguments(),
    )  # fmt: skip
    return received[0].view(ranks, rows, own, K3.kv_lora), received_lse[0]


def _partial(
    bench: Bench, query: torch.Tensor, keys: list[torch.Tensor], scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 [B, H, 512] and fp32 [B, H]: attention of each request's row over the keys that one rank holds."""
    lengths = [len(one) for one in keys]
    pages = [max(1, -(-length // PAGE_SIZE)) for length in lengths]
    first = [1 + sum(pages[:request]) for request in range(len(pages))]
    cache = torch.full((1 + sum(pages), PAGE_SIZE, query.shape[2]), torch.nan, dtype=query.dtype).to(
        query.device
    )
    table = torch.zeros((len(keys), max(pages)), dtype=torch.int32)
    for request, one in enumerate(keys):
        cache.flatten(0, 1)[first[request] * PAGE_SIZE :][: len(one)] = one
        table[request, : pages[request]] = first[request] + torch.arange(pages[request], dtype=torch.int32)
    out = bench.poisoned(*query.shape[:2], K3.kv_lora)
    lse = bench.poisoned(*query.shape[:2], dtype=torch.float32)
    mla_attend(
        query=query.contiguous(), cache=cache, block_table=table.to(query.device), rows=1, scale=scale,
        lengths=torch.tensor(lengths, dtype=torch.int32).to(query.device), kv_scale=1.0, out=out, lse=lse,
        launches=bench.launches,
    )  # fmt: skip
    return out, lse


def _attention(
    query: torch.Tensor, keys: list[torch.Tensor], scale: float, uv: torch.Tensor, gate: torch.Tensor
) -> torch.Tensor:
    """float64 [B, H x 128] over whole contexts."""
    rows = []
    for one, key, opening in zip(query.double(), keys, gate.double(), strict=True):
        shares = torch.softmax(one @ key.double().T * scale, dim=-1)
        mixed = shares @ key[:, : K3.kv_lora].double()
        rows.append((torch.einsum("hl,hlv->hv", mixed, uv.double()) * torch.sigmoid(opening)).flatten())
    return torch.stack(rows)


CASES: dict[str, Case] = {
    "context_parallel": context_parallel,
    "values_received": values_received,
    "attention_of_shards": attention_of_shards,
}
