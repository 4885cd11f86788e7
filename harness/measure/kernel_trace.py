"""What really ran in a step, seen from outside the candidate: kernels with their times and streams.

On a GPU the device's own record (CUPTI through torch.profiler), which sees into graph replays; on a CPU the
interpreter's call hook for the pack's kernel functions and torch's own record of every operator outside
them. Each trace also holds a sentinel that this module ran itself: where that is not seen whole, the trace is
`blind` and says nothing about the candidate, least of all that something did not run.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import Any, Literal, NamedTuple, Protocol

import torch

__all__ = ["KernelEvent", "Trace", "Tracer", "cut_layer", "fits", "read_trace", "tracer_for"]

SENTINEL_NODES = 5
"""Kernels of the graph that the harness replays itself, before the first and after the last step."""
SENTINEL_CALLS = 2
SENTINEL_OPERATOR = "aten::special_i1"
MEMORY_OPERATORS = frozenset(
    f"aten::{name}"
    for name in (
        "copy_", "clone", "_to_copy", "to", "contiguous", "fill_", "zero_", "zeros", "ones", "full", "empty",
        "new_empty", "new_zeros", "new_full", "empty_like", "zeros_like", "ones_like", "full_like",
        "empty_strided", "new_empty_strided", "scalar_tensor", "arange", "item", "_local_scalar_dense",
        "is_nonzero", "resize_", "set_",
    )
)  # fmt: skip
"""Operators that make, move or fill memory and compute nothing: no kernels of a path."""
VIEWS = frozenset(
    f"aten::{name}"
    for name in (
        "alias", "as_strided", "chunk", "detach", "detach_", "expand", "expand_as", "flatten", "lift_fresh",
        "movedim", "narrow", "numpy_T", "permute", "reshape", "resolve_conj", "resolve_neg", "result_type",
        "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unflatten",
        "unsqueeze", "view", "view_as",
    )
)  # fmt: skip
"""Operators that only look at memory in another way. What is in neither list counts as a kernel."""
MARKED = {True: "fasttrack.kernel:", False: "fasttrack.mark:"}
"""How the functions of a pack are named in torch's own record, by whether they are kernels."""


class KernelEvent(NamedTuple):
    """One kernel, in microseconds from the start of the trace."""

    step: int
    name: str
    start_us: float
    duration_us: float
    stream: int
    place: Literal["graph", "eager"]
    is_memory: bool


class Trace(NamedTuple):
    """All events of the traced steps, in order of their start."""

    events: tuple[KernelEvent, ...]
    graph_launches: dict[int, int]
    """Graphs that each step replayed."""
    blind: str
    """Why nothing may be concluded from the trace; empty where it is sound."""
    sentinel: tuple[int, int]
    """(seen, planted)."""


class Tracer(Protocol):
    """Traces the steps that run inside `step`."""

    def step(self, number: int) -> AbstractContextManager[None]:
        """One step; it ends when the device has finished it."""

    def result(self) -> Trace:
        """Ends the trace."""


def tracer_for(arch: str, root: Path, functions: Sequence[str], marks: Sequence[str]) -> Tracer:
    """A tracer for an architecture; `functions` are the patterns of a pack's kernel functions below `root`
    (what they call is their own), `marks` those of functions that are only noted. Both matter on a CPU alone.
    """
    if arch == "cpu":
        return _InterpreterTracer(root, tuple(functions), tuple(marks))
    return _DeviceTracer()


def fits(name: str, patterns: Sequence[str]) -> bool:
    """Whether any shell pattern fits a kernel's name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@dataclass
class _InterpreterTracer:
    """Calls of the pack's functions by the interpreter's hook, torch's operators by its own profiler."""

    root: Path
    functions: tuple[str, ...]
    marks: tuple[str, ...]
    events: list[KernelEvent] = field(default_factory=list)
    seen: int = 0
    planted: int = 0
    trouble: str = ""
    _known: dict[CodeType, tuple[str, bool] | None] = field(default_factory=dict)
    _open: list[tuple[CodeType, Any, bool]] = field(default_factory=list)
    _depth: int = 0
    _origin: int | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """See `Tracer`."""
        self._depth = 0
        self._open.clear()
        before = sys.getprofile()
        operators: Any = torch.autograd.profiler.profile(use_cpu=True, use_kineto=True)
        try:
            operators.__enter__()
        except RuntimeError as error:
            self.trouble = f"torch's profiler does not start: {str(error)[:200]}"
            yield
            return
        sys.setprofile(self._hook)
        try:
            self._plant()
            yield
            self._plant()
        finally:
            if sys.getprofile() != self._hook:
                self.trouble = "the interpreter's call hook was replaced while the step ran"
            sys.setprofile(before)
            operators.__exit__(None, None, None)
        results: Any = operators.kineto_results
        self._read(number, [(e.name(), e.start_ns(), e.duration_ns()) for e in results.events()])

    def result(self) -> Trace:
        """See `Tracer`."""
        blind = self.trouble or _sentinel_words("tracer", self.seen, self.planted)
        if not self.planted and not blind:
            blind = "no step was traced"
        return Trace(tuple(self.events), {}, blind, (self.seen, self.planted))

    def _plant(self) -> None:
        for _ in range(SENTINEL_CALLS):
            _sentinel()
        torch.special.i1(_ONE)
        self.planted += SENTINEL_CALLS + 1

    def _hook(self, frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            code = frame.f_code
            if code is _SENTINEL_CODE:
                self.seen += 1
                return
            found = self._known[code] if code in self._known else self._place(code)
            if found is not None:
                name, is_kernel = found
                span: Any = None
                if not is_kernel or self._depth == 0:
                    span = torch.profiler.record_function(f"{MARKED[is_kernel]}{name}")
                    span.__enter__()
                self._open.append((code, span, is_kernel))
                self._depth += is_kernel
        elif event == "return" and self._open and frame.f_code is self._open[-1][0]:
            _, span, is_kernel = self._open.pop()
            self._depth -= is_kernel
            if span is not None:
                span.__exit__(None, None, None)

    def _place(self, code: CodeType) -> tuple[str, bool] | None:
        found = None
        path = Path(code.co_filename)
        if path.is_relative_to(self.root):
            name = f"{path.relative_to(self.root).as_posix()}:{code.co_name}"
            if fits(name, self.functions):
                found = (name, True)
            elif fits(name, self.marks):
                found = (name, False)
        self._known[code] = found
        return found

    def _read(self, number: int, raw: list[tuple[str, int, int]]) -> None:
        """Keeps marked functions, and operators called by neither a kernel function nor another operator."""
        raw.sort(key=lambda entry: (entry[1], -entry[2]))
        if self._origin is None and raw:
            self._origin = raw[0][1]
        busy_until = 0
        for name, start, duration in raw:
            is_function = name.startswith(MARKED[True])
            if name.startswith(MARKED[False]):
                self._keep(number, name.removeprefix(MARKED[False]), start, duration, 2)
                continue
            if start < busy_until or not (is_function or name.startswith("aten::")):
                continue
            busy_until = start + duration
            if name == SENTINEL_OPERATOR:
                self.seen += 1
            elif name not in VIEWS:
                self._keep(number, name.removeprefix(MARKED[True]), start, duration, int(is_function))

    def _keep(self, number: int, name: str, start: int, duration: int, lane: int) -> None:
        begin = (start - (self._origin or 0)) / 1e3
        is_memory = name in MEMORY_OPERATORS
        self.events.append(KernelEvent(number, name, begin, duration / 1e3, lane, "eager", is_memory))


def _sentinel() -> None:
    """What a sound hook must see."""


_SENTINEL_CODE = _sentinel.__code__
_ONE = torch.ones(1)


def _sentinel_words(witness: str, seen: int, planted: int) -> str:
    if seen == planted:
        return ""
    return (
        f"the {witness} saw {seen} of {planted} events that the harness planted: it lost events or sees none"
    )


class _DeviceTracer:
    """CUPTI's record through torch.profiler, read from its exported trace."""

    def __init__(self) -> None:
        self._sentinel, self._kept = _captured_sentinel()
        self._profile: Any = None
        self._trouble = ""

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """See `Tracer`."""
        self._start()
        with self._range(f"step.{number}"):
            yield
            torch.cuda.synchronize()

    def result(self) -> Trace:
        """See `Tracer`."""
        if self._profile is None:
            return Trace((), {}, self._trouble or "no step was traced", (0, 0))
        try:
            self._replay_sentinel()
            self._profile.stop()
            with TemporaryDirectory() as folder:
                file = Path(folder) / "trace.json"
                self._profile.export_chrome_trace(str(file))
                return read_trace(json.loads(file.read_text(encoding="utf-8"))["traceEvents"])
        except (RuntimeError, OSError, ValueError) as error:
            return Trace((), {}, f"the profiler gave no trace: {str(error)[:200]}", (0, 0))

    def _start(self) -> None:
        if self._profile is not None or self._trouble:
            return
        from torch.profiler import ProfilerActivity, profile

        try:
            torch.cuda.synchronize()
            self._profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
            self._profile.start()
            self._replay_sentinel()
        except RuntimeError as error:
            self._profile, self._trouble = None, f"the profiler does not start: {str(error)[:200]}"

    def _replay_sentinel(self) -> None:
        with self._range("sentinel"):
            self._sentinel.replay()
            torch.cuda.synchronize()

    def _range(self, name: str) -> AbstractContextManager[Any]:
        if self._profile is None:
            return nullcontext()
        return torch.profiler.record_function(f"fasttrack.{name}")


def read_trace(entries: Sequence[dict[str, Any]]) -> Trace:
    """A trace from the events that torch.profiler exports: kernels by the marked range that they began in."""
    ranges = [
        (str(e["name"]).removeprefix("fasttrack."), float(e["ts"]), float(e["ts"]) + float(e["dur"]))
        for e in entries
        if e.get("cat") == "user_annotation" and str(e.get("name", "")).startswith("fasttrack.")
    ]
    launches = [e for e in entries if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    graphs = {
        e["args"]["correlation"]: float(e["ts"])
        for e in launches
        if "GraphLaunch" in str(e.get("name")) and "correlation" in e.get("args", {})
    }
    seen, events = 0, list[KernelEvent]()
    steps = [(int(name.split(".")[1]), begin, end) for name, begin, end in ranges if name.startswith("step.")]
    origin = min((begin for _, begin, _ in steps), default=0.0)
    planted = [(begin, end) for name, begin, end in ranges if name == "sentinel"]
    for e in entries:
        if e.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        start, correlation = float(e["ts"]), e.get("args", {}).get("correlation")
        at = graphs.get(correlation, start)
        if any(begin <= at <= end for begin, end in planted):
            seen += correlation in graphs
        for number, begin, end in steps:
            if begin <= at <= end:
                place: Literal["graph", "eager"] = "graph" if correlation in graphs else "eager"
                stream = int(e.get("args", {}).get("stream", e.get("tid", 0)))
                events.append(
                    KernelEvent(
                        number, str(e["name"]), start - origin, float(e["dur"]), stream, place,
                        e["cat"] != "kernel",
                    )
                )  # fmt: skip
    replays = {number: sum(begin <= at <= end for at in graphs.values()) for number, begin, end in steps}
    expected = SENTINEL_NODES * 2
    blind = _sentinel_words("profiler", seen, expected)
    return Trace(tuple(sorted(events, key=lambda event: event.start_us)), replays, blind, (seen, expected))


def cut_layer(
    events: Sequence[KernelEvent], marks: Sequence[str], per_layer: int, layer: int
) -> tuple[KernelEvent, ...]:
    """Events of one step's layer `layer`, times from its start; empty where the step has no such layer.

    A layer begins with the first of its `per_layer` marks and ends where the next one begins.
    """
    at = [event.start_us for event in events if fits(event.name, marks)]
    first, last = layer * per_layer, (layer + 1) * per_layer
    if per_layer < 1 or last >= len(at):
        return ()
    begin, end = at[first], at[last]
    return tuple(
        event._replace(start_us=event.start_us - begin) for event in events if begin <= event.start_us < end
    )


def _captured_sentinel() -> tuple[Any, Any]:
    """A graph of a known number of kernels that nobody else runs, and the tensor that it writes."""
    value = torch.ones(32, device="cuda")
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call,unused-ignore]  # has no types
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        value.mul_(1.0)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(SENTINEL_NODES):
            value.mul_(1.0)
    return graph, value
