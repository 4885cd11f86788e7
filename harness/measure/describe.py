"""The sandbox's half of a described launch: capture a candidate's call, and write down what it does.

What it writes is data that the other half (`described`) checks and launches; nothing here is believed. A call
that cannot be described raises `Undescribable` with the reason: it is then timed like a Python candidate.
"""

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harness.domain.cell import Cell
from harness.domain.errors import FasttrackError
from harness.domain.launch_record import (
    Buffer,
    KernelLaunch,
    LaunchParameter,
    LaunchRecord,
    MemorySet,
    Pointer,
)
from harness.domain.pack import OpContract, Pack
from harness.measure.described import DEVICE_ADDRESSES
from harness.measure.driver import DriverError, KernelNode, MemsetNode, graph_nodes, is_device_address
from harness.measure.tensor_files import file_digest, flat_view
from harness.measure.trial import LAUNCH_SLOTS

__all__ = ["Undescribable", "describe_call", "describe_op"]

TENSOR_MAP_BYTES = 128
MAX_DEPTH = 6


class Undescribable(FasttrackError):
    """A call that no launch record describes."""


@dataclass(frozen=True, slots=True)
class _Place:
    """One stretch of device memory that a call may name."""

    name: str
    start: int
    size: int
    origin: str
    tensor: torch.Tensor


def describe_call(
    op: str,
    implementation: str,
    args: Mapping[str, Any],
    call: Callable[[], None],
    cubins: Path,
    folder: Path,
) -> LaunchRecord:
    """The record of `call`, which was bound to `args`; prepared buffers are left in `folder` by their names.

    `cubins`: where the candidate's compiler left the binaries of this process.
    """
    places = tuple(_places(args, call))
    nodes = _captured_nodes(call)
    steps = tuple(
        _kernel(node, places, cubins) if isinstance(node, KernelNode) else _memory_set(node, places)
        for node in nodes
    )
    used = {name for step in steps for name in _named(step)}
    return LaunchRecord(
        op=op, implementation=implementation, steps=steps,
        buffers=tuple(_buffer(place, folder) for place in places if place.name in used),
    )  # fmt: skip


def describe_op(
    pack: Pack, contract: OpContract, cell: Cell, model: str, implementation: str, seed: int, folder: Path
) -> LaunchRecord:
    """The record of one call of an op; `folder` holds `cubins` and gets what was prepared."""
    device = "cpu" if cell.arch == "cpu" else "cuda"
    if device == "cpu" or not torch.cuda.is_available():
        raise Undescribable("a call on a CPU launches nothing that could be described")
    with torch.no_grad():
        args = pack.make_args(contract.name, cell, contract.regimes[0], seed, device, model)
        launches = torch.zeros(LAUNCH_SLOTS, dtype=torch.int32, device=device)
        call = pack.bind_optimised(contract.name, implementation, args, launches)
        return describe_call(contract.name, implementation, args, call, folder / "cubins", folder)


def _captured_nodes(call: Callable[[], None]) -> tuple[KernelNode | MemsetNode, ...]:
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.stream(side):
        call()
        torch.cuda.synchronize()
        graph.capture_begin()
        call()
        call()
        graph.capture_end()
    try:
        nodes = graph_nodes(graph.raw_cuda_graph())
    except DriverError as error:
        raise Undescribable(str(error)) from error
    first, second = nodes[: len(nodes) // 2], nodes[len(nodes) // 2 :]
    if not nodes:
        raise Undescribable("the call puts nothing on the stream that it was given")
    if [_but_its_edge(n) for n in first] != [_but_its_edge(n) for n in second]:
        raise Undescribable("the call launches something else when it is made again")
    return second  # of which the first node has a predecessor, as it has in a step


def _but_its_edge(node: KernelNode | MemsetNode) -> KernelNode | MemsetNode:
    return node._replace(is_dependent=False) if isinstance(node, KernelNode) else node


def _places(args: Mapping[str, Any], call: Callable[[], None]) -> Iterator[_Place]:
    """Arguments first, then every other tensor that the bound call holds."""
    seen: set[tuple[int, int]] = set()
    held = [(name, value, "argument") for name, value in args.items()]
    held += [(name, value, "") for name, value in _held(call, "kept", MAX_DEPTH)]
    for name, value, origin in held:
        if not isinstance(value, torch.Tensor) or not value.is_cuda or not value.numel():
            continue
        size = flat_view(value).numel()
        if (value.data_ptr(), size) in seen:
            continue
        seen.add((value.data_ptr(), size))
        is_zero = origin == "" and not bool(flat_view(value).any())
        kind = origin or ("workspace" if is_zero else "prepared")
        yield _Place(name.lower(), value.data_ptr(), size, kind, value)


def _held(value: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Tensors inside partials, tuples, mappings and plain objects, by a name that says where."""
    if isinstance(value, torch.Tensor):
        yield name, value
        return
    if depth == 0 or isinstance(value, str | bytes | int | float | type(None)):
        return
    if isinstance(value, Mapping):
        parts = [(str(key), part) for key, part in value.items()]
    elif isinstance(value, list | tuple):
        fields = getattr(value, "_fields", None) or tuple(map(str, range(len(value))))
        parts = list(zip(fields, value, strict=True))
    elif hasattr(value, "keywords") and hasattr(value, "args"):
        parts = [*value.keywords.items(), *((str(i), part) for i, part in enumerate(value.args))]
    elif hasattr(value, "__dataclass_fields__"):
        parts = [(key, getattr(value, key)) for key in value.__dataclass_fields__]
    else:
        return
    for key, part in parts:
        yield from _held(part, f"{name}.{key}", depth - 1)


def _kernel(node: KernelNode, places: tuple[_Place, ...], cubins: Path) -> KernelLaunch:
    found = [path for path in sorted(cubins.glob("*.cubin")) if node.name.encode() in path.read_bytes()]
    if len(found) != 1:
        raise Undescribable(f"{len(found)} compiled files hold the kernel {node.name[:80]}, not one")
    return KernelLaunch(
        cubin=file_digest(found[0]), kernel=node.name, grid=node.grid, block=node.block, cluster=node.cluster,
        shared_bytes=node.shared_bytes, is_dependent=node.is_dependent, carveout=node.carveout,
        parameters=tuple(_parameter(value, places) for _, value in node.parameters),
    )  # fmt: skip


def _parameter(value: bytes, places: tuple[_Place, ...]) -> LaunchParameter:
    """A parameter's bytes with its addresses named; raises `Undescribable` for one that nothing explains."""
    rest, pointers = bytearray(value), []
    for offset in range(0, len(value) - 7, 8):
        (word,) = struct.unpack_from("<Q", value, offset)
        place = next((p for p in places if p.start <= word < p.start + p.size), None)
        if place is None:
            # Padding behind a short field holds whatever the host had there: no address is no matter.
            if word in DEVICE_ADDRESSES and is_device_address(word):
                what = "is a tensor map" if len(value) == TENSOR_MAP_BYTES else f"points to {word:#x}"
                raise Undescribable(f"a parameter {what}, which no argument and nothing prepared explains")
            continue
        pointers.append(Pointer(offset=offset, buffer=place.name, buffer_offset=word - place.start))
        rest[offset : offset + 8] = bytes(8)
    return LaunchParameter(constant=bytes(rest).hex(), pointers=tuple(pointers))


def _memory_set(node: MemsetNode, places: tuple[_Place, ...]) -> MemorySet:
    place = next((p for p in places if p.start <= node.address < p.start + p.size), None)
    if place is None:
        raise Undescribable(
            f"memory at {node.address:#x} is set, which no argument and nothing prepared holds"
        )
    return MemorySet.model_validate(
        {
            "buffer": place.name, "buffer_offset": node.address - place.start, "value": node.value,
            "element_bytes": node.element_bytes, "elements": node.elements,
        }
    )  # fmt: skip


def _named(step: KernelLaunch | MemorySet) -> Iterator[str]:
    if isinstance(step, MemorySet):
        yield step.buffer
        return
    for parameter in step.parameters:
        yield from (p.buffer for p in parameter.pointers)


def _buffer(place: _Place, folder: Path) -> Buffer:
    digest = None
    if place.origin == "prepared":
        path = folder / f"{place.name}.bin"
        flat_view(place.tensor).cpu().numpy().tofile(path)
        digest = file_digest(path)
    return Buffer.model_validate(
        {"name": place.name, "size_bytes": place.size, "origin": place.origin, "contents": digest}
    )
