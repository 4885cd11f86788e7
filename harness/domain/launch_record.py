"""What one call of a compiled op puts on the device, as data: enough to launch it without its code.

Written by a sandboxed process that runs candidate code; read by one that never does. Invariant: every byte of
a parameter is either a constant that is written out here or part of a pointer or a tensor map whose buffer is
named, so that a reader can lay the buffers out anew.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from harness.domain.record import Digest, Name, Positive, Record, Whole

__all__ = [
    "Buffer", "KernelLaunch", "LaunchParameter", "LaunchRecord", "MemorySet", "Pointer", "TensorMap",
]  # fmt: skip

POINTER_BYTES = 8
TENSOR_MAP_BYTES = 128
MAX_PARAMETER_BYTES = 32764
"""Of a kernel in all, as CUDA allows."""
Extent = tuple[Positive, Positive, Positive]


class Buffer(Record):
    """Device memory that a call reads or writes."""

    name: Name
    size_bytes: Positive
    origin: Literal["argument", "prepared", "workspace"]
    """An argument of the op; weights that the candidate laid out at load time; memory of its own, zeros at
    first."""
    contents: Digest | None = None
    """Digest of what the candidate laid out."""

    @model_validator(mode="after")
    def _prepared_has_contents(self) -> Self:
        if (self.origin == "prepared") != (self.contents is not None):
            raise ValueError(f"{self.name}: contents are stated for prepared buffers, and only for them")
        return self


class Pointer(Record):
    """Eight bytes of a parameter that hold an address."""

    offset: Whole = Field(ge=0)
    """Within the parameter."""
    buffer: Name
    buffer_offset: Whole = Field(ge=0)


class TensorMap(Record):
    """A tiled tensor map, by the driver's numbers for types and modes."""

    buffer: Name
    buffer_offset: Whole = Field(ge=0)
    dtype: Whole = Field(ge=0, le=15)
    dims: tuple[Positive, ...] = Field(min_length=1, max_length=5)
    strides: tuple[Positive, ...]
    """Bytes, of every axis but the first."""
    box: tuple[Positive, ...]
    element_strides: tuple[Positive, ...]
    interleave: Whole = Field(default=0, ge=0, le=2)
    swizzle: Whole = Field(default=0, ge=0, le=6)
    l2_promotion: Whole = Field(default=0, ge=0, le=3)
    fill: Whole = Field(default=0, ge=0, le=1)

    @model_validator(mode="after")
    def _ranks_agree(self) -> Self:
        rank = len(self.dims)
        if (len(self.strides), len(self.box), len(self.element_strides)) != (rank - 1, rank, rank):
            raise ValueError(
                f"a tensor map of rank {rank} has one stride less, and as many box sides and steps"
            )
        return self


class LaunchParameter(Record):
    """One parameter of a kernel."""

    constant: str = Field(pattern=r"^([0-9a-f]{2})+$", max_length=2 * MAX_PARAMETER_BYTES)
    """All of its bytes in hex; zeros where a pointer or a tensor map goes."""
    pointers: tuple[Pointer, ...] = ()
    tensor_map: TensorMap | None = None

    @model_validator(mode="after")
    def _fields_lie_inside(self) -> Self:
        size = len(self.constant) // 2
        if any(p.offset % POINTER_BYTES or p.offset + POINTER_BYTES > size for p in self.pointers):
            raise ValueError(f"a pointer lies outside of its parameter of {size} bytes, or across words")
        if self.tensor_map is not None and (size != TENSOR_MAP_BYTES or self.pointers):
            raise ValueError(f"a tensor map fills a parameter of {TENSOR_MAP_BYTES} bytes alone, not {size}")
        return self


class KernelLaunch(Record):
    """One kernel launch."""

    kind: Literal["kernel"] = "kernel"
    cubin: Digest
    kernel: str = Field(min_length=1, max_length=2048)
    grid: Extent
    block: Extent
    cluster: Extent = (1, 1, 1)
    shared_bytes: Whole = Field(ge=0)
    """Dynamic shared memory."""
    is_dependent: bool
    """Whether it may start before its predecessor ends."""
    carveout: Whole = Field(default=-1, ge=-1, le=100)
    """Preferred share of L1 that is shared memory, in per cent; -1: the driver's choice."""
    parameters: tuple[LaunchParameter, ...]


class MemorySet(Record):
    """Memory that a call sets before or between kernels."""

    kind: Literal["memset"] = "memset"
    buffer: Name
    buffer_offset: Whole = Field(ge=0)
    value: Whole = Field(ge=0)
    element_bytes: Literal[1, 2, 4]
    elements: Positive


class LaunchRecord(Record):
    """One call of one op, step by step."""

    schema_version: Literal[1] = 1
    op: Name
    implementation: str
    buffers: tuple[Buffer, ...] = Field(min_length=1)
    steps: tuple[Annotated[KernelLaunch | MemorySet, Field(discriminator="kind")], ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _every_address_lies_in_a_named_buffer(self) -> Self:
        sizes = {b.name: b.size_bytes for b in self.buffers}
        if len(sizes) != len(self.buffers):
            raise ValueError("two buffers have one name")
        for name, offset in self._addresses():
            if not 0 <= offset < sizes.get(name, 0):
                raise ValueError(f"an address {offset} bytes into {name} lies in no buffer of the record")
        return self

    def _addresses(self) -> list[tuple[str, int]]:
        found: list[tuple[str, int]] = []
        for step in self.steps:
            if isinstance(step, MemorySet):
                end = step.buffer_offset + step.element_bytes * step.elements - 1
                found += [(step.buffer, step.buffer_offset), (step.buffer, end)]
                continue
            for parameter in step.parameters:
                found += [(p.buffer, p.buffer_offset) for p in parameter.pointers]
                if parameter.tensor_map is not None:
                    found.append((parameter.tensor_map.buffer, parameter.tensor_map.buffer_offset))
        return found
