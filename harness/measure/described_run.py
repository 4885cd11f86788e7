"""Time a described launch and compare what the *timed* calls left with the truth.

Every copy of the arguments is called in turn, so that data is cold; the calls of a unit are one CUDA graph,
timed with events of a process that no candidate's Python ever ran in. Before each unit outputs get poison and
every copy gets inputs that were never there before, so that neither an answer kept on the device nor a call
left out survives. In a few units, at places that only this process knows, the inputs are those whose truth is
known, and what these timed units left is compared with it.
"""

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from harness.domain.launch_record import LaunchRecord
from harness.domain.record import Record, Whole
from harness.measure.described import Layout, bound_call, kernels_of, lay_out, require_no_addresses
from harness.measure.tensor_files import file_digest, flat_view, load_arguments
from harness.measure.tensors import exact_mismatches, poison, token_errors, unwritten

__all__ = ["DescribedJob", "DescribedRun", "TimedError", "run_described"]

UNITS, CHECKED = 36, 4
"""Timed units, and how many of them are compared with the truth."""
CHANGEABLE = (torch.bfloat16, torch.float16, torch.float32)


class DescribedJob(Record):
    """What the trusted process is asked for; paths are of this machine."""

    record: str
    cubins: str
    """Folder of the binaries."""
    prepared: str
    inputs: tuple[str, ...]
    """Folders with `arguments`, `truth` and `stock`, one a set of inputs; weights are in the first alone."""
    outputs: tuple[str, ...]
    exact: tuple[str, ...]
    states: tuple[str, ...]
    activations: tuple[str, ...]
    """What may change from unit to unit, to values between 3/4 and 5/4 of what they were."""
    copies: Whole
    seed: Whole
    """Of those changes, and of which units are compared."""


class TimedError(Record):
    """One token of one output after a timed unit, the worst of all copies."""

    inputs: str
    output: str
    token: Whole
    stock_l2: float
    optimised_l2: float
    stock_worst: float
    optimised_worst: float
    ulp: float
    least: float


class DescribedRun(Record):
    """What the trusted process saw."""

    us: tuple[float, ...]
    """Microseconds of one call, unit by unit, by the device's events."""
    outside_us: float
    """The same by the process's own clock around all units."""
    copies: Whole
    kernels: Whole
    """Kernel launches of one call."""
    errors: tuple[TimedError, ...]
    mismatches: tuple[tuple[str, Whole], ...]
    """Elements of exact outputs that differ."""
    unwritten: tuple[tuple[str, Whole], ...]
    touched: tuple[str, ...]
    """Inputs that were written, and `bands` where a guard band was."""


def run_described(job: DescribedJob) -> DescribedRun:
    """Check, launch, time and compare; raises `EvidenceError` for a record that does not hold."""
    record = LaunchRecord.from_json(Path(job.record).read_bytes())
    files = sorted(Path(job.cubins).glob("*.cubin"))
    named = {step.cubin for step in record.steps if step.kind == "kernel"}
    cubins = {digest: path for path in files if (digest := file_digest(path)) in named}
    kernels = kernels_of(record, cubins)
    first, *others = (load_arguments(Path(folder) / "arguments", "cuda") for folder in job.inputs)
    sets = [first, *(first | other for other in others)]
    layouts = [lay_out(record, sets[0], Path(job.prepared)) for _ in range(job.copies)]
    require_no_addresses(record)
    calls = [bound_call(record, kernels, layout) for layout in layouts]
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        for call in calls:
            call(side.cuda_stream)
        torch.cuda.synchronize()
        graph.capture_begin()
        for call in calls:
            call(side.cuda_stream)
        graph.capture_end()
    return _measured(job, record, graph, layouts, sets)


def _measured(
    job: DescribedJob, record: LaunchRecord, graph: torch.cuda.CUDAGraph, layouts: Sequence[Layout],
    sets: Sequence[dict[str, Any]],
) -> DescribedRun:  # fmt: skip
    source = random.Random(job.seed)
    checked = frozenset(source.sample(range(1, UNITS), CHECKED))
    us, outside = [], 0.0
    errors, mismatches, left = list[TimedError](), dict[str, int](), dict[str, int]()
    touched: dict[str, None] = {}
    for unit in range(UNITS):
        given = [sets[(unit + copy) % len(sets)] for copy in range(len(layouts))]
        _fill(job, layouts, given, None if unit in checked else source.getrandbits(31))
        torch.cuda.synchronize()
        begun = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no types
        ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # as above
        clock = time.perf_counter()
        begun.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        outside += time.perf_counter() - clock
        us.append(float(begun.elapsed_time(ended)) * 1e3 / len(layouts))
        if unit in checked:
            for number, folder in enumerate(job.inputs):
                mine = [x for x, g in zip(layouts, given, strict=True) if g is sets[number]]
                errors += _compare(job, mine, Path(folder), mismatches, left) if mine else ()
            touched |= dict.fromkeys(_touched(job, layouts, given))
    return DescribedRun(
        us=tuple(us), outside_us=outside * 1e6 / (UNITS * len(layouts)),
        copies=len(layouts),
        kernels=sum(step.kind == "kernel" for step in record.steps), errors=tuple(errors),
        mismatches=tuple(sorted(mismatches.items())), unwritten=tuple(sorted(left.items())),
        touched=tuple(touched),
    )  # fmt: skip


def _fill(
    job: DescribedJob, layouts: Sequence[Layout], given: Sequence[dict[str, Any]], change: int | None
) -> None:
    """A set of inputs in every layout, changed unless `change` is None, and poison in every output."""
    source = torch.Generator(device="cuda")
    if change is not None:
        source.manual_seed(change)
    for layout, args in zip(layouts, given, strict=True):
        for name, value in args.items():
            if isinstance(value, torch.Tensor):
                flat_view(layout.args[name]).copy_(flat_view(value))
        for name in job.activations if change is not None else ():
            mine = layout.args[name]
            if isinstance(mine, torch.Tensor) and mine.dtype in CHANGEABLE:
                mine.mul_(torch.rand(mine.shape, generator=source, device="cuda").mul_(0.5).add_(0.75))
        for name in job.outputs:
            poison(layout.args[name])


def _compare(
    job: DescribedJob,
    layouts: Sequence[Layout],
    folder: Path,
    mismatches: dict[str, int],
    left: dict[str, int],
) -> Iterator[TimedError]:
    """Errors of every copy's outputs, the worst copy of each token kept."""
    truth, stock = (load_arguments(folder / part, "cuda") for part in ("truth", "stock"))
    for name in job.outputs:
        left[name] = left.get(name, 0) + sum(unwritten(layout.args[name]) for layout in layouts)
        if name in job.exact:
            wrong = sum(exact_mismatches(layout.args[name], truth[name]) for layout in layouts)
            mismatches[name] = mismatches.get(name, 0) + wrong
            continue
        dtype = layouts[0].args[name].dtype
        by_stock = token_errors(stock[name], truth[name], dtype, 0)
        each = [token_errors(layout.args[name], truth[name], dtype, 0) for layout in layouts]
        for token, theirs in enumerate(by_stock):
            yield TimedError(
                inputs=folder.name, output=name, token=token, stock_l2=theirs.relative_l2,
                optimised_l2=max(e[token].relative_l2 for e in each), stock_worst=theirs.worst,
                optimised_worst=max(e[token].worst for e in each), ulp=theirs.ulp, least=theirs.least,
            )  # fmt: skip


def _touched(job: DescribedJob, layouts: Sequence[Layout], given: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Inputs that hold anything else than what was put there, and guard bands that were written."""
    written = {*job.outputs, *job.states}
    for layout, args in zip(layouts, given, strict=True):
        for name, value in args.items():
            is_input = isinstance(value, torch.Tensor) and name not in written
            if is_input and not torch.equal(flat_view(layout.args[name]), flat_view(value)):
                yield name
        if not layout.has_whole_bands() or not layout.guarded.has_whole_bands():
            yield "bands"
