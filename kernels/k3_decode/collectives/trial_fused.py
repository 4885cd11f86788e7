"""Fused exchanges against the separate kernels that they replace, bit for bit, and against float64.

    python -m k3_decode.collectives.trial_fused --ranks 2 4 8 16 --out FILE      ranks played on one GPU
    torchrun --nproc_per_node=N -m k3_decode.collectives.trial_fused --out FILE  N real GPUs

Every process makes all ranks' inputs from seeds, so that it knows by itself what its ranks must get. The last
case is the control and must fail. One JSON line a case; exit code 1 when one did not end as it should.
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

from k3_decode.collectives import trial_context
from k3_decode.collectives.groups import ExchangeError, ExchangeGroup, played, symmetric
from k3_decode.collectives.trial import ABORT_LOOKS, CONTROL, of_all_ranks
from k3_decode.collectives.trial_bench import Bench, Case, compiled_ahead, write_lines
from k3_decode.cute.attn_res import attn_res
from k3_decode.cute.attn_res_allreduce import attn_res_allreduce
from k3_decode.cute.exchange import exchange
from k3_decode.cute.exchange_parts import exchange_parts
from k3_decode.cute.moe_exchange import moe_exchange
from k3_decode.cute.oproj_allreduce import oproj_allreduce
from k3_decode.cute.projection import projection
from k3_decode.kernel_objects import recorded_forms
from k3_decode.ops.attn_res import oracle
from k3_decode.ops.exchange import gathered, rank_ordered_sum
from k3_decode.shapes import K3

__all__ = ["main", "run_cases"]

BLOCKS = 8
PLAYED_ROWS = 48
"""Rows of all played ranks together that a fused launch can hold at once."""
ROOM_BYTES = 64 * (K3.heads // 2) * ((K3.kv_lora + K3.qk_rope) * 2 + 8)
"""A part of 64 rows of queries of two ranks' heads, the largest of all."""
EPS = 1e-5


def residual(has_part: bool, is_two_stage: bool, count: int, restarts: bool) -> Case:
    """All-reduce, AttnRes and norm in one launch; the parts sent by it or by the output projection."""

    def run(bench: Bench, rows: int) -> int:
        hidden, group, channels = K3.hidden, bench.group, K3.rank(bench.ranks).channels
        score = bench.bf16(hidden, scale=hidden**-0.5).float()
        norm = bench.bf16(hidden, scale=0.2) + 1
        wrong = 0
        for _ in range(bench.turns):
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
        for _ in range(bench.turns):
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
    for _ in range(bench.turns):
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
    for _ in range(bench.turns):
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
    **trial_context.CASES,
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
    group = make(ROOM_BYTES)
    runs = [(name, case, rows) for name, case in CASES.items() for rows in _row_counts(group, name)]
    with recorded_forms() as forms:
        for _, case, rows in runs:
            case(Bench(group, rows, turns=1), rows)
    with compiled_ahead(forms, group.process_group):
        return _run_all(group, runs, log)


def _run_all(
    group: ExchangeGroup, runs: list[tuple[str, Case, int]], log: Callable[[dict[str, Any]], None]
) -> bool:
    is_right = True
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
    write_lines(asked.out, lines)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
