"""Timing of GPU work inside CUDA graphs, the same for every peer and for a kernel of your own.

A unit of work is captured several times into one graph, with other weights each time so that nothing stays in
L2, and the graph is replayed back to back. CUDA events bracket the replays; the figure is the median over
samples.
"""

import statistics
from collections.abc import Callable
from typing import Any

import torch


def capture(work: Callable[[], object], warmup: int = 2) -> torch.cuda.CUDAGraph:
    """One CUDA graph of `work`, after `warmup` plain calls on a side stream (they also compile what is
    compiled lazily)."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warmup):
            work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def time_graph(
    graph: torch.cuda.CUDAGraph,
    units: int,
    min_ms: float = 25.0,
    samples: int = 15,
    before: Callable[[], object] | None = None,
) -> dict[str, float]:
    """Microseconds per unit of a graph that holds `units` of them: median (`us`), `min` and `p90` over
    `samples`.

    Each sample is `k` replays back to back (1 to 200, so that all samples together take about `min_ms`).
    `before` runs outside the timed part, ahead of each sample.
    """
    if before:
        before()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    stop.record()
    torch.cuda.synchronize()
    one_ms = max(start.elapsed_time(stop), 1e-3)
    k = max(1, min(200, int(min_ms / samples / one_ms)))
    us = []
    for _ in range(samples):
        if before:
            before()
        start.record()
        for _ in range(k):
            graph.replay()
        stop.record()
        torch.cuda.synchronize()
        us.append(start.elapsed_time(stop) * 1e3 / k / units)
    us.sort()
    return {"us": statistics.median(us), "min": us[0], "p90": us[int(0.9 * (len(us) - 1))], "k": k}


def time_calls(calls: list[Callable[[], object]], **options: Any) -> dict[str, float]:
    """`time_graph` of one graph that holds every call once; the calls differ in their weights only."""
    return time_graph(capture(lambda: [call() for call in calls], 1), len(calls), **options)


def kernels_of(graph: torch.cuda.CUDAGraph, units: int) -> dict[str, Any]:
    """What torch.profiler sees in one replay, per unit: kernels, memory operations, and time by kernel name.

    With programmatic dependent launch a kernel's time includes its waiting, so `sum_us` can exceed the wall
    time.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        graph.replay()
        torch.cuda.synchronize()
    by_name: dict[str, list[float]] = {}
    kernels = memory_operations = 0
    spans = []
    for event in profiler.events():
        if event.device_type.name != "CUDA":
            continue
        if event.name.lower().startswith(("memcpy", "memset")):
            memory_operations += 1
        else:
            kernels += 1
        total = by_name.setdefault(event.name, [0, 0.0])
        total[0] += 1
        total[1] += event.time_range.elapsed_us()
        spans.append((event.time_range.start, event.time_range.end))
    wall = max(end for _, end in spans) - min(begin for begin, _ in spans) if spans else 0
    top = sorted(
        ((name, count / units, us / units) for name, (count, us) in by_name.items()), key=lambda row: -row[2]
    )
    return {
        "kernels": kernels / units,
        "memops": memory_operations / units,
        "sum_us": sum(us for _, _, us in top),
        "wall_us": wall / units,
        "list": [[name[:90], round(count, 3), round(us, 3)] for name, count, us in top],
    }


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative L2 error, computed in float64."""
    return ((value.double() - reference.double()).norm() / reference.double().norm()).item()


def is_finite(*tensors: torch.Tensor) -> bool:
    return all(torch.isfinite(tensor.float()).all().item() for tensor in tensors)


def output_is_finite(call: Callable[[], object]) -> bool:
    """Run the call once and look at every floating-point tensor that it returns."""
    output = call()
    outputs = output if isinstance(output, (tuple, list)) else [output]
    return is_finite(*(t for t in outputs if torch.is_tensor(t) and t.is_floating_point()))
