"""Whole layers whose ranks are real GPUs and meet through exchange kernels, beside the same layers without.

    torchrun --nproc_per_node=N -m k3_decode.peers.bench_rank_layers --kind kda --batch 1 8 64 --out FILE

Shards of TP N (or of `--tp`, wider than the ranks that are there: the shapes of a larger group, exchanged
between these; its other ranks' columns stay what a step of the layout `whole` left, so only times and the
layout `whole` say something). Router and latent projections sharded too. Arms, each a CUDA graph of the same
layers:
`exchanged`, all meetings by exchange kernels (`collectives/exchanged.py`); `fused`, the attention's by the
fused exchange (`fused_chain.py`); `alone`, the same launches without them, a rank by itself;
`exchanged_whole` and `nccl`, the layout `whole` with exchanges and with NCCL's all-reduces. Ranks start a
sample together on the device, and of each sample the slowest rank counts. Before that the layers' output of
`exchanged` is compared with the same forward whose meetings go through torch.distributed in rank order, with
that of `fused`, and between ranks.
"""

import argparse
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from k3_decode.bound_layers import ChainOptions, Layout
from k3_decode.collectives import Exchange, run_alone, run_distributed
from k3_decode.collectives.exchanged import Exchanged
from k3_decode.collectives.groups import ExchangeGroup, symmetric
from k3_decode.collectives.meetings import meet_distributed
from k3_decode.context_share import ContextShare, shared_step
from k3_decode.fused_chain import FusedChain
from k3_decode.kernel_objects import use_objects
from k3_decode.layers import LayerChain
from k3_decode.op_table import OpTable, load_ops
from k3_decode.overlap import Schedule, overlap_of
from k3_decode.peers.bench_exchange import time_arms
from k3_decode.peers.layer_arms import FIRST_LAYER, Case, Memory, draw_layer, make_memory
from k3_decode.peers.layer_slice import sharing
from k3_decode.rank_weights import LayerWeights, MoeWeights
from k3_decode.shapes import K3

__all__ = ["Arm", "Bench", "call_of", "main", "ranked"]

LAYERS = 4
SEED = 7
PAGE_BYTES = 64 * 576 * 2
Driver = Callable[[Exchange], torch.Tensor]


def ranked(layer: LayerWeights, rank: int) -> LayerWeights:
    """A layer whose replicated weights are the same on all ranks and whose parts of sums are not."""
    ffn, attention = layer.ffn, layer.attention
    assert isinstance(ffn, MoeWeights)
    return replace(
        layer,
        attention=replace(attention, out_proj=attention.out_proj.roll(rank, 0)),
        ffn=replace(ffn, w2=ffn.w2.roll(rank, 0), shared_down=ffn.shared_down.roll(rank, 0)),
    )


class Arm:
    """The layers with one way to meet."""

    def __init__(
        self, layers: list[LayerWeights], case: Case, memory: Memory, table: OpTable, rank: int,
        layout: Layout, drive: Driver, fused: ExchangeGroup | None = None, schedule: Schedule = overlap_of,
        context_ranks: int = 1,
    ) -> None:  # fmt: skip
        options = ChainOptions(
            max_rows=case.requests, rank=rank, first_layer=FIRST_LAYER, layout=layout,
            exchange_slots=len(layers), schedule=schedule, context_ranks=context_ranks,
        )  # fmt: skip
        sizes = (layers, case.shapes, memory.caches, table, options)
        self.chain = LayerChain(*sizes) if fused is None else FusedChain(*sizes, fused)
        self._memory, self._drive = memory, drive
        self._use = self.chain.views(case.requests)
        self._use["blocks"].copy_(memory.blocks)

    def step(self) -> torch.Tensor:
        """The last layer's output [B, hidden]; the stream begins anew."""
        use = self._use
        use["prefix_a"].copy_(self._memory.embedding)
        return self._drive(
            self.chain.forward(use, use["prefix_a"], use["prefix_b"], self._memory.delta, self._memory.step)
        )

    def experts(self) -> int:
        """Distinct experts that the last layer's tokens chose, which decides how many bytes it reads."""
        return int(self._use["ids"].unique().numel())


def _by_nccl(forward: Exchange) -> torch.Tensor:
    """Reductions in place by NCCL; the layout `whole` has no other meetings."""
    answer: torch.Tensor | None = None
    while True:
        try:
            mine = next(forward) if answer is None else forward.send(answer)
        except StopIteration as end:
            result: torch.Tensor = end.value
            return result
        distributed.all_reduce(mine.part)
        answer = mine.part


class Bench:
    """The layers of one kind on this rank."""

    def __init__(self, kind: str, layers: int, group: ExchangeGroup, tp: int | None = None) -> None:
        self.kind, self.group, self.device = kind, group, group.mailboxes.device
        self.ranks, self.rank = group.layout.ranks, group.first_rank
        self.tp = tp or self.ranks
        """Of the shards' shapes."""
        self.table = sharing(load_ops("cute", Case(kind, self.tp, 1).shapes, self.device))
        generator = torch.Generator(self.device).manual_seed(SEED)
        shapes = Case(kind, self.tp, 1).shapes
        self.layers = [ranked(draw_layer(kind, shapes, generator), self.rank) for _ in range(layers)]
        self.launches = torch.zeros(16, dtype=torch.int32, device=self.device)
        self.pool: torch.Tensor | None = None
        if kind == "mla":
            self.pool = torch.empty((2**31 // PAGE_BYTES, 64, 576), dtype=torch.bfloat16, device=self.device)
            self.pool.normal_(generator=generator)

    def arm(
        self, case: Case, layout: Layout, drive: Driver, fused: ExchangeGroup | None = None,
        schedule: Schedule = overlap_of,
    ) -> Arm:  # fmt: skip
        """Equal memories in every arm and on every rank."""
        generator = torch.Generator(self.device).manual_seed(SEED + 1)
        memory = make_memory(case, len(self.layers), self.pool, generator)
        return Arm(self.layers, case, memory, self.table, self.rank, layout, drive, fused, schedule)

    def divided(self, case: Case, drive: Driver, fused: ExchangeGroup | None = None) -> Arm:
        """An arm over this rank's share of every context, in the pages that the whole one begins with."""
        generator = torch.Generator(self.device).manual_seed(SEED + 1)
        memory = make_memory(case, len(self.layers), self.pool, generator)
        share = ContextShare(self.ranks, self.rank)
        pages = memory.step.block_table[:, : -(-memory.step.block_table.shape[1] // self.ranks)]
        memory = replace(memory, step=shared_step(memory.step, share, pages.contiguous()))
        return Arm(
            self.layers, case, memory, self.table, self.rank, "sharded", drive, fused,
            context_ranks=self.ranks,
        )  # fmt: skip

    def _make_room(self, case: Case) -> None:
        """Pages that no two layers share: each layer's step writes, and what it writes must stay its own."""
        pages = len(self.layers) * case.requests * -(-case.context // 64) + len(self.layers) + 1
        if self.pool is not None and len(self.pool) < 2 * pages:
            self.pool = torch.empty((2 * pages, 64, 576), dtype=torch.bfloat16, device=self.device)
            self.pool.normal_(generator=torch.Generator(self.device).manual_seed(SEED + 2))

    def context_cell(self, case: Case) -> dict[str, Any]:
        """MLA layers over whole contexts on every rank, and over contexts that ranks divide: partials sent as
        they are merged, or by NCCL and merged then.
        """
        self._make_room(case)
        exchanged = Exchanged(self.group, self.launches, meet_distributed)
        fused, apart = self.divided(case, exchanged.run, self.group), self.divided(case, exchanged.run)
        out, again, wanted = (arm.step().clone() for arm in (fused, fused, apart))
        arms = {
            "whole_context": self.arm(case, "sharded", exchanged.run, self.group),
            "divided": fused, "divided_by_nccl": apart,
        }  # fmt: skip
        samples = time_arms({name: call_of(arm) for name, arm in arms.items()}, self.group, 1)
        self.group.require_sound()
        us = {name: [one / len(self.layers) for one in found] for name, found in samples.items()}
        return {
            "cell": "divided_context", "kind": case.kind, "tp": self.tp, "dcp": self.ranks,
            "rows": case.requests, "context": case.context, "layers": len(self.layers),
            "is_finite": bool(out.isfinite().all()), "differing_twice": int((out != again).sum()),
            "relative_difference": float((out.double() - wanted.double()).norm() / wanted.double().norm()),
            "us": {name: round(statistics.median(found), 2) for name, found in us.items()}, "samples": us,
        }  # fmt: skip

    def _repeats(self, case: Case, layout: Layout) -> dict[str, int]:
        """Values that differ between two equal runs, by the way ranks meet: the kernels' own doing."""
        found = {}
        drivers: dict[str, Driver] = {
            "exchanged": Exchanged(self.group, self.launches).run, "distributed": run_distributed,
            "alone": run_alone,
        }  # fmt: skip
        for name, drive in drivers.items():
            first, second = (self.arm(case, layout, drive).step().clone() for _ in range(2))
            found[f"differing_{name}_twice"] = int((first != second).sum())
        return found

    def _fill_peers(self, arms: list[Arm], exchanged: Arm) -> None:
        """Ranks without peers find in their buffers what peers sent in a step like their own, so that their
        tokens choose as many experts.
        """
        exchanged.step()
        for arm in arms:
            for name in ("logits", "latent", "ffn"):
                arm.chain.buffers[name].copy_(exchanged.chain.buffers[name])

    def cell(self, case: Case) -> dict[str, Any]:
        """Agreement, then times of every arm."""
        exchanged = Exchanged(self.group, self.launches)
        is_whole_group = self.tp == self.ranks
        layout: Layout = "sharded" if is_whole_group else "whole"
        out = self.arm(case, layout, exchanged.run).step().clone()
        fused = self.arm(case, layout, exchanged.run, self.group).step().clone()
        torch.cuda.synchronize()
        self.group.require_sound()
        wanted = self.arm(case, layout, run_distributed).step().clone()
        every = [torch.empty_like(out) for _ in range(self.ranks)]
        distributed.all_gather(every, out)
        difference = (out.double() - wanted.double()).norm() / wanted.double().norm()
        record: dict[str, Any] = {
            "cell": "layers", "kind": case.kind, "tp": self.tp, "ranks": self.ranks, "layout": layout,
            "rows": case.requests, "context": case.context, "layers": len(self.layers),
            "is_finite": bool(out.isfinite().all()),
            "differing": int((out != wanted).sum()), "relative_difference": float(difference),
            "differing_rows": int((out != wanted).any(1).sum()), **self._repeats(case, layout),
            "differing_fused": int((fused != out).sum()),
            "ranks_agree": all(torch.equal(every[0], other) for other in every),
        }  # fmt: skip
        arms = {
            "fused": self.arm(case, "sharded", exchanged.run, self.group),
            "exchanged": self.arm(case, "sharded", exchanged.run),
            "alone": self.arm(case, "sharded", run_alone),
            "exchanged_whole": self.arm(case, "whole", exchanged.run),
            "nccl": self.arm(case, "whole", _by_nccl),
        }
        calls = {name: call_of(arm) for name, arm in arms.items()}
        if is_whole_group:
            self._fill_peers([arms["alone"]], arms["exchanged"])
        else:
            self._fill_peers(
                [arms[name] for name in ("fused", "exchanged", "alone")], arms["exchanged_whole"]
            )
        samples = time_arms(calls, self.group, 1)
        self.group.require_sound()
        per_layer = {name: [us / len(self.layers) for us in found] for name, found in samples.items()}
        record["us"] = {name: round(statistics.median(found), 2) for name, found in per_layer.items()}
        record["samples"] = per_layer
        record["exchanges"] = int(self.launches[14])
        record["experts"] = {name: arm.experts() for name, arm in arms.items()}
        return record


def call_of(arm: Arm) -> Callable[[int], None]:
    """One pass through the arm's layers, whatever its number; the result lies in the arm's buffers."""

    def call(_number: int) -> None:
        arm.step()

    return call


def main(argv: list[str] | None = None) -> int:
    """Measure; see the module."""
    parser = argparse.ArgumentParser(
        prog="python -m k3_decode.peers.bench_rank_layers", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--kind", nargs="+", default=["kda"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument(
        "--divided", action="store_true", help="of MLA: contexts that the ranks divide, beside whole ones"
    )
    parser.add_argument("--tp", type=int, help="of the shards; default: the ranks that are there")
    parser.add_argument("--objects", type=Path, help="compiled kernels (kernel_objects.py)")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(argv)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    distributed.init_process_group("nccl", device_id=device)
    lines: list[str] = []
    with nullcontext() if asked.objects is None else use_objects(asked.objects), torch.no_grad():
        _measure_all(asked, device, lines)
    distributed.destroy_process_group()
    if asked.out is not None and int(os.environ["RANK"]) == 0:
        asked.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


def _measure_all(asked: argparse.Namespace, device: torch.device, lines: list[str]) -> None:
    group = symmetric(distributed.group.WORLD, 64 * (K3.hidden + K3.latent) * 2, device)
    for kind in asked.kind:
        begun = time.perf_counter()
        bench = Bench(kind, asked.layers, group, asked.tp)
        torch.cuda.synchronize()
        drawn_s = round(time.perf_counter() - begun, 1)
        for rows in asked.batch:
            try:
                case = Case(kind, bench.tp, rows, asked.context if kind == "mla" else 0)
                record = bench.context_cell(case) if asked.divided else bench.cell(case)
            except Exception as error:  # noqa: BLE001 - the next cell still runs; the record tells
                traceback.print_exc(limit=-4, file=sys.stdout)
                record = {"cell": "layers", "kind": kind, "rows": rows, "error": str(error)[-300:]}
            lines.append(json.dumps(record))
            if group.first_rank == 0:
                shown = {name: value for name, value in record.items() if name != "samples"}
                sys.stdout.write(json.dumps(shown | {"drawn_s": drawn_s}) + "\n")
                sys.stdout.flush()
        del bench
        torch.cuda.empty_cache()
    group.close()


if __name__ == "__main__":
    sys.exit(main())
