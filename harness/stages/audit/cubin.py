"""Read what a cubin says of its kernels: registers, frame, shared memory, barriers, and where each parameter
lies.

A cubin is an ELF64 file. `.nv.info` and `.nv.info.<kernel>` hold attribute records: format byte, attribute
byte, then a byte, a half word or a counted value. Attribute numbers were read off `cuobjdump -elf` of the
same files (CUDA 13.5).
"""

import struct
from dataclasses import dataclass
from typing import NamedTuple

from harness.domain.errors import EvidenceError
from harness.stages.audit.program import Slot

__all__ = ["KernelResources", "parse_cubin"]

ATTRIBUTE_FRAME_SIZE = 0x11
ATTRIBUTE_REGISTERS = 0x2F
ATTRIBUTE_PARAMETER = 0x17
ATTRIBUTE_PARAMETER_BANK = 0x0A
ATTRIBUTE_NAMED_BARRIERS = 0x4C
ATTRIBUTE_MBARRIERS = 0x38
ATTRIBUTE_THREADS = 0x10
SYMBOL_FUNCTION = 2


class _Section(NamedTuple):
    name: str
    kind: int
    content: bytes
    size: int
    link: int
    info: int


@dataclass(frozen=True, slots=True)
class KernelResources:
    """What one kernel needs, as the assembler recorded it."""

    name: str
    registers: int
    frame_bytes: int
    """Stack frame a thread: spilled registers and local arrays."""
    shared_bytes: int
    """Static shared memory, the driver's reserved part included."""
    named_barriers: int
    mbarriers: int
    threads: tuple[int, int, int] | None
    """Required block size, where the kernel fixes it."""
    bank_offset: int
    """Where parameters begin in constant bank 0."""
    slots: tuple[Slot, ...]


def parse_cubin(content: bytes) -> tuple[KernelResources, ...]:
    """Every kernel of a cubin; raises `EvidenceError` for anything that is no 64-bit ELF file."""
    try:
        sections = _sections(content)
        symbols = _symbol_names(sections)
        common = _attributes(next((s.content for s in sections if s.name == ".nv.info"), b""))
        return tuple(
            _kernel(s, sections, symbols, common) for s in sections if s.name.startswith(".nv.info.")
        )
    except (struct.error, IndexError, OverflowError, ValueError) as error:
        raise EvidenceError(
            f"the cubin is not a complete 64-bit ELF file ({type(error).__name__}: {error}); compile it again"
        ) from error


def _sections(content: bytes) -> tuple[_Section, ...]:
    if content[:5] != b"\x7fELF\x02":
        raise ValueError(f"it begins with {content[:5]!r}")
    (table,) = struct.unpack_from("<Q", content, 0x28)
    count, names_index = struct.unpack_from("<HH", content, 0x3C)
    headers = [struct.unpack_from("<IIQQQQIIQQ", content, table + 64 * i) for i in range(count)]
    names = headers[names_index][4]
    found = []
    for name, kind, _, _, offset, size, link, info, _, _ in headers:
        body = b"" if kind == 8 else content[offset : offset + size]  # 8: no data in the file
        found.append(_Section(_string(content, names + name), kind, body, size, link, info))
    return tuple(found)


def _string(content: bytes, start: int) -> str:
    return content[start : content.index(b"\0", start)].decode(errors="replace")


def _symbol_names(sections: tuple[_Section, ...]) -> tuple[str, ...]:
    table = next((s for s in sections if s.name == ".symtab"), None)
    if table is None:
        return ()
    strings = sections[table.link].content
    return tuple(
        _string(strings, struct.unpack_from("<I", table.content, at)[0])
        for at in range(0, len(table.content), 24)
    )


def _attributes(content: bytes) -> list[tuple[int, bytes]]:
    """(attribute, value) in file order."""
    found, at = [], 0
    while at + 4 <= len(content):
        form, attribute = content[at], content[at + 1]
        if form == 4:
            (size,) = struct.unpack_from("<H", content, at + 2)
            found.append((attribute, content[at + 4 : at + 4 + size]))
            at += 4 + size
        else:
            found.append((attribute, content[at + 2 : at + 4]))
            at += 4
    return found


def _kernel(
    info: _Section, sections: tuple[_Section, ...], symbols: tuple[str, ...], common: list[tuple[int, bytes]]
) -> KernelResources:
    name = info.name[len(".nv.info.") :]
    own = _attributes(info.content)
    slots = []
    for attribute, value in own:
        if attribute == ATTRIBUTE_PARAMETER:
            _, ordinal, offset, flags = struct.unpack("<IHHI", value[:12])
            slots.append(Slot(ordinal, offset, flags >> 18))
    shared = next((s.size for s in sections if s.name == f".nv.shared.{name}"), 0)
    threads = next((struct.unpack("<III", v[:12]) for a, v in own if a == ATTRIBUTE_THREADS), None)
    bank = next((struct.unpack_from("<IHH", v)[1] for a, v in own if a == ATTRIBUTE_PARAMETER_BANK), 0)
    return KernelResources(
        name=name,
        registers=_of_symbol(common, ATTRIBUTE_REGISTERS, name, symbols),
        frame_bytes=_of_symbol(common, ATTRIBUTE_FRAME_SIZE, name, symbols),
        shared_bytes=shared,
        named_barriers=next((v[0] for a, v in own if a == ATTRIBUTE_NAMED_BARRIERS), 0),
        mbarriers=next((struct.unpack_from("<H", v)[0] for a, v in own if a == ATTRIBUTE_MBARRIERS), 0),
        threads=threads,
        bank_offset=bank,
        slots=tuple(sorted(slots)),
    )


def _of_symbol(attributes: list[tuple[int, bytes]], wanted: int, name: str, symbols: tuple[str, ...]) -> int:
    """A per-function figure of `.nv.info`; raises `ValueError` where the file has none for this kernel."""
    for attribute, value in attributes:
        if attribute == wanted:
            symbol, figure = struct.unpack_from("<II", value)
            if symbols[symbol] == name:
                return int(figure)
    raise ValueError(f"no attribute 0x{wanted:x} for kernel {name}")
