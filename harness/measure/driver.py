"""The CUDA driver through ctypes: load a cubin or PTX, launch by data, read what a captured graph launches.

Works in torch's context and needs no package beside the driver itself. Invariant: every call that the driver
refuses raises `DriverError` with the driver's own word for it; nothing is launched that was not asked for.
"""

import ctypes
from collections.abc import Sequence
from ctypes import (
    POINTER,
    Structure,
    Union,
    byref,
    c_char_p,
    c_int,
    c_size_t,
    c_ubyte,
    c_uint,
    c_uint64,
    c_void_p,
)
from functools import lru_cache
from typing import Any, NamedTuple

from harness.domain.errors import DeviceMissing, FasttrackError

__all__ = [
    "DriverError", "Kernel", "KernelNode", "MemsetNode", "Module", "TensorMapRequest", "encode_tensor_map",
    "graph_nodes", "is_device_address",
    "persisting_l2_bytes", "reset_persisting_l2",
]  # fmt: skip

CLUSTER_DIMENSION, SERIALIZATION, CARVEOUT = 4, 6, 14
"""Launch attributes by the driver's number: cluster size, start before the predecessor ends, share of L1 that
is shared memory."""
MAX_DYNAMIC_SHARED = 8
"""Function attribute that must be raised before more than 48 KiB are asked for."""
NON_PORTABLE_CLUSTER = 14
PERSISTING_L2 = 6
"""Context limit."""
MEMORY_TYPE = 2
"""Pointer attribute that exists for addresses the driver knows."""
KERNEL_NODE, MEMSET_NODE, EMPTY_NODE = 0, 2, 5
TENSOR_MAP_BYTES = 128


class DriverError(FasttrackError):
    """The driver refused a call."""


class _Value(Union):
    _fields_ = (("words", c_int * 16),)


class _Attribute(Structure):
    _fields_ = (("id", c_int), ("pad", c_int), ("value", _Value))


class _Config(Structure):
    _fields_ = (
        ("grid", c_uint * 3), ("block", c_uint * 3), ("shared", c_uint), ("stream", c_void_p),
        ("attributes", POINTER(_Attribute)), ("count", c_uint),
    )  # fmt: skip


class _KernelParams(Structure):
    _fields_ = (
        ("func", c_void_p), ("grid", c_uint * 3), ("block", c_uint * 3), ("shared", c_uint),
        ("params", POINTER(c_void_p)), ("extra", POINTER(c_void_p)), ("kern", c_void_p), ("ctx", c_void_p),
    )  # fmt: skip


class _MemsetParams(Structure):
    _fields_ = (
        ("dst", c_uint64), ("pitch", c_size_t), ("value", c_uint), ("element", c_uint), ("width", c_size_t),
        ("height", c_size_t),
    )  # fmt: skip


class _EdgeData(Structure):
    _fields_ = (("from_port", c_ubyte), ("to_port", c_ubyte), ("type", c_ubyte), ("reserved", c_ubyte * 5))


class KernelNode(NamedTuple):
    """One kernel of a captured graph, as the driver would launch it."""

    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    carveout: int
    parameters: tuple[tuple[int, bytes], ...]
    """(offset in the parameter buffer, bytes), in order."""
    is_dependent: bool
    """Whether it may start before the node before it ends."""


class MemsetNode(NamedTuple):
    """One row of memory that a captured graph sets."""

    address: int
    value: int
    element_bytes: int
    elements: int


class TensorMapRequest(NamedTuple):
    """What `cuTensorMapEncodeTiled` is asked for, by the driver's numbers for types and modes."""

    dtype: int
    address: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    """Bytes, of every axis but the first."""
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    interleave: int
    swizzle: int
    l2_promotion: int
    fill: int


class Kernel:
    """One function of a loaded module."""

    def __init__(self, handle: c_void_p) -> None:
        self._handle = handle

    def parameters(self) -> tuple[tuple[int, int], ...]:
        """(offset, bytes) of every parameter that the binary itself declares, in order."""
        return _parameters(self._handle, "cuFuncGetParamInfo")

    def launch(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        parameters: Sequence[bytes],
        *,
        stream: int,
        shared_bytes: int = 0,
        cluster: Sequence[int] = (1, 1, 1),
        is_dependent: bool = False,
        carveout: int = -1,
    ) -> None:
        """Put one launch on a stream; `parameters` are raw bytes, one entry a parameter.

        `is_dependent`: it may start before its predecessor on the stream ends.
        """
        prepare = _Prepared(parameters, cluster, is_dependent, carveout)
        config = _Config(
            (c_uint * 3)(*grid), (c_uint * 3)(*block), shared_bytes, stream, prepare.attributes, prepare.count
        )
        _call("cuLaunchKernelEx", byref(config), self._handle, prepare.pointers, None)

    def allow(self, shared_bytes: int, cluster: Sequence[int]) -> None:
        """Raise the limits that a launch of this size needs."""
        if shared_bytes > 48 * 1024:
            _call("cuFuncSetAttribute", self._handle, c_int(MAX_DYNAMIC_SHARED), c_int(shared_bytes))
        if cluster[0] * cluster[1] * cluster[2] > 8:
            _call("cuFuncSetAttribute", self._handle, c_int(NON_PORTABLE_CLUSTER), c_int(1))


class Module:
    """A cubin or PTX text in torch's context; lives until `close`."""

    def __init__(self, image: bytes) -> None:
        self._image = image if image.startswith(b"\x7fELF") else image.rstrip(b"\0") + b"\0"
        self._handle = c_void_p()
        _call("cuModuleLoadData", byref(self._handle), c_char_p(self._image))

    def kernel(self, name: str) -> Kernel:
        """A kernel by its symbol; raises `DriverError` where the module has none of that name."""
        handle = c_void_p()
        _call("cuModuleGetFunction", byref(handle), self._handle, c_char_p(name.encode()))
        return Kernel(handle)

    def close(self) -> None:
        """Unload it."""
        _call("cuModuleUnload", self._handle)


class _Prepared:
    """Parameter pointers and attributes of one launch; holds what they point to."""

    def __init__(
        self, parameters: Sequence[bytes], cluster: Sequence[int], is_dependent: bool, carveout: int
    ) -> None:
        # A tensor map has to lie on 64 bytes, so every parameter does.
        self._buffers = [_aligned(value) for value in parameters]
        self.pointers = (c_void_p * max(1, len(parameters)))(*(address for _, address in self._buffers))
        found = []
        if tuple(cluster) != (1, 1, 1):
            found.append((CLUSTER_DIMENSION, tuple(cluster)))
        if is_dependent:
            found.append((SERIALIZATION, (1,)))
        if carveout >= 0:
            found.append((CARVEOUT, (carveout,)))
        self.attributes = (_Attribute * max(1, len(found)))()
        for place, (number, words) in enumerate(found):
            self.attributes[place].id = number
            for word, value in enumerate(words):
                self.attributes[place].value.words[word] = value
        self.count = len(found)


def encode_tensor_map(request: TensorMapRequest) -> bytes:
    """The 128 bytes of a tiled tensor map; raises `DriverError` where the driver finds it wrong."""
    raw = (ctypes.c_char * (TENSOR_MAP_BYTES + 64))()
    address = ctypes.addressof(raw) + -ctypes.addressof(raw) % 64
    rank = len(request.dims)
    _call(
        "cuTensorMapEncodeTiled", c_void_p(address), c_int(request.dtype), c_uint(rank),
        c_uint64(request.address), (c_uint64 * rank)(*request.dims),
        (c_uint64 * max(1, rank - 1))(*request.strides), (c_uint * rank)(*request.box),
        (c_uint * rank)(*request.element_strides), c_int(request.interleave), c_int(request.swizzle),
        c_int(request.l2_promotion), c_int(request.fill),
    )  # fmt: skip
    return ctypes.string_at(address, TENSOR_MAP_BYTES)


def is_device_address(word: int) -> bool:
    """Whether a number is the address of memory that the driver knows in this process."""
    kind = c_uint()
    code: int = _driver().cuPointerGetAttribute(byref(kind), c_int(MEMORY_TYPE), c_uint64(word))
    return code == 0


def persisting_l2_bytes() -> int:
    """How much of L2 is set aside for lines that a flush leaves there; 0 where nobody asked for any."""
    size = c_size_t()
    _call("cuCtxGetLimit", byref(size), c_int(PERSISTING_L2))
    return size.value


def reset_persisting_l2() -> None:
    """Lines that were set aside become ordinary ones, which a flush drives out."""
    _call("cuCtxResetPersistingL2Cache")


def graph_nodes(graph: int) -> tuple[KernelNode | MemsetNode, ...]:
    """What a captured graph does, in order; raises `DriverError` for anything but a chain of kernels and
    memsets.
    """
    count = c_size_t()
    _call("cuGraphGetNodes", c_void_p(graph), None, byref(count))
    nodes = (c_void_p * max(1, count.value))()
    _call("cuGraphGetNodes", c_void_p(graph), nodes, byref(count))
    handles = [int(node or 0) for node in nodes][: count.value]
    edges = _edges(graph)
    found: list[KernelNode | MemsetNode] = []
    for node in _chain(handles, edges):
        kind = c_int()
        _call("cuGraphNodeGetType", c_void_p(node), byref(kind))
        if kind.value == KERNEL_NODE:
            is_dependent = any(to == node and data for _, to, data in edges)
            found.append(_kernel_node(c_void_p(node), is_dependent))
        elif kind.value == MEMSET_NODE:
            found.append(_memset_node(c_void_p(node)))
        elif kind.value != EMPTY_NODE:
            raise DriverError(f"a graph node of type {kind.value} is neither kernel nor memset")
    return tuple(found)


def _edges(graph: int) -> list[tuple[int, int, bool]]:
    """(from, to, whether the second may start before the first ends)."""
    count = c_size_t()
    _call("cuGraphGetEdges_v2", c_void_p(graph), None, None, None, byref(count))
    if not count.value:
        return []
    sources, targets = (c_void_p * count.value)(), (c_void_p * count.value)()
    data = (_EdgeData * count.value)()
    _call("cuGraphGetEdges_v2", c_void_p(graph), sources, targets, data, byref(count))
    return [(int(a or 0), int(b or 0), bool(d.type)) for a, b, d in zip(sources, targets, data, strict=True)]


def _chain(nodes: Sequence[int], edges: Sequence[tuple[int, int, bool]]) -> list[int]:
    """The nodes one after another; raises `DriverError` where two could run side by side."""
    after = {a: b for a, b, _ in edges}
    first = [node for node in nodes if node not in {b for _, b, _ in edges}]
    if len(after) != len(edges) or len(first) != min(1, len(nodes)):
        raise DriverError("the captured call is no chain: some of its work runs beside the rest")
    found, node = [], first[0] if first else 0
    while node:
        found.append(node)
        node = after.get(node, 0)
    if len(found) != len(nodes):
        raise DriverError("the captured call is no chain: some of its work runs beside the rest")
    return found


def _kernel_node(node: c_void_p, is_dependent: bool) -> KernelNode:
    held = _KernelParams()
    _call("cuGraphKernelNodeGetParams_v2", node, byref(held))
    name = c_char_p()
    if held.func:
        _call("cuFuncGetName", byref(name), c_void_p(held.func))
        layout = _parameters(c_void_p(held.func), "cuFuncGetParamInfo")
    else:
        _call("cuKernelGetName", byref(name), c_void_p(held.kern))
        layout = _parameters(c_void_p(held.kern), "cuKernelGetParamInfo")
    values = tuple(
        (offset, ctypes.string_at(held.params[place], size)) for place, (offset, size) in enumerate(layout)
    )
    cluster = tuple(_attribute(node, CLUSTER_DIMENSION).words[:3])
    return KernelNode(
        (name.value or b"").decode(), _three(held.grid), _three(held.block),
        (max(1, cluster[0]), max(1, cluster[1]), max(1, cluster[2])), held.shared,
        _attribute(node, CARVEOUT).words[0], values, is_dependent,
    )  # fmt: skip


def _memset_node(node: c_void_p) -> MemsetNode:
    held = _MemsetParams()
    _call("cuGraphMemsetNodeGetParams", node, byref(held))
    if held.height > 1:
        raise DriverError("the captured call sets memory of several rows, which no launch record describes")
    return MemsetNode(held.dst, held.value, held.element, held.width)


def _attribute(node: c_void_p, number: int) -> _Value:
    value = _Value()
    _call("cuGraphKernelNodeGetAttribute", node, c_int(number), byref(value))
    return value


def _parameters(handle: c_void_p, function: str) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    while True:
        offset, size = c_size_t(), c_size_t()
        if getattr(_driver(), function)(handle, c_size_t(len(found)), byref(offset), byref(size)):
            return tuple(found)  # one past the last parameter
        found.append((offset.value, size.value))


def _three(values: Any) -> tuple[int, int, int]:
    return int(values[0]), int(values[1]), int(values[2])


def _aligned(value: bytes) -> tuple[Any, int]:
    """A copy on a multiple of 64 bytes: (what owns it, its address)."""
    raw = (ctypes.c_char * (len(value) + 64))()
    address = ctypes.addressof(raw) + -ctypes.addressof(raw) % 64
    ctypes.memmove(address, value, len(value))
    return raw, address


@lru_cache(maxsize=1)
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceMissing("no CUDA driver is installed here; launches need a GPU machine") from error


def _call(function: str, *arguments: Any) -> None:
    driver = _driver()
    code = getattr(driver, function)(*arguments)
    if code:
        word = c_char_p()
        driver.cuGetErrorName(c_int(code), byref(word))
        raise DriverError(f"{function}: {(word.value or b'unknown error').decode()} ({code})")
