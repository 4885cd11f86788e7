"""All-reduce of [B, 7168] and [B, 3584] bf16 between the GPUs of one host: NCCL and torch symmetric memory
(no multicast).

torchrun --nproc_per_node=2 -m k3_decode.peers.bench_all_reduce OUT.json
"""

import json
import os
import pathlib
import sys

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm

CALLS = 20  # a graph holds this many all-reduces
SIZES = [(B, columns) for columns in (7168, 3584) for B in (1, 2, 4, 8, 16, 32, 64)]


def time_collective(call):
    """Median over samples of the slowest rank's microseconds a call."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    start, stop, us = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True), []
    for _ in range(15):
        dist.barrier()
        torch.cuda.synchronize()
        start.record()
        for _ in range(5):
            graph.replay()
        stop.record()
        torch.cuda.synchronize()
        us.append(start.elapsed_time(stop) * 1e3 / (5 * CALLS))
    slowest = torch.tensor(us, device="cuda", dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)  # max over ranks per sample, then the median
    return round(slowest.median().item(), 2)


def measure(buffer, n, group):
    """NCCL, one-shot and two-shot on n elements, and the one-shot result's error against NCCL's."""
    x = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    found = {"nccl": time_collective(lambda: dist.all_reduce(x))}
    shared = buffer[:n]
    shared.normal_()
    reference = shared.clone()
    dist.all_reduce(reference)
    result = torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", group)
    found["err"] = ((result.float() - reference.float()).norm() / reference.float().norm()).item()
    found["symm_one_shot"] = time_collective(
        lambda: torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", group)
    )
    shared.mul_(1e-3)
    found["symm_two_shot"] = time_collective(
        lambda: torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", group)
    )
    return found


def main():
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    buffer = symm.empty(64 * 7168, dtype=torch.bfloat16, device=f"cuda:{rank}")
    handle = symm.rendezvous(buffer, dist.group.WORLD)
    results = {}
    for B, columns in SIZES:
        results[f"{B}x{columns}"] = measure(buffer, B * columns, dist.group.WORLD.group_name)
        if rank == 0:
            print(B, columns, results[f"{B}x{columns}"], flush=True)
    if rank == 0:
        pathlib.Path(sys.argv[1]).write_text(
            json.dumps(
                {
                    "world": dist.get_world_size(),
                    "multicast": handle.multicast_ptr,
                    "nccl": str(torch.cuda.nccl.version()),
                    "ar": results,
                }
            )
        )
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
