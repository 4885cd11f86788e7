"""Read `nvdisasm -g -c` text into programs, with parameters from the cubin.

Registers are physical and reused, so origins follow the flow of control. A 64-bit address is known by its low
register: the high one only carries. Parameters are words of constant bank 0; the first two words of a
parameter that can hold an address are its pointer. What it cannot follow it says: indirect branches are
`unresolved`, indexed constants and local memory are opaque.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from harness.stages.audit.cubin import KernelResources
from harness.stages.audit.program import (
    Access,
    AccessKind,
    Instruction,
    Level,
    Order,
    Origin,
    OriginKind,
    Program,
    SourceLine,
)

__all__ = ["code_names", "parse_sass", "target_of", "unread_lines"]

ARCHITECTURE = re.compile(r"^\s*\.target\s+([\w.]+)", re.MULTILINE)
SECTION = re.compile(r"^\s*\.section\s+\.text\.([\w$.]+)")
LINE = re.compile(r'^\s*//## File "([^"]*)", line (\d+)')
LABEL = re.compile(r"^([.$\w]+):\s*$")
CODE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+\{?\s*(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
ADDRESSED = re.compile(r"^/\*[0-9a-f]{4,}\*/")
REGISTER = re.compile(r"\b(U?R)(\d+)\b")
WHOLE_REGISTER = re.compile(r"U?R(\d+|Z)(\.\w+)*")
NUMBER = re.compile(r"-?0x[0-9a-f]+")
COMMA = re.compile(r",\s*(?![^\[]*\])")
FORMS = 50_000
"""Texts of instructions that are remembered: four of five have been seen before in a full audit."""
BANK = re.compile(r"c\[0x0\]\[0x([0-9a-f]+)\]")
INDEXED_BANK = re.compile(r"c\[(?!0x0\]\[0x)")
TARGET = re.compile(r"`\(([^)]+)\)")
BRANCH_TARGETS = re.compile(r"BRANCH_TARGETS\s+([^\"*]+)")
PREDICATE = re.compile(r"^!?U?P(T|\d+)$")
NAMED_PREDICATE = re.compile(r"\bU?P(?:\d+|R)\b")
WITHOUT_RESULT = (
    "ST",
    "RED",
    "BAR",
    "MEMBAR",
    "ERRBAR",
    "CGAERRBAR",
    "CCTL",
    "BRA",
    "BRX",
    "JMP",
    "EXIT",
    "BSSY",
    "BSYNC",
    "NOP",
    "RET",
    "CALL",
    "UBLK",
    "UTMA",
    "UTMC",
    "LDGSTS",
    "LDGDEPBAR",
    "DEPBAR",
    "FENCE",
    "UCGABAR",
    "ACQBULK",
    "PREEXIT",
    "WARPSYNC",
    "NANOSLEEP",
    "YIELD",
    "BREAK",
    "KILL",
    "BPT",
    "PLOP3",
    "ISETP",
    "FSETP",
    "DSETP",
    "HSETP2",
    "UISETP",
    "UTCBAR",
    "UTCMMA",
    "UTCHMMA",
    "UTCQMMA",
    "UTCOMMA",
    "STT",
    "ENDCOLLECTIVE",
    "WARPGROUP",
    "USETMAXREG",
    "SYNCS",
)
OPAQUE = ("LD", "ATOM", "SYNCS", "RPCMOV", "TLD", "TEX", "SULD")
LOADED = frozenset({Origin(OriginKind.LOADED)})
ON_CHIP = frozenset({Origin(OriginKind.ON_CHIP)})
SHARED_WINDOW = ("SR_SWINHI", "SR_SWINLO", "SR_LWINHI", "SR_LWINLO")
"""Special registers with the place of shared and local memory in the generic address space."""
WAIT = "ACQBULK"
SPACE_WORDS = {0x210: 0x198, 0x380: 0x348}
"""Word of constant bank 0 that holds the parameter space's own address, by the offset at which parameters
begin (sm_90; sm_100 and sm_103), as CUDA 13.5 lays the bank out."""
COPIES = ("MOV", "UMOV", "R2UR")
SUMS = ("IADD", "UIADD", "VIADD")


class _Line(NamedTuple):
    offset: int
    guard: str
    opcode: str
    operands: str
    line: SourceLine | None


class _Form(NamedTuple):
    """What the text of an instruction says, wherever it stands."""

    text: str
    writes: tuple[str, ...]
    sources: tuple[str, ...]
    sets: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    adds: int | None = None
    access: Access | None = None
    is_constant_load: bool = False
    is_window: bool = False
    """Whether it reads where shared memory begins."""
    has_bank: bool = False
    """Whether it has a constant among its operands."""
    is_opaque: bool = False
    is_block_barrier: bool = False


def target_of(text: str) -> str | None:
    """The architecture that the machine code says it runs on; None where it names none or several."""
    named = set(ARCHITECTURE.findall(text))
    return named.pop() if len(named) == 1 else None


def parse_sass(
    text: str, resources: Mapping[str, KernelResources], doubtful: frozenset[SourceLine] = frozenset()
) -> tuple[Program, ...]:
    """Every kernel of a disassembly that the cubin names, in text order.

    `doubtful` are source lines that stand for inline assembly; instructions there take the line of their
    address.
    """
    sections: dict[str, list[str]] = {}
    current: list[str] | None = None
    for raw in text.splitlines():
        section = SECTION.match(raw)
        if section:
            current = sections.setdefault(section[1], [])
        elif current is not None:
            current.append(raw)
    found = []
    for name, rows in sections.items():
        kernel = resources.get(name)
        if kernel is not None:
            found.append(_program(name, rows, kernel, doubtful))
    return tuple(found)


def code_names(text: str) -> frozenset[str]:
    """Everything that the text has code of, kernel or not."""
    return frozenset(match[1] for match in map(SECTION.match, text.splitlines()) if match)


def unread_lines(text: str) -> list[str]:
    """Lines that look like instructions, in a kernel's section, and were not understood."""
    lines = (raw.strip() for raw in text.splitlines())
    return [line for line in lines if ADDRESSED.match(line) and not CODE.match(line)]


def _program(name: str, rows: list[str], kernel: KernelResources, doubtful: frozenset[SourceLine]) -> Program:
    lines, labels = _read_rows(rows)
    words = _pointer_words(kernel)
    convergence = _convergence_points(lines, labels)
    written: dict[str, SourceLine | None] = {}
    instructions, unresolved = [], []
    for index, row in enumerate(lines):
        follows, is_known = _successors(row, index, lines, labels, convergence)
        instruction = _instruction(row, words, follows)
        if row.line in doubtful:
            names = instruction.access.address if instruction.access else ()
            instruction = replace(
                instruction, line=next((written[n] for n in names if written.get(n)), row.line)
            )
        else:
            written.update(dict.fromkeys(instruction.writes, row.line))
        if not is_known:
            unresolved.append(instruction.text)
        instructions.append(instruction)
    return Program(name, Level.SASS, kernel.slots, tuple(instructions), unresolved=tuple(unresolved))


def _read_rows(rows: list[str]) -> tuple[list[_Line], dict[str, int]]:
    """Instructions in order, and the index that each label stands before."""
    lines: list[_Line] = []
    labels: dict[str, int] = {}
    line: SourceLine | None = None
    for raw in rows:
        place = LINE.match(raw)
        label = LABEL.match(raw)
        code = CODE.match(raw)
        if place:
            line = SourceLine(place[1], int(place[2]))
        elif label:
            labels[label[1]] = len(lines)
        elif code:
            guard = (code[2] or "").strip().removeprefix("@")
            guard = "" if guard in ("PT", "UPT") else guard
            lines.append(_Line(int(code[1], 16), guard, code[3], code[4], line))
    return lines, labels


def _pointer_words(kernel: KernelResources) -> dict[int, frozenset[Origin]]:
    """Origin of each 4-byte word of the constant bank that holds a parameter's pointer."""
    words: dict[int, frozenset[Origin]] = {}
    for slot in kernel.slots:
        if slot.may_hold_pointer:
            for half in (0, 4):
                origin = Origin(OriginKind.POINTER, slot.ordinal)
                words[kernel.bank_offset + slot.offset + half] = frozenset({origin})
    if kernel.bank_offset in SPACE_WORDS:
        words[SPACE_WORDS[kernel.bank_offset]] = frozenset({Origin(OriginKind.PARAMETER_SPACE, 0)})
    return words


def _instruction(row: _Line, words: dict[int, frozenset[Origin]], follows: tuple[int, ...]) -> Instruction:
    form = _form(row.opcode, row.operands)
    if form.is_constant_load:
        seeds = _bank_seeds(form.writes, form.sources, words)
    elif form.is_window:
        seeds = tuple((w, ON_CHIP) for w in form.writes)
    else:
        seeds = _operand_seeds(form.writes, form.sources, words) if form.has_bank else ()
    return Instruction(
        text=form.text,
        opcode=row.opcode,
        line=row.line,
        guard=row.guard,
        sets=form.sets,
        writes=form.writes,
        reads=form.reads,
        seeds=seeds,
        adds=form.adds,
        is_opaque=form.is_opaque,
        is_wait=row.opcode == WAIT,
        # Fences and acquiring loads alike end with an invalidation of what the multiprocessor holds.
        is_acquire_fence=row.opcode == "CCTL.IVALL",
        is_block_barrier=form.is_block_barrier,
        access=form.access,
        follows=follows,
    )


@lru_cache(maxsize=FORMS)
def _form(opcode: str, operands_text: str) -> _Form:
    """What an instruction's own text says of it; kernels have most of their instructions in common."""
    parts = opcode.split(".")
    operands = [o for o in (p.strip() for p in _split(operands_text)) if o]
    while operands and PREDICATE.match(operands[0]):
        operands = operands[1:]  # results in predicates
    has_result = bool(operands) and not opcode.startswith(WITHOUT_RESULT) and _is_register(operands[0])
    writes = _span(operands[0], _result_words(parts)) if has_result else ()
    sources = operands[1:] if has_result else operands
    text = f"{opcode} {operands_text}".strip()
    if parts[0] in ("LDC", "ULDC", "LDCU"):
        return _Form(text, writes=writes, sources=tuple(sources), is_constant_load=True)
    return _Form(
        text,
        writes=writes,
        sources=tuple(sources),
        is_window=parts[0] in ("S2R", "S2UR") and any(o in SHARED_WINDOW for o in sources),
        has_bank="c[" in operands_text,
        sets=tuple(NAMED_PREDICATE.findall(operands_text)) if "P" in operands_text else (),
        reads=tuple(m[0] for o in sources for m in REGISTER.finditer(o)),
        adds=_sum(parts[0], sources),
        is_opaque=opcode.startswith(OPAQUE) or any(INDEXED_BANK.search(o) for o in sources),
        is_block_barrier=parts[0] in ("BAR", "UCGABAR_WAIT") and "ARV" not in parts,
        access=_ordered(_access(parts, operands), parts),
    )


def _split(text: str) -> list[str]:
    return COMMA.split(text) if "[" in text else text.split(",")


def _is_register(operand: str) -> bool:
    return WHOLE_REGISTER.fullmatch(operand) is not None


def _span(operand: str, words: int) -> tuple[str, ...]:
    """The registers that a result of `words` words fills."""
    match = REGISTER.match(operand)
    return () if match is None else tuple(f"{match[1]}{int(match[2]) + i}" for i in range(words))


def _result_words(parts: list[str]) -> int:
    if "256" in parts:
        return 8
    if "128" in parts or parts[0] in ("HMMA", "IMMA", "QMMA", "OMMA"):
        return 4
    if parts[0] == "LDSM":
        return int(parts[-1]) if parts[-1] in ("2", "4") else 1
    wide = (
        "64" in parts
        or "WIDE" in parts
        or (parts[0] in ("CS2R", "DADD", "DMUL", "DFMA") and "32" not in parts)
    )
    return 2 if wide else 1


def _bank_seeds(
    writes: tuple[str, ...], sources: Sequence[str], words: dict[int, frozenset[Origin]]
) -> tuple[tuple[str, frozenset[Origin]], ...]:
    """Word i of a constant load goes to register i; an indexed load may bring any parameter."""
    match = BANK.search(sources[0]) if sources else None
    if match is None or INDEXED_BANK.search(sources[0]):
        return tuple((w, LOADED) for w in writes)
    start = int(match[1], 16)
    return tuple((w, words[start + 4 * i]) for i, w in enumerate(writes) if start + 4 * i in words)


def _operand_seeds(
    writes: tuple[str, ...], sources: Sequence[str], words: dict[int, frozenset[Origin]]
) -> tuple[tuple[str, frozenset[Origin]], ...]:
    """Constants used as operands give their origin to every word of the result."""
    offsets = [int(m, 16) for o in sources for m in BANK.findall(o)]
    found = frozenset(origin for offset in offsets for origin in words.get(offset, ()))
    return tuple((w, found) for w in writes) if found else ()


def _sum(family: str, sources: Sequence[str]) -> int | None:
    """What an addition of one register and immediates, or a copy, adds; None for anything else."""
    if family in COPIES:
        return 0
    if not family.startswith(SUMS):
        return None
    rest = [o for o in sources if o not in ("RZ", "URZ") and not PREDICATE.match(o)]
    numbers = [int(o, 16) for o in rest if NUMBER.fullmatch(o)]
    is_plain = sum(_is_register(o) for o in rest) == 1 and len(rest) == 1 + len(numbers)
    return sum(numbers) if is_plain else None


def _access(parts: list[str], operands: list[str]) -> Access | None:
    family = parts[0]
    groups = [re.sub(r"desc\[[^\]]*\]", "", o) for o in operands if "[" in o and not o.startswith("c[")]
    if not groups:
        return None
    width = next((int(p) // 8 for p in parts if p in ("64", "128", "256")), 4)
    width = {"U8": 1, "S8": 1, "U16": 2, "S16": 2}.get(
        next((p for p in parts if p[:1] in "US" and p[1:].isdigit()), ""), width
    )
    match family:
        case "LDG" | "LD":
            address = _address(groups[0], is_generic=family == "LD")
            return Access(AccessKind.LOAD, address, width, "CONSTANT" in parts, family == "LD")
        case "STG" | "ST":
            address = _address(groups[0], is_generic=family == "ST")
            return Access(AccessKind.STORE, address, width, is_generic=family == "ST")
        case "ATOMG" | "ATOM" | "RED" | "REDG" | "REDAS":
            is_generic = family in ("ATOM", "RED")
            return Access(AccessKind.ATOMIC, _address(groups[0], is_generic), width, is_generic=is_generic)
        case "LDGMC":  # the sum of what all peers hold: nothing is written
            return Access(AccessKind.LOAD, _address(groups[0]), width)
        case "REDGMC":
            return Access(AccessKind.ATOMIC, _address(groups[0]), width)
        case "LDGSTS":
            return Access(AccessKind.LOAD, _address(groups[-1]), width)
        case "UBLKCP":
            # S.G: shared from global; G.S: global from shared; the destination comes first.
            is_load = parts[1:3] == ["S", "G"]
            return Access(
                AccessKind.LOAD if is_load else AccessKind.STORE, _address(groups[1 if is_load else 0]), None
            )
        case "UBLKPF" | "UTMAPF":
            return Access(AccessKind.PREFETCH, _address(groups[0]), None)
        case "UBLKRED" | "UTMAREDG":
            return Access(AccessKind.ATOMIC, _address(groups[0]), None)
        case "UTMALDG":
            return Access(AccessKind.LOAD, _address(groups[1]), None)
        case "UTMASTG":
            return Access(AccessKind.STORE, _address(groups[0]), None)
        case "CCTL" if any(p.startswith("PF") for p in parts):
            return Access(AccessKind.PREFETCH, _address(groups[0]), None)
    return None


def _ordered(access: Access | None, parts: list[str]) -> Access | None:
    """The access with its ordering: strong ones carry a mark and their scope, atomics always have one."""
    if access is None or not ("STRONG" in parts or parts[0] in ("ATOMG", "ATOM", "RED", "REDG", "REDGMC")):
        return access
    is_wide = "SYS" in parts or "GPU" in parts
    return replace(access, order=Order.RELAXED, is_wide_scope=is_wide)


def _address(group: str, is_generic: bool = False) -> tuple[str, ...]:
    """Registers that make the low word of an address; of a generic one also the high word, which tells the
    space.
    """
    low = tuple(m[0] for m in REGISTER.finditer(group))
    high = tuple(f"{m[1]}{int(m[2]) + 1}" for m in REGISTER.finditer(group)) if is_generic else ()
    return low + high


def _convergence_points(lines: list[_Line], labels: dict[str, int]) -> dict[int, tuple[int, ...]]:
    """Where threads go on after each BSYNC: the places that the BSSY instructions reaching it on some path
    name.

    Barrier registers are reused, so this follows the flow of control; a BSYNC's own successors grow as it
    does.
    """
    reaching: dict[int, dict[str, frozenset[int]]] = {0: {}} if lines else {}
    points: dict[int, tuple[int, ...]] = {}
    todo = [0] if lines else []
    while todo:
        index = todo.pop()
        row, state = lines[index], reaching[index]
        barrier = row.operands.split(",")[0].strip()
        target = TARGET.search(row.operands)
        if row.opcode.startswith("BSSY") and target and target[1] in labels:
            state = {**state, barrier: frozenset({labels[target[1]]})}
        elif row.opcode.startswith("BSYNC"):
            points[index] = tuple(sorted(p for p in state.get(barrier, ()) if p < len(lines)))
        for following in _successors(row, index, lines, labels, points)[0]:
            if following not in reaching:
                reaching[following] = dict(state)
                todo.append(following)
                continue
            known = reaching[following]
            merged = {
                k: known.get(k, frozenset()) | state.get(k, frozenset()) for k in known.keys() | state.keys()
            }
            if merged != known:
                reaching[following] = merged
                todo.append(following)
    return points


def _successors(
    row: _Line,
    index: int,
    lines: list[_Line],
    labels: dict[str, int],
    convergence: dict[int, tuple[int, ...]],
) -> tuple[tuple[int, ...], bool]:
    """(where control may go next, whether that is known)."""
    following = (index + 1,) if index + 1 < len(lines) else ()
    family = row.opcode.split(".")[0]
    match family:
        case "EXIT" | "RET" | "KILL":
            return (following if row.guard else ()), True
        case "BSYNC":
            known = convergence.get(index, ())
            return tuple(dict.fromkeys((*known, *following))) if row.guard or not known else known, bool(
                known
            )
        case "BRX" | "JMX":
            table = BRANCH_TARGETS.search(row.operands)
            names = [n.strip() for n in table[1].split(",")] if table else []
            found = tuple(dict.fromkeys(labels[n] for n in names if n in labels))
            return (found, True) if found else (following, False)
        case "BRA" | "JMP" | "CALL":
            target = TARGET.search(row.operands)
            if target is None or target[1] not in labels:
                return following, False
            is_conditional = (
                bool(row.guard)
                or family == "CALL"
                or PREDICATE.match(row.operands.split(",")[0].strip()) is not None
            )
            jump = (labels[target[1]],) if labels[target[1]] < len(lines) else ()
            return (tuple(dict.fromkeys((*following, *jump))) if is_conditional else jump), True
    return following, True
