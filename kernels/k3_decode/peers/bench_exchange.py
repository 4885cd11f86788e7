"""What exchanges cost: alone, and fused behind the output projection, beside what they replace, in one run.

    torchrun --nproc_per_node=N -m k3_decode.peers.bench_exchange --out FILE    N real GPUs
    python -m k3_decode.peers.bench_exchange --ranks 2 4 8 16 --out FILE        ranks played on one GPU

Played ranks share one memory and no link: their figures tell what the kernels' own steps cost (launch,
control, send, wait, sum) and nothing about NVLink; a group of one rank tells what the fused form costs
beside no exchange at all. Every arm is a CUDA graph of `CALLS` calls, weights rotate so that none stays in
L2, and of each sample the slowest rank counts. One JSON line a cell, with every sample.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed

from k3_decode.collectives.groups import ExchangeGroup, played, symmetric
from k3_decode.cute.attn_res import attn_res
from k3_decode.cute.attn_res_allreduce import attn_res_allreduce
from k3_decode.cute.exchange import exchange
from k3_decode.cute.oproj_allreduce import oproj_allreduce
from k3_decode.cute.projection import projection
from k3_decode.kernel_objects import use_objects
from k3_decode.peers.exchange_flags import exchange_flags
from k3_decode.shapes import K3

__all__ = ["main"]

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CALLS, REPLAYS, SAMPLES = 24, 5, 15
HEAD_START_CYCLES = 400_000
"""For which the device sleeps while the host asks for a sample: 0.2 ms."""
WEIGHT_SETS = 8
BLOCKS = 4
Arm = Callable[[int], None]
"""One call; its number in the graph picks the weights."""


def time_arms(arms: dict[str, Arm], group: ExchangeGroup, calls: int = CALLS) -> dict[str, list[float]]:
    """Microseconds a call of each arm, of each sample the slowest rank's; arms take turns in a sample, so
    that clocks drift for all.

    Ranks meet on the device before the span begins, when the host has already asked for all of it, so that
    neither a late host nor a late rank is in the time.
    """
    is_shared = group.process_group is not None
    graphs = {name: _graph(arm, calls) for name, arm in arms.items()}
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call,unused-ignore]
    us: dict[str, list[float]] = {name: [] for name in arms}
    for sample in range(SAMPLES):
        names = list(arms) if sample % 2 else list(reversed(arms))
        for name in names:
            torch.cuda.synchronize()
            torch.cuda._sleep(HEAD_START_CYCLES)  # type: ignore[no-untyped-call,unused-ignore]
            if is_shared:
                group.handle.barrier()
            start.record()
            for _ in range(REPLAYS):
                graphs[name].replay()
            stop.record()
            torch.cuda.synchronize()
            us[name].append(start.elapsed_time(stop) * 1e3 / (REPLAYS * calls))
    if is_shared:
        for name, samples in us.items():
            slowest = torch.tensor(samples, dtype=torch.float64, device="cuda")
            distributed.all_reduce(slowest, op=distributed.ReduceOp.MAX)
            us[name] = slowest.tolist()
    return us


def _graph(arm: Arm, calls: int) -> torch.cuda.CUDAGraph:
    for call in range(2):
        arm(call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(calls):
            arm(call)
    graph.replay()
    torch.cuda.synchronize()
    return graph


def medians(us: dict[str, list[float]]) -> dict[str, float]:
    """Of each arm's samples."""
    return {name: round(statistics.median(samples), 2) for name, samples in us.items()}


def exchange_arms(group: ExchangeGroup, flags: ExchangeGroup, rows: int, columns: int) -> dict[str, Arm]:
    """The exchange in both forms and by flags (over a group of its own); between real ranks beside NCCL and
    torch's symmetric memory.
    """
    device, launches = group.mailboxes.device, _launches(group)
    part = torch.randn((group.local, rows, columns), device=device).to(torch.bfloat16)
    out = torch.empty_like(part)

    def run(form: str, in_turns: bool = False) -> Arm:
        return lambda _: exchange(
            part=part, out=out, launches=launches, form=form, in_turns=in_turns, **group.arguments()
        )

    by_flags = torch.empty_like(part)

    def flagged(_: int) -> None:
        exchange_flags(part=part, out=by_flags, launches=launches, **flags.arguments())

    arms = {
        "one_shot": run("one_shot"), "one_shot_in_turns": run("one_shot", True),
        "two_stage": run("two_stage"), "flags": flagged,
    }  # fmt: skip
    for name in ("one_shot", "flags"):
        arms[name](0)
    if not torch.equal(out, by_flags):
        raise RuntimeError(f"flags and marks give unlike sums of {rows} rows")
    if group.process_group is not None:
        reductions = all_reduces(group, rows, columns)
        arms |= {name: lambda _, way=way: _drop(way.sum()) for name, way in reductions.items()}  # type: ignore[misc]
    return arms


class AllReduce(NamedTuple):
    """One of stock's: where a rank's part goes, and what gives the sum of all."""

    part: torch.Tensor
    sum: Callable[[], torch.Tensor]


def all_reduces(group: ExchangeGroup, rows: int, columns: int) -> dict[str, AllReduce]:
    """Stock's all-reduces of one shape."""
    device, world = group.mailboxes.device, group.process_group
    name, plain = world.group_name, torch.zeros((rows, columns), dtype=torch.bfloat16, device=device)
    shared = _shared_rows(device, world)[: rows * columns].view(rows, columns)

    def nccl() -> torch.Tensor:
        distributed.all_reduce(plain, group=world)
        return plain

    return {
        "nccl": AllReduce(plain, nccl),
        "symm_one_shot": AllReduce(
            shared, lambda: torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", name)
        ),
        "symm_two_shot": AllReduce(
            shared, lambda: torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", name)
        ),
    }


@cache
def _shared_rows(device: torch.device, world: Any) -> torch.Tensor:
    """Memory that all ranks map, for the largest shape."""
    import torch.distributed._symmetric_memory as symmetric_memory

    shared = symmetric_memory.empty(max(BATCHES) * K3.hidden, dtype=torch.bfloat16, device=device)
    symmetric_memory.rendezvous(shared, world)
    return shared.zero_()


def fused_arms(group: ExchangeGroup, rows: int, tp: int) -> dict[str, Arm]:
    """Output projection of TP`tp`'s size, all-reduce, AttnRes and norm: ours fused and apart, and stock's."""
    device, launches, channels = group.mailboxes.device, _launches(group), K3.rank(tp).channels
    x = torch.randn((rows, channels), device=device).to(torch.bfloat16)
    scale = channels**-0.5
    weights = [
        (torch.randn((K3.hidden, channels), device=device) * scale).to(torch.bfloat16)
        for _ in range(WEIGHT_SETS)
    ]
    prefix, part, out = (
        torch.zeros((1, rows, K3.hidden), dtype=torch.bfloat16, device=device) for _ in "abc"
    )
    blocks = torch.randn((1, rows, 8, K3.hidden), device=device).to(torch.bfloat16)
    score = torch.randn(K3.hidden, device=device) * K3.hidden**-0.5
    norm = torch.ones(K3.hidden, dtype=torch.bfloat16, device=device)
    residual: dict[str, Any] = {
        "blocks_read": BLOCKS, "write_index": -1, "score_weight": score, "norm_weight": norm, "eps": 1e-5,
        "launches": launches,
    }  # fmt: skip

    def fused(is_two_stage: bool) -> Arm:
        def call(number: int) -> None:
            weight = weights[number % WEIGHT_SETS]
            oproj_allreduce(
                x=x, weight=weight, launches=launches, is_two_stage=is_two_stage, **group.of_rank(0)
            )
            attn_res_allreduce(
                part=None, prefix=prefix, blocks=blocks, out=out, is_two_stage=is_two_stage, **residual,
                **group.arguments(),
            )  # fmt: skip

        return call

    def sent_by_consumer(number: int) -> None:
        projection(x=x, weight=weights[number % WEIGHT_SETS], out=part[0], launches=launches)
        attn_res_allreduce(part=part, prefix=prefix, blocks=blocks, out=out, **residual, **group.arguments())

    def apart(number: int) -> None:
        projection(x=x, weight=weights[number % WEIGHT_SETS], out=part[0], launches=launches)
        exchange(part=part, out=part, launches=launches, **group.arguments())
        attn_res(prefix=prefix[0], delta=part[0], blocks=blocks[0], out=out[0], **residual)

    def alone(number: int) -> None:
        projection(x=x, weight=weights[number % WEIGHT_SETS], out=part[0], launches=launches)
        attn_res(prefix=prefix[0], delta=part[0], blocks=blocks[0], out=out[0], **residual)

    arms = {
        "fused": fused(False), "fused_two_stage": fused(True), "sent_by_consumer": sent_by_consumer,
        "apart": apart, "without_exchange": alone,
    }  # fmt: skip
    stock, plain = _stock_attn_res(), torch.empty_like(part[0])
    reductions = {"without_exchange": AllReduce(plain, lambda: plain)}
    if group.process_group is not None:
        reductions = all_reduces(group, rows, K3.hidden)
    for name, way in reductions.items():

        def call(number: int, way: AllReduce = way) -> None:
            torch.mm(x, weights[number % WEIGHT_SETS].T, out=way.part)
            stock(prefix[0], way.sum(), blocks[0], norm, score, norm)

        arms[f"stock_{name}"] = call
    return arms


@cache
def _stock_attn_res() -> Callable[..., object]:
    """vLLM's Triton AttnRes, from the packed peers; `RuntimeError` where they do not load."""
    from k3_decode.peers.stock_kernels import StockKernels

    kernels: Any = StockKernels()
    if kernels.attn_res is None:
        raise RuntimeError(f"vLLM's AttnRes: {kernels.err['attn_res']}; unpack the peers (peers/README.md)")

    def call(prefix: Any, delta: Any, blocks: Any, score_norm: Any, query: Any, norm: Any) -> object:
        return kernels.attn_res(
            prefix, delta, blocks, score_norm, query.to(torch.bfloat16), norm, num_blocks=BLOCKS,
            block_write_idx=-1, eps=1e-5, output_norm_eps=1e-5,
        )  # fmt: skip

    return call


def _launches(group: ExchangeGroup) -> torch.Tensor:
    return torch.zeros(16, dtype=torch.int32, device=group.mailboxes.device)


def _drop(_: object) -> None:
    """A call's result is not needed."""


def measure(make: Callable[[], ExchangeGroup], log: Callable[[dict[str, Any]], None]) -> None:
    """Every cell of one number of ranks."""
    group, flags = make(), make()
    cells = [(columns, rows) for columns in (K3.hidden, K3.latent) for rows in BATCHES]
    for columns, rows in cells if group.layout.ranks > 1 else []:
        us = time_arms(exchange_arms(group, flags, rows, columns), group)
        group.require_sound()
        flags.require_sound()
        log({"cell": "exchange", "columns": columns, "rows": rows, "us": medians(us), "samples": us})
    if group.local == 1:
        for tp in (8, 16):
            for rows in BATCHES:
                us = time_arms(fused_arms(group, rows, tp), group)
                group.require_sound()
                log({"cell": "oproj_attn_res", "tp": tp, "rows": rows, "us": medians(us), "samples": us})
    group.close()
    flags.close()


def _measure_all(ranks: list[int], log: Callable[[dict[str, Any]], None]) -> None:
    """Of real ranks their one group, else played groups of so many ranks."""
    room = 64 * K3.hidden * 2
    if "LOCAL_RANK" in os.environ or 1 in ranks:
        # Before any kernel of ours: the peers bring a tvm_ffi, and a second one in a process aborts it.
        _stock_attn_res()
    if "LOCAL_RANK" not in os.environ:
        for count in ranks:
            place = {"ranks": count, "played": True}
            measure(
                lambda count=count: played(count, room, torch.device("cuda")),  # type: ignore[misc]
                lambda record, place=place: log(place | record),  # type: ignore[misc]
            )
        return
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    distributed.init_process_group("nccl", device_id=device)
    place = {"ranks": distributed.get_world_size(), "played": False}
    measure(lambda: symmetric(distributed.group.WORLD, room, device), lambda record: log(place | record))
    distributed.destroy_process_group()


def main(argv: list[str] | None = None) -> int:
    """Measure; see the module."""
    parser = argparse.ArgumentParser(
        prog="python -m k3_decode.peers.bench_exchange", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16], help="of played ranks")
    parser.add_argument("--objects", type=Path, help="compiled kernels (kernel_objects.py)")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(argv)
    lines: list[str] = []

    def log(record: dict[str, Any]) -> None:
        if int(os.environ.get("RANK", "0")) != 0:
            return
        lines.append(json.dumps(record))
        shown = {name: value for name, value in record.items() if name != "samples"}
        sys.stdout.write(json.dumps(shown) + "\n")
        sys.stdout.flush()
        if asked.out is not None:
            asked.out.write_text("\n".join(lines) + "\n", encoding="utf-8")

    with nullcontext() if asked.objects is None else use_objects(asked.objects):
        _measure_all(asked.ranks, log)
    return 0


if __name__ == "__main__":
    sys.exit(main())
