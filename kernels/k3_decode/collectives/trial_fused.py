"""Fused exchanges against the separate kernels that they replace, bit for bit, and against float64.

    python -m k3_decode.collectives.trial_fused --ranks 2 4 8 16 --out FILE      ranks played on one GPU
    torchrun --nproc_per_node=N -m k3_decode.collectives.trial_fused --out FILE  N real GPUs

Every process makes all ranks' inputs from seeds, so that it knows by itself what its ranks must get. The last
case is the control and must fail. One JSON line a case; exit code 1 when one did not end as it should. Long,
as every case is a function over the one bench.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from k3_decode.collectives.groups import ExchangeError, ExchangeGroup, played, symmetric
from k3_decode.collectives.trial import ABORT_LOOKS, CONTROL, of_all_ranks
from k3_decode.cute.attn_res import attn_res
from k3_decode.cute.attn_res_allreduce import attn_res_allreduce
from k3_decode.cute.exchange import exchange
from k3_decode.cute.exchange_parts import exchange_parts
from k3_decode.cute.mla_attend import mla_attend
from k3_decode.cute.mla_value import mla_value
from k3_decode.cute.moe_exchange import moe_exchange
from k3_decode.cute.oproj_allreduce import oproj_allreduce
from k3_decode.cute.projection import projection
from k3_decode.ops.attn_res import oracle
from k3_decode.ops.exchange import gathered, rank_ordered_sum, sent, transposed
from k3_decode.ops.mla_query import PAGE_SIZE
from k3_decode.shapes import K3

__all__ = ["main", "run_cases"]

BLOCKS = 8
TURNS = 4
"""Times that each case runs, so that both epochs and a re-armed slot of each are used."""
PLAYED_ROWS = 48
"""Rows of all played ranks together that a fused launch can hold at once."""
ROOM_BYTES = 64 * (K3.heads // 2) * ((K3.kv_lora + K3.qk_rope) * 2 + 8)
"""A part of 64 rows of queries of two ranks' heads, the largest of all."""
EPS = 1e-5


class Bench:
    """A group and what its cases share."""

    def __init__(self, group: ExchangeGroup, seed: int) -> None:
        self.group, self.device = group, group.mailboxes.device
        self.ranks, self.local = group.layout.ranks, group.local
        self.mine = slice(group.first_rank, group.first_rank + group.local)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.launches = torch.zeros(16, dtype=torch.int32, device=self.device)

    def bf16(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Random values, the same in every process."""
        values = torch.randn(shape, generator=self.generator, device=self.device) * scale
        return values.to(torch.bfloat16)

    def poisoned(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Where a result goes."""
        return torch.full(shape, -3.0, dtype=dtype, device=self.device)

    def differing(self, out: torch.Tensor, want: torch.Tensor) -> int:
        """Words that are not the same bits."""
        kind = torch.int16 if out.element_size() == 2 else torch.int32
        return int((out.contiguous().view(kind) != want.contiguous().view(kind)).sum())


Case = Callable[[Bench, int], int]


def residual(has_part: bool, is_two_stage: bool, count: int, restarts: bool) -> Case:
    """All-reduce, AttnRes and norm in one launch; the parts sent by it or by the output projection."""

    def run(bench: Bench, rows: int) -> int:
        hidden, group, channels = K3.hidden, bench.group, K3.rank(bench.ranks).channels
        score = bench.bf16(hidden, scale=hidden**-0.5).float()
        norm = bench.bf16(hidden, scale=0.2) + 1
        wrong = 0
        for _ in range(TURNS):
            x = bench.bf16(bench.ranks, rows, channels)
            weight = bench.bf16(bench.ranks, hidden, channels, scale=channels**-0.5)
            parts = torch.empty((bench.ranks, rows, hidden), dtype=torch.bfloat16, device=bench.device)
            for rank in range(bench.ranks):
                projection(x=x[rank], weight=weight[rank], out=parts[rank], launches=bench.launches)
            old, blocks = bench.bf16(rows, hidden), bench.bf16(rows, BLOCKS, hidden)
            delta = rank_ordered_sum(parts)
            want = bench.poisoned(rows, hidden)
            want_prefix = delta.clone() if restarts else old.clone()
            arguments: dict[str, Any] = {
                "prefix": want_prefix, "delta": None if restarts else delta, "blocks": blocks,
                "blocks_read": count, "write_index": -1, "score_weight": score, "norm_weight": norm,
                "eps": EPS,
            }  # fmt: skip
            truth = oracle(**arguments)["out"]
            attn_res(**arguments, out=want, launches=bench.launches)
            prefix = old.repeat(bench.local, 1, 1)
            out = bench.poisoned(bench.local, rows, hidden)
            if not has_part:
                for index in range(bench.local):
                    rank = group.first_rank + index
                    oproj_allreduce(
                        x=x[rank], weight=weight[rank], launches=bench.launches, is_two_stage=is_two_stage,
                        **group.of_rank(index),
                    )  # fmt: skip
            attn_res_allreduce(
                part=parts[bench.mine].contiguous() if has_part else None, prefix=prefix,
                blocks=blocks.repeat(bench.local, 1, 1, 1), blocks_read=count, write_index=-1,
                score_weight=score, norm_weight=norm, out=out, eps=EPS, launches=bench.launches,
                is_two_stage=is_two_stage, restarts=restarts, **group.arguments(),
            )  # fmt: skip
            wrong += bench.differing(out, want.expand_as(out)) + bench.differing(
                prefix, want_prefix.expand_as(prefix)
            )
            error = (want.double() - truth).norm(dim=1) / truth.norm(dim=1)
            wrong += int((error > 2.0**-8).sum())
        return wrong

    return run


def in_place(bench: Bench, rows: int) -> int:
    """Sums that overwrite the parts, of hidden rows and of latents."""
    wrong = 0
    for columns in (K3.hidden, K3.latent):
        for _ in range(TURNS):
            parts = bench.bf16(bench.ranks, rows, columns)
            mine = parts[bench.mine].clone()
            for form in ("one_shot", "two_stage"):
                mine.copy_(parts[bench.mine])
                exchange(part=mine, out=mine, launches=bench.launches, form=form, **bench.group.arguments())
                wrong += bench.differing(mine, rank_ordered_sum(parts).expand_as(mine))
    return wrong


def moe_front(bench: Bench, rows: int) -> int:
    """Sharded latents and scores of all ranks, latents written in place among the others' columns."""
    own, scores, wrong = K3.latent // bench.ranks, K3.experts // bench.ranks, 0
    for _ in range(TURNS):
        latents = bench.bf16(bench.ranks, rows, own)
        logits = torch.randn((bench.ranks, rows, scores), generator=bench.generator, device=bench.device)
        logits[0, 0, :3] = torch.tensor([-0.0, torch.inf, torch.nan])
        whole = bench.poisoned(bench.local, rows, bench.ranks, own)
        for index in range(bench.local):
            rank = bench.group.first_rank + index
            whole[index, :, rank] = latents[rank]
        out = whole.view(torch.int32).transpose(1, 2)
        part = torch.stack([out[index, bench.group.first_rank + index] for index in range(bench.local)])
        if bench.local == 1:
            part = out[:, bench.group.first_rank]
        logits_out = bench.poisoned(bench.local, bench.ranks, rows, scores, dtype=torch.float32)
        exchange_parts(
            part=part.unsqueeze(1), extra=logits[bench.mine].view(torch.int32).unsqueeze(1), out=out,
            extra_out=logits_out.view(torch.int32), launches=bench.launches, **bench.group.arguments(),
        )  # fmt: skip
        wrong += bench.differing(whole.flatten(2), gathered(latents).expand(bench.local, -1, -1))
        wrong += bench.differing(logits_out, logits.expand_as(logits_out))
    return wrong


def moe_tail(bench: Bench, rows: int) -> int:
    """The latent's sum and the rank's columns of the shared expert's, then all columns to everyone."""
    own, wrong = K3.hidden // bench.ranks, 0
    for _ in range(TURNS):
        latent, shared = bench.bf16(bench.ranks, rows, K3.latent), bench.bf16(bench.ranks, rows, K3.hidden)
        latent_out = bench.poisoned(bench.local, rows, K3.latent)
        shared_out = bench.poisoned(bench.local, rows, own)
        moe_exchange(
            latent=latent[bench.mine], shared=shared[bench.mine], latent_out=latent_out,
            shared_out=shared_out, launches=bench.launches, **bench.group.arguments(),
        )  # fmt: skip
        whole = bench.poisoned(bench.local, rows, bench.ranks, own)
        exchange_parts(
            part=shared_out.view(torch.int32).unsqueeze(1), extra=None, extra_out=None,
            out=whole.view(torch.int32).transpose(1, 2), launches=bench.launches, **bench.group.arguments(),
        )  # fmt: skip
        wrong += bench.differing(latent_out, rank_ordered_sum(latent).expand_as(latent_out))
        total = rank_ordered_sum(shared)
        wrong += bench.differing(whole.flatten(2), total.expand(bench.local, -1, -1))
    return wrong


def context_parallel(bench: Bench, rows: int) -> int:
    """Queries of all heads to everyone; partial attentions and their sums to the owners of the heads."""
    heads, width, wrong = K3.heads // bench.ranks, K3.kv_lora + K3.qk_rope, 0
    for _ in range(TURNS):
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
    for _ in range(TURNS):
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
                "launches": bench.launches,
            }  # fmt: skip
            shards = torch.stack([sent(partial[:, mine]) for partial, _ in partials])
            mla_value(
                partial=shards,
                partial_lse=torch.stack([lse[:, mine] for _, lse in partials]),
                out=want,
                **value,
            )
            truth = _attention(every_query[:, mine], keys, scale, uv[mine], gate[:, mine])
            wrong += int(((want.double() - truth).norm(dim=1) > 2.0**-6 * truth.norm(dim=1)).sum())
            if index:
                continue  # the launches below serve all local ranks; compared for the first
            received, received_lse = _exchanged_partials(bench, queries, keys, scale, partials)
            mla_value(partial=received, partial_lse=received_lse, out=out, **value)
            wrong += bench.differing(out, want)
    return wrong


def _exchanged_partials(
    bench: Bench,
    queries: torch.Tensor,
    keys: list[torch.Tensor],
    scale: float,
    partials: list[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """[R, B, H/R, 512] and fp32 [R, B, H/R] that the first local rank gets of all ranks' attentions."""
    ranks, local, (_, rows, own, width) = bench.ranks, bench.local, queries.shape
    flat = queries.flatten(2)
    every = bench.poisoned(local, rows, ranks, own * width)
    exchange_parts(
        part=flat[bench.mine].view(torch.int32).unsqueeze(1), extra=None, extra_out=None,
        out=every.view(torch.int32).transpose(1, 2), launches=bench.launches, **bench.group.arguments(),
    )  # fmt: skip
    mine = []
    for index in range(local):
        rank = bench.group.first_rank + index
        query = every[index].view(rows, K3.heads, width)
        mine.append(_partial(bench, query, [k[rank::ranks] for k in keys], scale))
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
    "attn_res_send": residual(True, False, 4, False),
    "attn_res_send_two_stage": residual(True, True, 4, False),
    "attn_res_send_restart": residual(True, False, 1, True),
    "oproj_attn_res": residual(False, False, 8, False),
    "oproj_attn_res_two_stage": residual(False, True, 4, False),
    "oproj_attn_res_no_blocks": residual(False, False, 0, False),
    "in_place": in_place,
    "moe_front": moe_front,
    "moe_tail": moe_tail,
    "context_parallel": context_parallel,
    "attention_of_shards": attention_of_shards,
}


def wrong_epoch(bench: Bench, rows: int) -> int:
    """The control: rank 0 counts one epoch more than its peers, which must show."""
    group = bench.group
    kept, group.limit = group.limit, ABORT_LOOKS
    group.reset()
    if group.first_rank == 0:
        group.control[0, 0] = 1
    try:
        return moe_tail(bench, rows)
    finally:
        group.limit = kept


def run_cases(make: Callable[[int], ExchangeGroup], log: Callable[[dict[str, Any]], None]) -> bool:
    """Every case at several row counts, then the control; whether all went well."""
    group, is_right = make(ROOM_BYTES), True
    runs = [(name, case, rows) for name, case in CASES.items() for rows in _row_counts(group, name)]
    for name, case, rows in [*runs, (CONTROL, wrong_epoch, 1)]:
        bench, failed, wrong = Bench(group, rows), "", 0
        try:
            wrong = case(bench, rows)
            group.require_sound()
        except ExchangeError as error:
            failed = str(error)[:300]
        wrong, failed = of_all_ranks(group, wrong, failed)
        if failed:
            group.reset()
        is_right &= bool(wrong or failed) == (name == CONTROL)
        log(
            {
                "ranks": group.layout.ranks, "played": group.process_group is None,
                "trial": f"{name} of {rows} rows", "wrong_words": wrong, "fault": failed,
                "is_control": name == CONTROL,
            }
        )  # fmt: skip
    group.close()
    return is_right


def _row_counts(group: ExchangeGroup, name: str) -> Iterator[int]:
    most = 64 if group.local == 1 or "attn_res" not in name else PLAYED_ROWS // group.local
    yield from sorted({min(rows, most) for rows in (1, 3, 8, 17, 64)})


def main(argv: list[str] | None = None) -> int:
    """Run the cases; see the module."""
    parser = argparse.ArgumentParser(
        prog="python -m k3_decode.collectives.trial_fused", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16], help="of played ranks")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(argv)
    lines: list[str] = []

    def log(record: dict[str, Any]) -> None:
        lines.append(json.dumps(record))
        if int(os.environ.get("RANK", "0")) == 0:
            sys.stdout.write(lines[-1] + "\n")
            sys.stdout.flush()

    if "LOCAL_RANK" in os.environ:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        distributed.init_process_group("nccl", device_id=device)
        world = distributed.group.WORLD
        is_right = run_cases(lambda room: symmetric(world, room, device), log)
        distributed.destroy_process_group()
    else:
        device = torch.device("cuda")
        rights = [
            run_cases(lambda room, ranks=ranks: played(ranks, room, device), log)  # type: ignore[misc]
            for ranks in asked.ranks
        ]
        is_right = all(rights)
    if asked.out is not None and int(os.environ.get("RANK", "0")) == 0:
        asked.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
