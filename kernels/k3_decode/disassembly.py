"""Disassemble many cubins of one architecture in one run of `nvdisasm`.

The tool takes most of a second of processor time to start and nearly none for a kernel, and reads one file
a run. So cubins are joined into one file, as a linker would: their code with its relocations and
attributes, and their line tables one behind the other, under marks that tell them apart; the answer is cut
by the marks. Invariant: the text of a cubin is what the tool says of it alone, but for the numbers of local
labels, which count from 0 in the order of the text either way, and what fills lines. Cubins that
cannot be joined, or whose kernels are not all in the answer, are disassembled one by one.
"""

import re
import struct
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

__all__ = ["DisassemblyError", "disassemble", "find_disassembler", "joined"]

TIMEOUT_S = 300
HEADER_BYTES = 64
SECTION_HEADER = "<IIQQQQIIQQ"
SYMBOL = "<IBBHQQ"
RELOCATION = "<QQq"
PROGRAM, SYMBOLS, STRINGS, RELOCATIONS, NO_BITS = 1, 2, 3, 4, 8
FUNCTION = 2
KEPT = (".text.", ".rela.text.", ".nv.info.", ".nv.shared.", ".nv.constant")
"""Beginnings of the names of sections that a kernel's text depends on."""
LINES, LINE_RELOCATIONS = ".debug_line", ".rela.debug_line"
MARK = "cubin{}$$"
MARKED = re.compile(r"^\s*\.section\s+\.text\.cubin(\d+)\$\$", re.MULTILINE)
PART = re.compile(r"^//-{5,} (\S+)", re.MULTILINE)
VERSION, FEATURES = ".note.nv.cuinfo", ".nv.compat"
"""Sections that say for what the file was made, which must be alike, and what is used of it. The tool wants
both or neither, and says the exact architecture only with them.
"""
LABEL = re.compile(r"\.L_x_\d+")
FILLING = re.compile(r" +(?=\(\*)|(?<=\S) +-{5,}$", re.MULTILINE)
"""Blanks before remarks, which stand behind the longest line of the file, and what fills a heading's line."""


class DisassemblyError(Exception):
    """A cubin that the tool, or the joining of files, cannot read; says why."""


class _Section(NamedTuple):
    name: str
    kind: int
    flags: int
    content: bytes
    size: int
    link: int
    info: int
    align: int
    entry: int


class _Symbol(NamedTuple):
    name: str
    info: int
    other: int
    section: int
    value: int
    size: int

    @property
    def is_local(self) -> bool:
        """Whether it binds within its file only; a symbol table has those first."""
        return self.info >> 4 == 0


class _Cubin(NamedTuple):
    head: bytes
    """The file's head without places in it."""
    version: tuple[_Section, ...]
    sections: tuple[_Section, ...]
    symbols: tuple[_Symbol, ...]


def find_disassembler() -> Path | None:
    """`nvdisasm` of NVIDIA's wheel, which knows what the DSL's compiler emits; None where it is not
    installed.
    """
    try:
        files = metadata.distribution("nvidia-cuda-nvdisasm").files or []
    except metadata.PackageNotFoundError:
        return None
    return next((Path(str(f.locate())) for f in files if f.name in ("nvdisasm", "nvdisasm.exe")), None)


def disassemble(
    tool: Path, cubins: Sequence[bytes], run: Callable[[Path, bytes], str] | None = None
) -> tuple[str | DisassemblyError, ...]:
    """Text of each cubin with source lines, in order; where the tool cannot read one, why. All must be of one
    architecture.
    """
    run = run or _run
    try:
        text = run(tool, joined(cubins)) if len(cubins) > 1 else ""
        together = _cut(text, cubins) if text else {}
    except DisassemblyError:
        together = {}
    found: list[str | DisassemblyError] = []
    for number, cubin in enumerate(cubins):
        try:
            found.append(together[number] if number in together else _relabelled(run(tool, cubin)))
        except DisassemblyError as error:
            found.append(error)
    return tuple(found)


def joined(cubins: Sequence[bytes]) -> bytes:
    """One file with the kernels of all, named `cubin<number>$$<name>`. Raises `DisassemblyError` for what is
    no cubin, or not of the first one's architecture.
    """
    try:
        parts = [_read(cubin) for cubin in cubins]
    except (struct.error, IndexError, OverflowError, ValueError) as error:
        raise DisassemblyError(f"not a complete 64-bit ELF file: {error}") from error
    if len({(part.head, part.version) for part in parts}) > 1:
        raise DisassemblyError("the files are of different architectures or versions")
    places, kept = _placed_sections(parts)
    numbers, symbols = _placed_symbols(parts, places)
    lines, moved = _joined_lines(parts, numbers)
    sections = [_Section("", 0, 0, b"", 0, 0, 0, 0, 0)]
    for part, section in kept:
        sections.append(_renumbered(section, places[part], numbers[part]))
    sections += [*parts[0].version, *_features(parts[0])]
    at = len(sections)
    strings, written = _symbol_table(symbols)
    sections += [
        _Section(LINES, PROGRAM, 0, lines, len(lines), 0, 0, 1, 0),
        _Section(LINE_RELOCATIONS, RELOCATIONS, 0x40, moved, len(moved), at + 2, at, 8, 24),
        _Section(
            ".symtab", SYMBOLS, 0, written, len(written), at + 3, sum(s.is_local for s in symbols), 8, 24
        ),
        _Section(".strtab", STRINGS, 0, strings, len(strings), 0, 0, 1, 0),
    ]
    tied = [s._replace(link=at + 2) if s.kind == RELOCATIONS or s.link else s for s in sections[:at]]
    return _written(parts[0].head, [*tied, *sections[at:]])


def _read(content: bytes) -> _Cubin:
    if content[:5] != b"\x7fELF\x02":
        raise ValueError(f"it begins with {content[:5]!r}")
    (table,) = struct.unpack_from("<Q", content, 0x28)
    count, names_at = struct.unpack_from("<HH", content, 0x3C)
    headers = [struct.unpack_from(SECTION_HEADER, content, table + 64 * i) for i in range(count)]
    names = headers[names_at][4]
    sections = tuple(
        _Section(
            _string(content, names + h[0]), h[1], h[2],
            b"" if h[1] == NO_BITS else content[h[4] : h[4] + h[5]],
            h[5], h[6], h[7], h[8], h[9],
        )
        for h in headers
    )  # fmt: skip
    table_section = next(s for s in sections if s.kind == SYMBOLS)
    strings = sections[table_section.link].content
    symbols = []
    for at in range(0, len(table_section.content), struct.calcsize(SYMBOL)):
        name, *rest = struct.unpack_from(SYMBOL, table_section.content, at)
        symbols.append(_Symbol(_string(strings, name), *rest))
    version = tuple(s._replace(link=0, info=0) for s in sections if s.name == VERSION)
    return _Cubin(content[:0x18] + content[0x30:0x34], version, sections, tuple(symbols))


def _features(part: _Cubin) -> tuple[_Section, ...]:
    return tuple(s._replace(link=0, info=0) for s in part.sections if s.name == FEATURES)


def _string(content: bytes, start: int) -> str:
    return content[start : content.index(b"\0", start)].decode()


def _placed_sections(parts: Sequence[_Cubin]) -> tuple[list[dict[int, int]], list[tuple[int, _Section]]]:
    """For each part the new number of each of its sections that stay, and those sections, marked."""
    places: list[dict[int, int]] = []
    kept: list[tuple[int, _Section]] = []
    for number, part in enumerate(parts):
        place: dict[int, int] = {}
        for old, section in enumerate(part.sections):
            begin = next((b for b in KEPT if section.name.startswith(b)), None)
            if begin is None:
                continue
            place[old] = len(kept) + 1
            head, dot, kernel = _head_of(section.name, begin)
            kept.append((number, section._replace(name=f"{head}{dot}{MARK.format(number)}{kernel}")))
        places.append(place)
    return places, kept


def _head_of(name: str, begin: str) -> tuple[str, str, str]:
    """A section's name as what it is, a dot, and whose it is (`.nv.constant0.kernel`)."""
    head, dot, kernel = name[len(begin) :].partition(".") if not begin.endswith(".") else ("", ".", "")
    return (begin + head, dot, kernel) if not begin.endswith(".") else (begin[:-1], dot, name[len(begin) :])


def _placed_symbols(
    parts: Sequence[_Cubin], places: Sequence[dict[int, int]]
) -> tuple[list[dict[int, int]], list[_Symbol]]:
    """For each part the new number of each symbol that stays, and those symbols: local ones first."""
    entries = [
        (number, old, symbol)
        for number, part in enumerate(parts)
        for old, symbol in enumerate(part.symbols)
        if old and (symbol.section in places[number] or symbol.section == 0)
    ]
    entries.sort(key=lambda entry: not entry[2].is_local)
    numbers: list[dict[int, int]] = [{} for _ in parts]
    symbols = [_Symbol("", 0, 0, 0, 0, 0)]
    for number, old, symbol in entries:
        numbers[number][old] = len(symbols)
        is_named = symbol.info & 15 == FUNCTION or symbol.section in places[number]
        name = MARK.format(number) + symbol.name if is_named and symbol.name else symbol.name
        symbols.append(symbol._replace(name=name, section=places[number].get(symbol.section, 0)))
    return numbers, symbols


def _joined_lines(parts: Sequence[_Cubin], numbers: Sequence[dict[int, int]]) -> tuple[bytes, bytes]:
    """The line tables one behind the other, and their relocations."""
    lines, moved = b"", b""
    for number, part in enumerate(parts):
        named = {s.name: s for s in part.sections}
        if LINES not in named:
            continue
        relocations = named[LINE_RELOCATIONS].content if LINE_RELOCATIONS in named else b""
        moved += _moved(relocations, numbers[number], len(lines))
        lines += named[LINES].content
    return lines, moved


def _moved(relocations: bytes, numbers: dict[int, int], by: int) -> bytes:
    """Relocations with their symbols renumbered and their places moved; those of symbols that are gone left
    out.
    """
    found = b""
    for at in range(0, len(relocations), struct.calcsize(RELOCATION)):
        offset, info, addend = struct.unpack_from(RELOCATION, relocations, at)
        if info >> 32 in numbers:
            kind = info & 0xFFFFFFFF
            found += struct.pack(RELOCATION, offset + by, numbers[info >> 32] << 32 | kind, addend)
    return found


def _renumbered(section: _Section, places: dict[int, int], numbers: dict[int, int]) -> _Section:
    """A section with the new numbers of what it refers to."""
    if section.kind == RELOCATIONS:
        content = _moved(section.content, numbers, 0)
        return section._replace(content=content, size=len(content), info=places[section.info])
    if section.name.startswith(".text."):
        symbol, registers = section.info & 0xFFFFFF, section.info >> 24
        return section._replace(info=numbers.get(symbol, 0) | registers << 24)
    return section._replace(info=places.get(section.info, 0))


def _symbol_table(symbols: Sequence[_Symbol]) -> tuple[bytes, bytes]:
    """(names, table)."""
    names, table = bytearray(b"\0"), bytearray()
    for symbol in symbols:
        table += struct.pack(SYMBOL, len(names) if symbol.name else 0, *symbol[1:])
        if symbol.name:
            names += symbol.name.encode() + b"\0"
    return bytes(names), bytes(table)


def _written(head: bytes, sections: Sequence[_Section]) -> bytes:
    """The file: its header, the sections' contents, and the table of sections."""
    names = bytearray(b"\0")
    title = ".shstrtab"
    rows: list[tuple[_Section, int]] = []
    for section in (*sections, _Section(title, STRINGS, 0, b"", 0, 0, 0, 1, 0)):
        rows.append((section, len(names) if section.name else 0))
        if section.name:
            names += section.name.encode() + b"\0"
    rows[-1] = (rows[-1][0]._replace(content=bytes(names), size=len(names)), rows[-1][1])
    body, table = bytearray(), bytearray()
    for section, name in rows:
        body += b"\0" * (-(HEADER_BYTES + len(body)) % max(section.align, 1))
        table += struct.pack(
            SECTION_HEADER, name, section.kind, section.flags, 0, HEADER_BYTES + len(body), section.size,
            section.link, section.info, section.align, section.entry,
        )  # fmt: skip
        body += section.content
    body += b"\0" * (-len(body) % 8)
    start = HEADER_BYTES + len(body)
    counts = struct.pack("<HHHHHH", HEADER_BYTES, 56, 0, 64, len(rows), len(rows) - 1)
    header = head[:0x18] + struct.pack("<QQQ", 0, 0, start) + head[0x18:] + counts
    return bytes(header + body + table)


def _cut(text: str, cubins: Sequence[bytes]) -> dict[int, str]:
    """The answer by the number of the cubin, where every kernel of it is there."""
    head, parts = _parts(text)
    found: dict[int, list[str]] = {}
    for part in parts:
        marked = MARKED.search(part)
        if marked:
            number = int(marked[1])
            found.setdefault(number, []).append(part.replace(MARK.format(number), ""))
    wanted = [sum(s.name.startswith(".text.") for s in _read(c).sections) for c in cubins]
    return {
        number: _relabelled(head + "".join(pieces))
        for number, pieces in found.items()
        if len(pieces) == wanted[number]
    }


def _parts(text: str) -> tuple[str, list[str]]:
    """What stands before the first section, and the sections of code."""
    found = list(PART.finditer(text))
    if not found:
        return text, []
    ends = [m.start() for m in found[1:]] + [len(text)]
    parts = [text[m.start() : end] for m, end in zip(found, ends, strict=True) if m[1].startswith(".text.")]
    return text[: found[0].start()], parts


def _relabelled(text: str) -> str:
    """The text's sections of code, with local labels counted from 0 in their order."""
    head, parts = _parts(text)
    numbers: dict[str, int] = {}
    code = LABEL.sub(lambda m: f".L_x_{numbers.setdefault(m[0], len(numbers))}", head + "".join(parts))
    return FILLING.sub(" ", code)


def _run(tool: Path, cubin: bytes) -> str:
    """What the tool says of one file."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        try:
            ended = subprocess.run(
                [str(tool), "-g", "-c", file.name],
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise DisassemblyError(f"nvdisasm took more than {TIMEOUT_S} s") from error
    if ended.returncode != 0:
        raise DisassemblyError(f"nvdisasm ended with {ended.returncode}: {ended.stderr.strip()[:300]}")
    return ended.stdout
