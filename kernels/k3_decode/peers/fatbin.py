#!/usr/bin/env python3
"""Blank the GPU code of unwanted architectures inside a CUDA shared library.

    python -m k3_decode.peers.fatbin SRC.so DST.so 90        keeps sm_90 cubins and every PTX

The payload of each other cubin in the `.nv_fatbin` section is overwritten with zeros. Sizes and offsets stay
as they are, so the library still loads, and the zeros compress to nothing. No CUDA tool is needed.
"""

import pathlib
import struct
import sys
from typing import NamedTuple

FATBIN_MAGIC = 0xBA55ED50
KIND_PTX, KIND_CUBIN = 1, 2


class Trimmed(NamedTuple):
    """Bytes of GPU code kept and blanked."""

    kept_bytes: int
    blanked_bytes: int


def keep_architecture(library: bytearray, sm: int) -> Trimmed:
    """Blank in place every fatbin payload except PTX and the cubins of `sm` (90 for sm_90 and sm_90a)."""
    position, end = find_section(library, b".nv_fatbin")
    kept = blanked = 0
    while position < end - 16:
        if struct.unpack_from("<I", library, position)[0] != FATBIN_MAGIC:
            position += 8
            continue
        header, size = struct.unpack_from("<HQ", library, position + 6)
        entry, stop = position + header, position + header + size
        while entry < stop:
            kind, _, entry_header, payload = struct.unpack_from("<HHIQ", library, entry)
            arch = struct.unpack_from("<I", library, entry + 28)[0]
            if kind == KIND_PTX or (kind == KIND_CUBIN and arch == sm):
                kept += payload
            else:
                library[entry + entry_header : entry + entry_header + payload] = bytes(payload)
                blanked += payload
            entry += entry_header + payload
        position = stop
    return Trimmed(kept, blanked)


def find_section(elf: bytearray, wanted: bytes) -> tuple[int, int]:
    """First and last-plus-one file offset of a section of a little-endian ELF64 file; LookupError if it
    has none."""
    if elf[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a little-endian ELF64 file")
    table = struct.unpack_from("<Q", elf, 40)[0]
    entry_size, count, names_index = struct.unpack_from("<HHH", elf, 58)

    def section(index: int) -> tuple[int, int, int]:
        at = table + index * entry_size
        return (struct.unpack_from("<I", elf, at)[0], *struct.unpack_from("<QQ", elf, at + 24))

    names = section(names_index)[1]
    for index in range(count):
        name, offset, size = section(index)
        if elf[names + name : elf.index(b"\0", names + name)] == wanted:
            return offset, offset + size
    raise LookupError(f"no section {wanted.decode()}")


def main() -> int:
    if len(sys.argv) != 4:
        print(__doc__)
        return 2
    library = bytearray(pathlib.Path(sys.argv[1]).read_bytes())
    trimmed = keep_architecture(library, int(sys.argv[3]))
    pathlib.Path(sys.argv[2]).write_bytes(library)
    print(
        f"{sys.argv[2]}: kept {trimmed.kept_bytes / 1e6:.1f} MB, blanked {trimmed.blanked_bytes / 1e6:.1f} MB"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
