"""Read PTX text into programs: parameters, instructions with their edges, and accesses to global memory.

It reads what NVVM and the DSL emit and what people write as inline assembly: nested scopes with labels of
their own, vector operands, several statements a line. Source lines come from `.loc`; a `.loc` with column 0
is the DSL's stand-in for inline assembly, so such an instruction takes the line of the address it uses. What
it leaves to callers: what an access means.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from harness.stages.audit.program import (
    Access,
    AccessKind,
    Instruction,
    Level,
    Order,
    Origin,
    OriginKind,
    Program,
    Slot,
    SourceLine,
)

__all__ = ["doubtful_lines", "parse_ptx"]

ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*(?:\((.*?)\))?\s*[^{;]*\{", re.DOTALL)
PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\s+[^,]*?)?([\w$]+)(?:\[(\d+)\])?\s*(?:,|$)"
)
FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', re.MULTILINE)
LOC = re.compile(r"^\.loc\s+(\d+)\s+(\d+)\s+(\d+)")
LABEL = re.compile(r"^([\w$]+)\s*:(?!:)\s*")
VARIABLE = re.compile(r"\.(shared|local)\s+.*?([\w$]+)(?:\[(\d*)\])?\s*$")
NAME = re.compile(r"[%$A-Za-z_][\w$.]*")
GUARD = re.compile(r"^@!?[%\w$]+\s*")
SIZES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}
WITHOUT_RESULT = (
    "st",
    "red",
    "bar",
    "barrier",
    "bra",
    "brx",
    "ret",
    "exit",
    "prefetch",
    "prefetchu",
    "membar",
    "fence",
    "cp",
    "griddepcontrol",
    "discard",
    "applypriority",
    "trap",
    "nanosleep",
    "setmaxnreg",
    "stmatrix",
    "clusterlaunchcontrol",
)
ON_CHIP = frozenset({Origin(OriginKind.ON_CHIP)})
NUMBER = frozenset({Origin(OriginKind.NUMBER)})
WIDE_SCOPES = frozenset({"gpu", "sys"})


class _Statement(NamedTuple):
    text: str
    scope: tuple[int, ...]
    line: SourceLine | None
    is_exact_line: bool


@dataclass(slots=True)
class _Body:
    """What reading one kernel's body gathers."""

    statements: list[_Statement] = field(default_factory=list)
    labels: dict[tuple[tuple[int, ...], str], int] = field(default_factory=dict)
    symbols: dict[str, frozenset[Origin]] = field(default_factory=dict)
    targets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Labels of each `.branchtargets` list."""
    local_bytes: int = 0


def parse_ptx(text: str) -> tuple[Program, ...]:
    """Every kernel of a PTX module, in text order."""
    files = {int(number): name for number, name in FILE.findall(text)}
    return tuple(_parse_kernel(match, text, files) for match in ENTRY.finditer(text))


def doubtful_lines(text: str) -> frozenset[SourceLine]:
    """Source lines that the DSL gives to inline assembly in place of the true one (`.loc` with column 0)."""
    files = {int(number): name for number, name in FILE.findall(text)}
    places = re.findall(r"^\s*\.loc\s+(\d+)\s+(\d+)\s+0\b", text, re.MULTILINE)
    return frozenset(SourceLine(files.get(int(f), ""), int(line)) for f, line in places)


def _parse_kernel(match: re.Match[str], text: str, files: dict[int, str]) -> Program:
    slots, names = _parse_parameters(match[2] or "")
    body = _read_body(text, match.end(), files)
    symbols = dict(body.symbols)
    for name, slot in names.items():
        symbols[name] = frozenset({Origin(OriginKind.DESCRIPTOR, slot.ordinal)})
    unresolved: list[str] = []
    lines: dict[str, SourceLine | None] = {}
    instructions = []
    for index, statement in enumerate(body.statements):
        following = (index + 1,) if index + 1 < len(body.statements) else ()
        instruction = _parse_instruction(statement, names, following)
        instruction = _with_line(instruction, statement, lines)
        follows, trouble = _successors(instruction, following, statement.scope, body)
        unresolved += trouble
        instructions.append(instruction if follows == following else replace(instruction, follows=follows))
    return Program(
        match[1], Level.PTX, slots, tuple(instructions), symbols, body.local_bytes, tuple(unresolved)
    )


def _parse_parameters(text: str) -> tuple[tuple[Slot, ...], dict[str, Slot]]:
    """Slots in order, and by name. Offsets follow the parameters' alignment."""
    names: dict[str, Slot] = {}
    offset = 0
    for ordinal, (align, kind, name, count) in enumerate(PARAMETER.findall(text)):
        unit = SIZES.get(re.sub(r"\D", "", kind), 4)
        size = unit * int(count) if count else unit
        step = int(align) if align else unit
        offset += -offset % step
        names[name] = Slot(ordinal, offset, size, is_record=bool(count))
        offset += size
    return tuple(names.values()), names


def _read_body(text: str, start: int, files: dict[int, str]) -> _Body:
    body = _Body()
    scope: tuple[int, ...] = ()
    scopes = 0
    pending = ""
    line: SourceLine | None = None
    is_exact = True
    for raw in _lines_from(text, start):
        stripped = raw.split("//", 1)[0].strip()
        loc = LOC.match(stripped)
        if loc:
            line, is_exact = SourceLine(files.get(int(loc[1]), ""), int(loc[2])), loc[3] != "0"
            continue
        for piece in re.split(r"([;{}])", stripped):
            if piece == ";":
                _take(body, pending + ";", scope, line, is_exact)
                pending = ""
            elif piece == "{" and not _strip_labels(body, pending, scope):
                scopes, pending = scopes + 1, ""
                scope = (*scope, scopes)
            elif piece == "}" and not _strip_labels(body, pending, scope):
                pending = ""
                if not scope:
                    return body
                scope = scope[:-1]
            else:
                pending += piece
        pending = _strip_labels(body, pending + " ", scope)
    return body


def _lines_from(text: str, start: int) -> Iterator[str]:
    while start < len(text):
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        yield text[start:end]
        start = end + 1


def _strip_labels(body: _Body, text: str, scope: tuple[int, ...]) -> str:
    """The statement without leading labels, which are noted at the next instruction."""
    text = text.lstrip()
    while match := LABEL.match(text):
        body.labels[scope, match[1]] = len(body.statements)
        text = text[match.end() :]
    return text


def _take(body: _Body, text: str, scope: tuple[int, ...], line: SourceLine | None, is_exact: bool) -> None:
    """Note one statement: a variable, a branch table or an instruction."""
    label = LABEL.match(text.lstrip())
    statement = _strip_labels(body, text, scope).rstrip("; \t")
    if statement.startswith(".branchtargets") and label:
        body.targets[label[1]] = tuple(NAME.findall(statement[len(".branchtargets") :]))
    elif statement.startswith("."):
        variable = VARIABLE.search(statement)
        if variable:
            body.symbols[variable[2]] = ON_CHIP
            if variable[1] == "local":
                body.local_bytes += int(variable[3] or 0)
    elif statement:
        body.statements.append(_Statement(statement, scope, line, is_exact))


def _parse_instruction(
    statement: _Statement, names: dict[str, Slot], following: tuple[int, ...]
) -> Instruction:
    guard = GUARD.match(statement.text)
    text = statement.text[guard.end() :] if guard else statement.text
    opcode, _, rest = text.partition(" ") if " " in text else text.partition("\t")
    opcode, operands = opcode.strip(), _split(rest)
    parts = opcode.split(".")
    has_result = bool(operands) and not (
        parts[0] in WITHOUT_RESULT
        or (parts[0] == "mbarrier" and parts[1] == "init")
        or (parts[0] == "multimem" and parts[1] in ("st", "red"))
        or (parts[0] == "tcgen05" and parts[1] != "ld")
    )
    writes = tuple(NAME.findall(operands[0])) if has_result else ()
    sources = operands[1:] if has_result else operands
    reads = tuple(n for operand in sources for n in NAME.findall(operand))
    seeds: tuple[tuple[str, frozenset[Origin]], ...] = ()
    if parts[0] == "ld" and "param" in parts:
        seeds, reads = _parameter_seeds(parts, writes, sources, names), ()
    return Instruction(
        text=text,
        opcode=opcode,
        line=statement.line,
        guard="" if guard is None else guard[0].strip().removeprefix("@"),
        writes=writes,
        reads=reads,
        seeds=seeds,
        is_opaque=parts[0] in ("ld", "ldu", "atom", "ldmatrix", "multimem", "call") and "param" not in parts,
        is_wait=opcode == "griddepcontrol.wait",
        is_acquire_fence=_is_acquire_fence(parts),
        is_block_barrier=parts[0] in ("bar", "barrier") and "arrive" not in parts,
        factor=_factor(parts, operands),
        is_bounded=parts[0] in ("min", "and", "rem", "bfe") and _small(operands[-1]) is not None,
        is_masked=parts[0] == "and" and operands[-1].isdigit() and int(operands[-1]) < 1 << 31,
        access=_access(parts, operands),
        follows=following,
    )


def _is_acquire_fence(parts: list[str]) -> bool:
    """A fence of the GPU or the system between all memory accesses (a proxy fence orders others)."""
    if parts[0] == "membar":
        return bool({"gl", "sys"} & set(parts))
    return parts[0] == "fence" and "proxy" not in parts and bool(WIDE_SCOPES & set(parts))


def _factor(parts: list[str], operands: list[str]) -> int | None:
    """What a 32-bit multiplication or shift multiplies by, 0 where that is a register; None for others."""
    if parts[-1] not in ("s32", "u32", "b32") or "wide" in parts or len(operands) < 3:
        return None
    if parts[0] == "shl":
        return 1 << int(operands[2]) if operands[2].isdigit() and int(operands[2]) < 32 else None
    if parts[0] not in ("mul", "mad") or "lo" not in parts:
        return None
    return abs(int(operands[2])) if re.fullmatch(r"-?\d+", operands[2]) else 0


def _small(operand: str) -> int | None:
    """An immediate of at most 16 bits."""
    return int(operand) if operand.isdigit() and int(operand) < 1 << 16 else None


def _split(text: str) -> list[str]:
    """Operands, split at commas outside brackets and braces."""
    found, depth, current = [], 0, ""
    for char in text:
        depth += (char in "[{(") - (char in "]})")
        if char == "," and depth == 0:
            found.append(current.strip())
            current = ""
        else:
            current += char
    if current.strip():
        found.append(current.strip())
    return found


def _parameter_seeds(
    parts: list[str], writes: tuple[str, ...], sources: list[str], names: dict[str, Slot]
) -> tuple[tuple[str, frozenset[Origin]], ...]:
    """A whole 8-byte word at offset 0 of a parameter is its pointer; anything else of it is a number."""
    match = re.match(r"\[\s*([\w$]+)\s*(?:\+\s*(\d+))?\s*\]", sources[0]) if sources else None
    if match is None or match[1] not in names:
        return tuple((w, frozenset({Origin(OriginKind.LOADED)})) for w in writes)
    slot, offset = names[match[1]], int(match[2] or 0)
    if offset or not slot.may_hold_pointer or SIZES.get(re.sub(r"\D", "", parts[-1]), 4) < 8:
        return tuple((w, NUMBER) for w in writes)
    return ((writes[0], frozenset({Origin(OriginKind.POINTER, slot.ordinal)})),)


def _access(parts: list[str], operands: list[str]) -> Access | None:
    """The access to global memory that an instruction makes, if it does."""
    groups = [o for o in operands if o.startswith("[")]
    family = parts[0]
    if not groups:
        return None
    if family == "cp":
        return _copy_access(parts, operands, groups)
    if family in ("ld", "ldu", "st", "atom", "red", "prefetch", "prefetchu", "discard", "multimem"):
        spaces = {p.split("::")[0] for p in parts}
        # Fetching a tensor map touches the descriptor alone, which is a constant of the launch.
        if spaces & {"shared", "param", "local", "const", "tensormap"}:
            return None
        kinds = {
            "ld": AccessKind.LOAD,
            "ldu": AccessKind.LOAD,
            "st": AccessKind.STORE,
            "discard": AccessKind.STORE,
            "multimem.ld_reduce": AccessKind.LOAD,
            "multimem.st": AccessKind.STORE,
        }
        word = ".".join(parts[:2]) if family == "multimem" else family
        kind = kinds.get(word, AccessKind.PREFETCH if family.startswith("prefetch") else AccessKind.ATOMIC)
        order, is_wide = _order(parts)
        return Access(
            kind, _registers(groups[0]), _width(parts), "nc" in parts, "global" not in spaces, order, is_wide
        )
    return None


def _order(parts: list[str]) -> tuple[Order, bool]:
    """(ordering, whether for the whole GPU or system) by the words of the opcode; atomics are relaxed at GPU
    scope where nothing is said, loads and stores weak (PTX ISA 9.0, "Scope and Semantics").
    """
    words = set(parts)
    if words & {"volatile", "mmio"}:
        return Order.RELAXED, True
    named = next((o for o in Order if o.value in words), None)
    is_atomic = parts[0] in ("atom", "red") or parts[:2] == ["multimem", "red"]
    order = named or (Order.RELAXED if is_atomic else Order.WEAK)
    return order, bool(words & WIDE_SCOPES) or (is_atomic and not words & {"cta", "cluster"})


def _copy_access(parts: list[str], operands: list[str], groups: list[str]) -> Access | None:
    """`cp.async` and its bulk and tensor forms. The first space named after the family is the destination."""
    if "prefetch" in parts:
        return Access(AccessKind.PREFETCH, _registers(groups[0]), None)
    spaces = [p.split("::")[0] for p in parts if p.split("::")[0] in ("shared", "global")]
    if len(spaces) < 2 or "global" not in spaces:
        return None  # commit, wait, and copies within a cluster
    is_load = spaces[1] == "global"
    size = int(operands[2]) if "bulk" not in parts and len(operands) > 2 and operands[2].isdigit() else None
    kind = AccessKind.ATOMIC if "reduce" in parts else AccessKind.LOAD if is_load else AccessKind.STORE
    return Access(kind, _registers(groups[1 if is_load else 0]), size)


def _registers(group: str) -> tuple[str, ...]:
    """Names in the address part of `[address, {coordinates}]`; coordinates are numbers."""
    return tuple(NAME.findall(_split(group.strip("[]"))[0]))


def _width(parts: list[str]) -> int | None:
    unit = next(
        (SIZES[m[1]] for p in reversed(parts) if (m := re.fullmatch(r"[bufs](\d+)", p)) and m[1] in SIZES),
        None,
    )
    many = next((int(p[1:]) for p in parts if re.fullmatch(r"v\d", p)), 1)
    return None if unit is None else unit * many


def _with_line(
    instruction: Instruction, statement: _Statement, lines: dict[str, SourceLine | None]
) -> Instruction:
    """The instruction at the line its author wrote it for; remembers where registers were last written."""
    line = statement.line
    if not statement.is_exact_line:
        names = instruction.access.address if instruction.access else ()
        line = next((lines[n] for n in names if lines.get(n)), line)
    else:
        for register in instruction.writes:
            lines[register] = statement.line
    return instruction if line == statement.line else replace(instruction, line=line)


def _successors(
    instruction: Instruction, following: tuple[int, ...], scope: tuple[int, ...], body: _Body
) -> tuple[tuple[int, ...], list[str]]:
    family = instruction.opcode.split(".")[0]
    if family in ("ret", "exit", "trap"):
        return (following if instruction.is_predicated else ()), []
    if family == "bra":
        target = _find_label(body, scope, instruction.reads[-1])
        if target is None:
            return following, [instruction.text]
        jump = (target,) if target < len(body.statements) else ()
        return (tuple(dict.fromkeys((*following, *jump))) if instruction.is_predicated else jump), []
    if family == "brx":
        table = body.targets.get(instruction.reads[-1], ())
        found = [t for t in (_find_label(body, scope, name) for name in table) if t is not None]
        return (tuple(found), []) if found else (following, [instruction.text])
    return following, [instruction.text] if family == "call" else []


def _find_label(body: _Body, scope: tuple[int, ...], name: str) -> int | None:
    """Index of a label, looked up from the innermost scope outwards."""
    for depth in range(len(scope), -1, -1):
        if (scope[:depth], name) in body.labels:
            return body.labels[scope[:depth], name]
    return None
