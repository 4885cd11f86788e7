"""The trusted half of a described launch: check the record, lay its buffers out, and launch.

This process imports neither the pack nor anything that it brought: what runs of the candidate is device code
out of a cubin whose digest the record states. Checked before anything is launched: digests, that the binary
has that kernel with just these parameters, the device's limits, and that no constant is an address. Timing
and comparing are in `described_run`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harness.domain.errors import EvidenceError
from harness.domain.launch_record import KernelLaunch, LaunchParameter, LaunchRecord, MemorySet, TensorMap
from harness.measure.driver import (
    Kernel,
    Module,
    TensorMapRequest,
    encode_tensor_map,
    is_device_address,
)
from harness.measure.tensor_files import file_digest, flat_view
from harness.measure.tensors import Guarded, guard

__all__ = [
    "DEVICE_ADDRESSES",
    "Layout",
    "bound_call",
    "check_record",
    "kernels_of",
    "lay_out",
    "require_no_addresses",
]

MAX_THREADS, MAX_CLUSTER, MAX_SHARED_BYTES = 1024, 16, 227 * 1024
BAND_BYTES, BAND_VALUE = 256, 0xA5
DEVICE_ADDRESSES = range(0x7000_0000_0000, 0x8000_0000_0000)
"""Where the driver puts device memory of a 64-bit process on Linux: a constant in there is an address."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True)
class Layout:
    """One copy of everything that the launches name."""

    guarded: Guarded
    memory: dict[str, torch.Tensor]
    """By the record's names."""
    bands: tuple[torch.Tensor, ...]
    """On both sides of what is no argument."""

    @property
    def args(self) -> dict[str, Any]:
        """The op's arguments."""
        return self.guarded.args

    def has_whole_bands(self) -> bool:
        """Whether nothing was written beside memory that is no argument."""
        return all(bool((band == BAND_VALUE).all()) for band in self.bands)


def check_record(record: LaunchRecord, cubins: Mapping[str, Path]) -> tuple[str, ...]:
    """What is wrong with a record, in words; nothing where it may be launched. Needs no device.

    `cubins`: files by the digest that the record calls them by.
    """
    return tuple(_faults(record, cubins))


def kernels_of(record: LaunchRecord, cubins: Mapping[str, Path]) -> tuple[Kernel | None, ...]:
    """The kernel of each step, None for a memset; raises `EvidenceError` where the record does not hold.

    Modules stay loaded for the life of the process, which ends with the measurement.
    """
    if wrong := check_record(record, cubins):
        raise EvidenceError("; ".join(wrong))
    torch.zeros(1, device="cuda")  # the driver's calls need torch's context
    modules = {digest: Module(path.read_bytes()) for digest, path in cubins.items()}
    found: list[Kernel | None] = []
    for step in record.steps:
        if isinstance(step, MemorySet):
            found.append(None)
            continue
        kernel = modules[step.cubin].kernel(step.kernel)
        sizes = [size for _, size in kernel.parameters()]
        stated = [len(p.constant) // 2 for p in step.parameters]
        if sizes != stated:
            raise EvidenceError(
                f"{step.kernel[:60]} takes parameters of {sizes} bytes, and the record says {stated}"
            )
        kernel.allow(step.shared_bytes, step.cluster)
        found.append(kernel)
    return tuple(found)


def lay_out(record: LaunchRecord, args: Mapping[str, Any], prepared: Path) -> Layout:
    """Guarded copies of the arguments, and memory for what the record names beside them.

    Raises `EvidenceError` for a buffer that is not what the record says.
    """
    guarded = guard(args)
    memory, bands = dict[str, torch.Tensor](), list[torch.Tensor]()
    for buffer in record.buffers:
        if buffer.origin == "argument":
            names = [n for n in args if n.lower() == buffer.name]
            if not names or flat_view(guarded.args[names[0]]).numel() != buffer.size_bytes:
                raise EvidenceError(f"{buffer.name} is no argument of the op, or of another size")
            memory[buffer.name] = guarded.args[names[0]]
            continue
        size = buffer.size_bytes + 2 * BAND_BYTES
        whole = torch.full((size,), BAND_VALUE, dtype=torch.uint8, device="cuda")
        inner = whole[BAND_BYTES:-BAND_BYTES]
        inner.zero_()
        if buffer.origin == "prepared":
            inner.copy_(_contents(prepared / f"{buffer.name}.bin", str(buffer.contents), buffer.size_bytes))
        memory[buffer.name] = inner
        bands += [whole[:BAND_BYTES], whole[-BAND_BYTES:]]
    return Layout(guarded, memory, tuple(bands))


def require_no_addresses(record: LaunchRecord) -> None:
    """Raises `EvidenceError` where a constant is an address of memory in this process: called when all of it
    is laid out.

    A constant that only looks like an address is the padding of a parameter, and leads nowhere.
    """
    for step in record.steps:
        if isinstance(step, MemorySet):
            continue
        for place, parameter in enumerate(step.parameters):
            constant = bytes.fromhex(parameter.constant)
            words = (int.from_bytes(constant[i : i + 8], "little") for i in range(0, len(constant) - 7, 8))
            if any(word in DEVICE_ADDRESSES and is_device_address(word) for word in words):
                raise EvidenceError(f"parameter {place} of {step.kernel[:60]} holds an address as a constant")


def bound_call(
    record: LaunchRecord, kernels: Sequence[Kernel | None], layout: Layout
) -> Callable[[int], None]:
    """One call on one layout, which takes the stream that it goes to."""
    made = [
        [] if isinstance(step, MemorySet) else [_value(p, layout) for p in step.parameters]
        for step in record.steps
    ]

    def call(stream: int) -> None:
        for step, kernel, values in zip(record.steps, kernels, made, strict=True):
            if isinstance(step, MemorySet):
                _set_memory(step, layout)
            elif kernel is not None:
                kernel.launch(
                    step.grid, step.block, values, stream=stream, shared_bytes=step.shared_bytes,
                    cluster=step.cluster, is_dependent=step.is_dependent, carveout=step.carveout,
                )  # fmt: skip

    return call


def _faults(record: LaunchRecord, cubins: Mapping[str, Path]) -> Iterator[str]:
    for digest, path in cubins.items():
        if file_digest(path) != digest:
            yield f"{path.name} is not the file of digest {digest[:12]} that the record names"
    for step in record.steps:
        if isinstance(step, KernelLaunch):
            yield from _kernel_faults(step, cubins)


def _kernel_faults(step: KernelLaunch, cubins: Mapping[str, Path]) -> Iterator[str]:
    name = step.kernel[:60]
    if step.cubin not in cubins:
        yield f"no file has the digest {step.cubin[:12]} of the kernel {name}"
    elif step.kernel.encode() not in cubins[step.cubin].read_bytes():
        yield f"{cubins[step.cubin].name} holds no kernel {name}"
    if _product(step.block) > MAX_THREADS or _product(step.cluster) > MAX_CLUSTER:
        yield f"{name} asks for blocks of {step.block} threads in clusters of {step.cluster}"
    if step.shared_bytes > MAX_SHARED_BYTES:
        yield f"{name} asks for {step.shared_bytes} bytes of shared memory"
    if any(side % part for side, part in zip(step.grid, step.cluster, strict=True)):
        yield f"{name} has a grid of {step.grid} that clusters of {step.cluster} do not divide"


def _contents(path: Path, digest: str, size: int) -> torch.Tensor:
    if not path.is_file() or file_digest(path) != digest:
        raise EvidenceError(f"{path.name} is not there, or not what the record calls so")
    raw = bytearray(path.read_bytes())
    if len(raw) != size:
        raise EvidenceError(f"{path.name} has {len(raw)} bytes, not {size}")
    return torch.frombuffer(raw, dtype=torch.uint8)


def _value(parameter: LaunchParameter, layout: Layout) -> bytes:
    """A parameter's bytes for one layout."""
    if parameter.tensor_map is not None:
        return encode_tensor_map(_map_request(parameter.tensor_map, layout))
    value = bytearray.fromhex(parameter.constant)
    for pointer in parameter.pointers:
        address = layout.memory[pointer.buffer].data_ptr() + pointer.buffer_offset
        value[pointer.offset : pointer.offset + 8] = address.to_bytes(8, "little")
    return bytes(value)


def _map_request(wanted: TensorMap, layout: Layout) -> TensorMapRequest:
    return TensorMapRequest(
        wanted.dtype, layout.memory[wanted.buffer].data_ptr() + wanted.buffer_offset, wanted.dims,
        wanted.strides, wanted.box, wanted.element_strides, wanted.interleave, wanted.swizzle,
        wanted.l2_promotion, wanted.fill,
    )  # fmt: skip


def _set_memory(step: MemorySet, layout: Layout) -> None:
    raw = flat_view(layout.memory[step.buffer])
    part = raw[step.buffer_offset : step.buffer_offset + step.elements * step.element_bytes]
    part.view(INTEGERS[step.element_bytes]).fill_(step.value)


def _product(values: Sequence[int]) -> int:
    found = 1
    for value in values:
        found *= value
    return found
