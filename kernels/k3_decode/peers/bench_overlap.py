"""Ways to share a GPU among the concurrent pieces of a layer, each timed whole between real GPUs.

    torchrun --nproc_per_node=N -m k3_decode.peers.bench_overlap --kind kda --batch 1 8 16 32 64 --out FILE

Shards of TP N, four layers in one graph, every meeting by exchanges (`fused_chain.py`). The arms take turns
in each sample; `again` is the table's own entry once more, so its distance from `table` is the noise. Of each
arm: its median, and of its samples' differences from `table`'s the median and a 95 % interval. The best arm
whose whole interval lies below zero and whose gain is beyond the noise has won; else nothing has.
"""

import argparse
import json
import os
import statistics
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from k3_decode.collectives.exchanged import Exchanged
from k3_decode.collectives.groups import symmetric
from k3_decode.kernel_objects import use_objects
from k3_decode.overlap import Overlap, Schedule, overlap_of, read
from k3_decode.peers.bench_exchange import time_arms
from k3_decode.peers.bench_rank_layers import Bench, call_of
from k3_decode.peers.layer_arms import Case
from k3_decode.shapes import K3

__all__ = ["ARMS", "main", "won"]

MIB = 1 << 20


def _changed(**values: Any) -> Schedule:
    def schedule(inter: int, rows: int) -> Overlap:
        return replace(overlap_of(inter, rows), **values)

    return schedule


MOST = read().multiprocessors
ARMS: dict[str, Schedule] = {
    "table": overlap_of,
    "along": _changed(shared="along", experts_sms=MOST),
    "aside": _changed(shared="aside", experts_sms=MOST),
    "aside_experts_124": _changed(shared="aside", experts_sms=124),
    "aside_experts_112": _changed(shared="aside", experts_sms=112),
    "front_8": _changed(prefetch={"front": 8 * MIB}),
    "front_24": _changed(prefetch={"front": 24 * MIB}),
    "tail_8": _changed(prefetch={"tail": 8 * MIB}),
    "in_proj_8": _changed(prefetch={"in_proj": 8 * MIB}),
    "in_proj_24": _changed(prefetch={"in_proj": 24 * MIB}),
    "all_8": _changed(prefetch={"front": 8 * MIB, "tail": 8 * MIB, "in_proj": 8 * MIB}),
    "again": overlap_of,
}
"""What is tried: where the shared expert runs, how many multiprocessors the routed ones take beside it, and
which weights are asked for ahead while ranks meet, in MiB."""


def won(gains: dict[str, tuple[float, float, float]]) -> str:
    """The arm to take, from median and interval of each arm's difference from `table` (negative: faster)."""
    noise = max(abs(bound) for bound in gains["again"][1:])
    sure = {name: gain for name, gain in gains.items() if gain[2] < 0 and gain[0] < -noise}
    return min(sure, key=lambda name: sure[name][0], default="table")


def _gain(samples: list[float], base: list[float]) -> tuple[float, float, float]:
    """Median of the paired differences and its 95 % interval by order statistics."""
    differences = sorted(mine - other for mine, other in zip(samples, base, strict=True))
    count = len(differences)
    low = max(0, int((count - 1.96 * count**0.5) / 2) - 1)
    return statistics.median(differences), differences[low], differences[count - 1 - low]


def _cell(bench: Bench, case: Case) -> dict[str, Any]:
    exchanged = Exchanged(bench.group, bench.launches)
    arms = {
        name: bench.arm(case, "sharded", exchanged.run, bench.group, schedule)
        for name, schedule in ARMS.items()
    }
    outs = {name: arm.step().clone() for name, arm in arms.items()}
    torch.cuda.synchronize()
    bench.group.require_sound()
    samples = time_arms({name: call_of(arm) for name, arm in arms.items()}, bench.group, 1)
    bench.group.require_sound()
    layers = len(bench.layers)
    us = {name: [one / layers for one in found] for name, found in samples.items()}
    gains = {name: _gain(found, us["table"]) for name, found in us.items() if name != "table"}
    return {
        "cell": "overlap", "kind": case.kind, "tp": bench.tp, "rows": case.requests,
        "us": {name: round(statistics.median(found), 2) for name, found in us.items()},
        "gain": {name: [round(one, 2) for one in gain] for name, gain in gains.items()},
        "won": won(gains),
        "differing": {name: int((out != outs["table"]).sum()) for name, out in outs.items()},
        "samples": us,
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Measure; see the module."""
    parser = argparse.ArgumentParser(
        prog="python -m k3_decode.peers.bench_overlap", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--kind", nargs="+", default=["kda"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 16, 32, 64])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--objects", type=Path, help="compiled kernels (kernel_objects.py)")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(argv)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    distributed.init_process_group("nccl", device_id=device)
    lines: list[str] = []
    with nullcontext() if asked.objects is None else use_objects(asked.objects), torch.no_grad():
        group = symmetric(distributed.group.WORLD, 64 * (K3.hidden + K3.latent) * 2, device)
        for kind in asked.kind:
            bench = Bench(kind, asked.layers, group)
            for rows in asked.batch:
                record = _cell(bench, Case(kind, bench.tp, rows, asked.context if kind == "mla" else 0))
                lines.append(json.dumps(record))
                if group.first_rank == 0:
                    shown = {name: value for name, value in record.items() if name != "samples"}
                    sys.stdout.write(json.dumps(shown) + "\n")
                    sys.stdout.flush()
            del bench
            torch.cuda.empty_cache()
        group.close()
    distributed.destroy_process_group()
    if asked.out is not None and int(os.environ["RANK"]) == 0:
        asked.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
