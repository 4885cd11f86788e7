"""What a trace says ran, on a CPU and read from a device's record."""

import sys
from pathlib import Path
from typing import Any

import torch

from harness.measure.kernel_trace import KernelEvent, cut_layer, read_trace, tracer_for

HERE = Path(__file__).parent
KERNELS = ("test_kernel_trace.py:fused",)


def fused(x: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, x).tanh()


def composed(x: torch.Tensor) -> torch.Tensor:
    return fused(x) + torch.mm(x.T, x)


def names(*work: Any, marks: tuple[str, ...] = ()) -> list[str]:
    tracer = tracer_for("cpu", HERE, KERNELS, marks)
    for number, call in enumerate(work):
        with tracer.step(number):
            call()
    trace = tracer.result()
    assert trace.blind == ""
    return [event.name for event in trace.events if not event.is_memory]


def test_a_kernel_function_is_one_kernel_and_torch_outside_it_is_named() -> None:
    x = torch.ones(3, 3)
    assert names(lambda: composed(x)) == ["test_kernel_trace.py:fused", "aten::mm", "aten::add"]


def test_a_marked_function_hides_nothing_of_what_it_calls() -> None:
    x = torch.ones(3, 3)
    found = names(lambda: composed(x), marks=("test_kernel_trace.py:composed",))
    assert found == ["test_kernel_trace.py:composed", "test_kernel_trace.py:fused", "aten::mm", "aten::add"]


def test_a_hook_taken_away_makes_the_trace_blind() -> None:
    tracer = tracer_for("cpu", HERE, KERNELS, ())
    with tracer.step(0):
        sys.setprofile(None)
    trace = tracer.result()
    assert trace.blind == "the interpreter's call hook was replaced while the step ran"
    assert sys.getprofile() is None


def test_a_tracer_that_traced_nothing_says_so() -> None:
    assert tracer_for("cpu", HERE, KERNELS, ()).result().blind == "no step was traced"


def device_trace(seen: int = 5) -> list[dict[str, Any]]:
    """Two sentinels around one step: a graph of two kernels, and one kernel launched by hand."""

    def entry(cat: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
        return {"cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}

    return [
        entry("user_annotation", "fasttrack.sentinel", 0, 10),
        entry("cuda_runtime", "cudaGraphLaunch", 1, 1, correlation=1),
        *(entry("kernel", "mul", 2 + n, 1, correlation=1, stream=7) for n in range(seen)),
        entry("user_annotation", "fasttrack.step.3", 20, 30),
        entry("cuda_runtime", "cudaLaunchKernel", 21, 1, correlation=2),
        entry("kernel", "copy", 22, 1, correlation=2, stream=7),
        entry("cuda_runtime", "cudaGraphLaunch", 23, 1, correlation=3),
        entry("kernel", "fused_a", 25, 4, correlation=3, stream=7),
        entry("kernel", "fused_b", 27, 5, correlation=3, stream=9),
        entry("gpu_memset", "Memset", 33, 1, correlation=3, stream=7),
        entry("user_annotation", "fasttrack.sentinel", 60, 10),
        entry("cuda_runtime", "cudaGraphLaunch", 61, 1, correlation=4),
        *(entry("kernel", "mul", 62 + n, 1, correlation=4, stream=7) for n in range(5)),
    ]


def test_kernels_of_a_replay_are_told_from_kernels_launched_by_hand() -> None:
    trace = read_trace(device_trace())
    assert (trace.blind, trace.sentinel, trace.graph_launches) == ("", (10, 10), {3: 1})
    assert trace.events == (
        KernelEvent(3, "copy", 2, 1, 7, "eager", False),
        KernelEvent(3, "fused_a", 5, 4, 7, "graph", False),
        KernelEvent(3, "fused_b", 7, 5, 9, "graph", False),
        KernelEvent(3, "Memset", 13, 1, 7, "graph", True),
    )


def test_a_profiler_that_does_not_see_the_harnesss_own_graph_is_blind() -> None:
    trace = read_trace(device_trace(seen=0))
    assert (
        trace.blind == "the profiler saw 5 of 10 events that the harness planted: it lost events or sees none"
    )


def test_a_layer_reaches_from_its_first_mark_to_the_next_layers() -> None:
    events = [
        KernelEvent(0, name, 10.0 * n, 5.0, 1, "graph", False)
        for n, name in enumerate(("mix", "a", "mix", "b", "mix", "c", "mix", "d", "mix"))
    ]
    cut = cut_layer(events, ("mix",), 2, 1)
    assert [(event.name, event.start_us) for event in cut] == [("mix", 0), ("c", 10), ("mix", 20), ("d", 30)]
    assert cut_layer(events, ("mix",), 2, 2) == ()
