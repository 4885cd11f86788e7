"""The control of the audit: kernels with a planted fault and their repaired twins, read beside the real ones
every time.

`planted/` holds pairs `<case>.fault.*` and `<case>.fixed.*`: PTX, and its SASS for each architecture as the
assembler and disassembler of CUDA 13.5 gave it. The head of a file says what must be found. A case that is
not caught, or a twin in which anything is found, makes every audit NO_EVIDENCE.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from harness.domain.errors import EvidenceError
from harness.stages.audit.cubin import KernelResources
from harness.stages.audit.facts import (
    EXCHANGED,
    AccessFact,
    Flow,
    Launch,
    Parameter,
    ProgramFact,
    read_accesses,
    read_facts,
    read_flow,
)
from harness.stages.audit.program import Instruction, Order, Program, Slot
from harness.stages.audit.ptx import parse_ptx
from harness.stages.audit.rules import access_findings, program_findings, unclassed
from harness.stages.audit.sass import parse_sass

__all__ = ["FOLDER", "Planted", "mutants", "planted_facts", "verdict"]

FOLDER = Path(__file__).resolve().parent / "planted"
HEAD = re.compile(r"^// (title|expect|role|bank|slot|multicast): (.*)$", re.MULTILINE)


class Planted(NamedTuple):
    """One planted kernel as read: what it must give, and the facts found in it."""

    name: str
    title: str
    expect: str
    """Rules and `unclassed`, separated by commas, or `clean`."""
    program: ProgramFact
    accesses: tuple[AccessFact, ...]
    multicast: int = 0
    """Multicast instructions that its claim allows."""


@cache
def planted_facts(architecture: str) -> tuple[Planted, ...]:
    """Every planted kernel: all PTX, and the SASS of one architecture."""
    files = sorted([*FOLDER.glob("*.ptx"), *FOLDER.glob(f"*.{architecture}.sass")])
    return tuple(_read(path) for path in files)


def verdict(planted: Planted) -> tuple[bool, str]:
    """(whether the rules said what they must, what they said)."""
    found = sorted({f.rule for f in access_findings([planted.program], planted.accesses)})
    if planted.program.level == "sass":
        spilled = {"spill": planted.program.local_accesses, "local_accesses": planted.program.local_accesses}
        found += [f.rule for f in program_findings(spilled, {"spill": 0})]
    found += [
        f.rule
        for f in program_findings({"multicast": planted.program.multicast}, {"multicast": planted.multicast})
    ]
    if unclassed(planted.accesses):
        found.append("unclassed")
    said = ", ".join(sorted(found)) or "clean"
    return said == planted.expect, said


def mutants(
    program: Program,
    parameters: tuple[Parameter, ...],
    launch: Launch,
    numbers: frozenset[int] = frozenset(),
    flow: Flow | None = None,
) -> Iterable[tuple[str, tuple[AccessFact, ...]]]:
    """The real kernel with a fault planted in it, as the accesses read in it: its waits taken out, its
    coherent loads made non-coherent, and what it exchanges with others made weak.

    A mutation that leaves the kernel as it was is not given. None changes an address or a branch.
    """
    flow = flow or read_flow(program)

    def read(instructions: tuple[Instruction, ...]) -> tuple[AccessFact, ...]:
        changed = replace(program, instructions=instructions)
        return read_accesses(changed, "mutant", parameters, lambda _: "", numbers, flow)

    if program.has_wait() and launch.is_dependent is not False:
        yield (
            "wait_removed",
            read(tuple(replace(i, is_wait=False) if i.is_wait else i for i in program.instructions)),
        )
    changed = tuple(
        replace(i, access=replace(i.access, is_non_coherent=True))
        if i.access is not None and i.access.kind.value == "load" and i.opcode.startswith(("ld.", "LDG"))
        else i
        for i in program.instructions
    )
    if changed != program.instructions:
        accesses = read(changed)
        if any(a.is_non_coherent and a.roles not in ("", "weight") for a in accesses):
            yield "loads_made_non_coherent", accesses
    if any(p.role in EXCHANGED for p in parameters):
        weak = tuple(
            replace(
                i, is_acquire_fence=False, access=replace(i.access, order=Order.WEAK) if i.access else None
            )
            if i.access or i.is_acquire_fence
            else i
            for i in program.instructions
        )
        yield "exchange_made_weak", read(weak)


def _read(path: Path) -> Planted:
    text = path.read_text()
    head = HEAD.findall(text)
    parameters = tuple(Parameter(*value.split()) for key, value in head if key == "role")
    single = {key: value for key, value in head if key in ("title", "expect", "bank", "multicast")}
    if path.suffix == ".ptx":
        programs = parse_ptx(text)
    else:
        slots = tuple(_slot(value) for key, value in head if key == "slot")
        resources = KernelResources("planted", 0, 0, 0, 0, 0, None, int(single["bank"], 16), slots)
        programs = parse_sass(text, {"planted": resources})
    if len(programs) != 1:
        raise EvidenceError(
            f"{path.name}: {len(programs)} kernels were read where one is planted; restore the file"
        )
    name = path.name.removesuffix(path.suffix)
    fact, accesses = read_facts(programs[0], name, parameters, Launch(is_dependent=True), lambda _: "")
    allowed = int(single.get("multicast", 0))
    return Planted(name, single["title"], single["expect"], fact, accesses, allowed)


def _slot(text: str) -> Slot:
    ordinal, offset, size = map(int, text.split())
    return Slot(ordinal, offset, size)
