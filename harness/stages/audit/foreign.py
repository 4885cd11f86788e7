"""Machine code that no pack describes, as far as it can be read: cubins by themselves, in a shared library or
in a wheel.

There are no roles, so nothing is judged. What is reported is what the reader understood, and, line by line of
the disassembly, what it did not: an audit of such code would be worth that much and no more.
"""

import re
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter

from harness.domain.errors import EvidenceError, InputError
from harness.domain.record import Record, Whole
from harness.stages.audit.cubin import KernelResources, parse_cubin
from harness.stages.audit.origins import trace_addresses
from harness.stages.audit.program import OriginKind, Program, reached_without_wait
from harness.stages.audit.sass import code_names, parse_sass, target_of, unread_lines

__all__ = ["REPORTS", "ForeignKernel", "ForeignCubin", "cubins_in", "disassembled", "read_cubin"]

T = TypeVar("T")
TOOL_TIMEOUT_S = 600.0
MAX_UNREAD_SHOWN = 5
MAX_CUBINS = 1000
MAX_CUBIN_BYTES = 256 * 1024**2
NO_GPU_CODE = re.compile(r"does not contain device code|No device code|not an ELF", re.IGNORECASE)


class ForeignKernel(Record):
    """What was read of one kernel."""

    name: str
    registers: Whole
    frame_bytes: Whole
    shared_bytes: Whole
    instructions: Whole
    accesses: Whole
    """To global memory."""
    traced: Whole
    """Of these, how many addresses come from known parameters."""
    before_wait: Whole | None
    """Of these, how many some path reaches before it has waited; None for a kernel that never waits."""
    unresolved: Whole
    """Branches and calls whose targets are not known."""


class ForeignCubin(Record):
    """What was read of one cubin; `error` where it could not be read at all."""

    name: str
    target: str
    kernels: tuple[ForeignKernel, ...]
    unread: Whole
    """Lines of the disassembly that look like instructions and were not understood."""
    unread_examples: tuple[str, ...]
    error: str = ""


REPORTS: TypeAdapter[tuple[ForeignCubin, ...]] = TypeAdapter(tuple[ForeignCubin, ...])


@contextmanager
def cubins_in(path: Path, pattern: str = "", limit: int = MAX_CUBINS) -> Iterator[tuple[Path, ...]]:
    """Cubins of a file in a folder that ends with the block: the file itself, those inside a shared library
    or a wheel whose path contains `pattern`; of more than `limit` so many, evenly spread. Raises `InputError`
    where there are none.
    """
    with tempfile.TemporaryDirectory(prefix="cubins-") as place:
        folder = Path(place)
        if not path.is_file():
            raise InputError(f"{path}: no such file; give a cubin, a shared library or a wheel")
        if zipfile.is_zipfile(path):
            found = _from_wheel(path, folder, pattern, limit)
        elif _is_cubin(path):
            found = (path,)
        else:
            found = _from_library(path, folder, pattern)
        if not found:
            named = f" whose name contains {pattern!r}" if pattern else ""
            raise InputError(
                f"{path}: holds no cubin{named}; give a cubin, a shared library with device code, or a wheel"
            )
        yield _spread(found, limit)


def read_cubin(path: Path) -> ForeignCubin:
    """Everything that can be said of one cubin. What cannot be read is said, never raised."""
    name = path.name
    try:
        resources = parse_cubin(path.read_bytes())
        text = disassembled(path)
    except EvidenceError as error:
        return ForeignCubin(
            name=name, target="", kernels=(), unread=0, unread_examples=(), error=str(error)[:500]
        )
    by_name = {r.name: r for r in resources}
    programs = parse_sass(text, by_name)
    unread = unread_lines(text)
    read = {p.name for p in programs}
    lost, strange = sorted(by_name.keys() - read), sorted(code_names(text) - read)
    told = [
        f"no machine code was found of {len(lost)} kernels, first {lost[0]}" if lost else "",
        f"code of {len(strange)} functions has no record of its parameters, first {strange[0]}"
        if strange
        else "",
    ]
    return ForeignCubin(
        name=name,
        target=target_of(text) or "",
        kernels=tuple(_kernel(p, by_name[p.name]) for p in programs),
        unread=len(unread),
        unread_examples=tuple(unread[:MAX_UNREAD_SHOWN]),
        error="; ".join(filter(None, told))[:500],
    )


def disassembled(path: Path) -> str:
    """Machine code of a cubin as text. Raises `EvidenceError` where the disassembler cannot read it."""
    tool = _tool("nvidia-cuda-nvdisasm", "nvdisasm")
    try:
        ended = subprocess.run(
            [str(tool), "-c", str(path)],
            capture_output=True,
            text=True,
            timeout=TOOL_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise EvidenceError(f"{path.name}: nvdisasm took more than {TOOL_TIMEOUT_S:.0f} s") from error
    if ended.returncode != 0:
        raise EvidenceError(f"{path.name}: nvdisasm could not read it: {ended.stderr.strip()[:300]}")
    return ended.stdout


def _kernel(program: Program, resources: KernelResources) -> ForeignKernel:
    traced = {
        index: origins
        for index, origins in trace_addresses(program).items()
        if not (
            any(o.kind is OriginKind.ON_CHIP for o in origins)
            and not any(o.kind in (OriginKind.POINTER, OriginKind.DESCRIPTOR) for o in origins)
        )
    }
    known = [
        o for o in traced.values() if any(x.kind in (OriginKind.POINTER, OriginKind.DESCRIPTOR) for x in o)
    ]
    early = reached_without_wait(program)
    return ForeignKernel(
        name=program.name,
        registers=resources.registers,
        frame_bytes=resources.frame_bytes,
        shared_bytes=resources.shared_bytes,
        instructions=len(program.instructions),
        accesses=len(traced),
        traced=len(known),
        before_wait=sum(i in early for i in traced) if program.has_wait() else None,
        unresolved=len(program.unresolved),
    )


def _spread(found: Sequence[T], limit: int) -> tuple[T, ...]:
    """At most `limit` of them, evenly spread."""
    count = min(limit, len(found))
    return tuple(found[i * len(found) // count] for i in range(count))


def _is_cubin(path: Path) -> bool:
    """Whether the file is an ELF file for the CUDA machine (number 190)."""
    with path.open("rb") as file:
        head = file.read(20)
    return head[:4] == b"\x7fELF" and int.from_bytes(head[18:20], "little") == 190


def _from_wheel(path: Path, folder: Path, pattern: str, limit: int) -> tuple[Path, ...]:
    found = []
    with zipfile.ZipFile(path) as wheel:
        members = [m for m in wheel.infolist() if m.filename.endswith(".cubin") and pattern in m.filename]
        fit = [m for m in members if m.file_size <= MAX_CUBIN_BYTES]
        for number, member in enumerate(_spread(fit, limit)):
            target = folder / f"{number}-{Path(member.filename).name[-120:]}"
            target.write_bytes(wheel.read(member))
            found.append(target)
    return tuple(found)


def _from_library(path: Path, folder: Path, pattern: str) -> tuple[Path, ...]:
    tool = _tool("nvidia-cuda-cuobjdump", "cuobjdump")
    ended = subprocess.run(
        [str(tool), "-xelf", pattern or "all", str(path.resolve())],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TOOL_TIMEOUT_S,
        check=False,
    )
    found = tuple(sorted(folder.glob("*.cubin")))
    if not found and ended.returncode != 0 and not NO_GPU_CODE.search(ended.stdout + ended.stderr):
        raise InputError(
            f"{path}: cuobjdump could not read it: {(ended.stderr or ended.stdout).strip()[:300]}"
        )
    return found


def _tool(distribution: str, name: str) -> Path:
    try:
        files = metadata.distribution(distribution).files or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == name:
            return Path(str(file.locate()))
    raise InputError(f"{name} is not installed; install it with: pip install {distribution}")
