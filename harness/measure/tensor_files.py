"""Arguments of an op as files: raw bytes and a manifest, so that another process can lay them out alike.

Nothing is unpickled. Invariant: `load_arguments(save_arguments(args))` gives tensors of the same bits, shapes
and strides, and the same scalars; a file that does not fit its manifest raises `EvidenceError`.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from pydantic import Field, ValidationError

from harness.domain.errors import EvidenceError
from harness.domain.record import Record, Scalar, Whole

__all__ = [
    "ArgumentFiles", "TensorFile", "file_digest", "flat_view", "load_arguments", "save_arguments",
]  # fmt: skip

MANIFEST = "arguments.json"
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.uint8,
        torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
    )
}  # fmt: skip


class TensorFile(Record):
    """One tensor: its bytes from the first element to the last, gaps included."""

    name: str
    dtype: str
    shape: tuple[Whole, ...]
    stride: tuple[Whole, ...]
    size_bytes: Whole = Field(ge=0)


class ArgumentFiles(Record):
    """Arguments in a folder."""

    tensors: tuple[TensorFile, ...]
    scalars: tuple[tuple[str, Scalar], ...]


def save_arguments(args: Mapping[str, Any], folder: Path) -> ArgumentFiles:
    """Write every argument; raises `ValueError` for a value that is neither tensor nor scalar."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors, scalars = [], []
    for name, value in args.items():
        if isinstance(value, torch.Tensor):
            flat = flat_view(value)
            flat.cpu().numpy().tofile(folder / f"{name}.bin")
            tensors.append(
                TensorFile(
                    name=name, dtype=str(value.dtype).removeprefix("torch."), shape=tuple(value.shape),
                    stride=tuple(value.stride()), size_bytes=flat.numel(),
                )
            )  # fmt: skip
        elif value is None or isinstance(value, bool | int | float | str):
            scalars.append((name, value))
        else:
            raise ValueError(f"{name} is a {type(value).__name__}, neither tensor nor scalar")
    files = ArgumentFiles(tensors=tuple(tensors), scalars=tuple(scalars))
    (folder / MANIFEST).write_bytes(files.canonical())
    return files


def load_arguments(folder: Path, device: str) -> dict[str, Any]:
    """The arguments of a folder on a device, each tensor in memory of its own."""
    try:
        files = ArgumentFiles.from_json((folder / MANIFEST).read_bytes())
    except (OSError, ValueError, ValidationError) as error:
        raise EvidenceError(
            f"{folder}: no arguments can be read here: {str(error).splitlines()[0]}"
        ) from error
    found: dict[str, Any] = dict(files.scalars)
    for tensor in files.tensors:
        raw = numpy.fromfile(folder / f"{tensor.name}.bin", dtype=numpy.uint8)
        dtype = DTYPES.get(tensor.dtype)
        if dtype is None or raw.size != tensor.size_bytes or len(tensor.shape) != len(tensor.stride):
            raise EvidenceError(f"{folder}: {tensor.name} has {raw.size} bytes and does not fit its manifest")
        if _span(tensor.shape, tensor.stride) * dtype.itemsize != raw.size:
            raise EvidenceError(
                f"{folder}: {tensor.name} of shape {tensor.shape} does not span {raw.size} bytes"
            )
        flat = torch.from_numpy(raw).to(device).view(dtype)
        found[tensor.name] = flat.as_strided(tensor.shape, tensor.stride)
    return found


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes in place: what is written to the row is written to the tensor."""
    count = _span(tuple(tensor.shape), tuple(tensor.stride()))
    return tensor.as_strided((count,), (1,), tensor.storage_offset()).view(torch.uint8)


def _span(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Elements from the first to the last, gaps included; 0 where there is none."""
    if any(side == 0 for side in shape):
        return 0
    return 1 + sum((side - 1) * step for side, step in zip(shape, stride, strict=True))


def file_digest(path: Path) -> str:
    """sha256 of a file."""
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()
