"""What a compiled kernel costs: registers, spills, shared memory, barriers, occupancy, load widths, matrix
instructions.

Limits are those of sm_90a, sm_100a and sm_103a, which are alike here (CUDA C++ Programming Guide 13,
"Technical Specifications per Compute Capability").
"""

from collections.abc import Mapping, Sequence

from harness.domain.check import Figure, Samples
from harness.domain.record import Scalar
from harness.stages.audit.cubin import KernelResources
from harness.stages.audit.facts import AccessFact, ProgramFact
from harness.stages.audit.rules import unclassed

__all__ = ["RESOURCE_COLUMNS", "SHARED_LIMIT_BYTES", "costs", "figures", "occupancy_blocks", "resource_row"]

SHARED_LIMIT_BYTES = 227 * 1024
"""Most shared memory of one block."""
WIDE_BYTES = 16
SM_SHARED_BYTES = 228 * 1024
SM_REGISTERS = 65536
SM_THREADS = 2048
SM_BLOCKS = 32
REGISTER_UNIT = 256
"""Registers are given to warps in units of this many."""
RESERVED_SHARED_BYTES = 1024
"""Shared memory that the driver takes for each block."""
RESOURCE_COLUMNS = (
    "registers", "frame_bytes", "shared_bytes", "dynamic_shared_bytes", "named_barriers", "mbarriers",
    "threads",
)  # fmt: skip


def resource_row(resources: KernelResources, dynamic_shared_bytes: int | None) -> tuple[Scalar, ...]:
    """One kernel's resources as a row of their sample table; dynamic shared memory is the launch's, where
    known.
    """
    x, y, z = resources.threads or (0, 0, 0)
    return (
        resources.registers,
        resources.frame_bytes,
        resources.shared_bytes,
        dynamic_shared_bytes,
        resources.named_barriers,
        resources.mbarriers,
        x * y * z or None,
    )


def occupancy_blocks(registers: int, shared_bytes: int, threads: int) -> int:
    """Blocks of one kernel that fit on a multiprocessor at once."""
    warps = -(-threads // 32)
    registers_a_warp = -(-registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    by_registers = SM_REGISTERS // (registers_a_warp * warps)
    by_shared = SM_SHARED_BYTES // (shared_bytes + RESERVED_SHARED_BYTES)
    return min(by_registers, by_shared, SM_THREADS // (warps * 32), SM_BLOCKS)


def costs(
    samples: Samples, programs: Sequence[ProgramFact], accesses: Sequence[AccessFact]
) -> Mapping[str, int]:
    """The largest of each cost over the variant's kernels, named as the rules name them; of wide loads the
    share over all of them, 100 where no thread loads from global memory.
    """
    rows = _resources(samples)
    return {
        "spill": _spill(rows, programs),
        "local_accesses": sum(p.local_accesses for p in programs if p.level == "sass"),
        "registers": max((int(r["registers"] or 0) for r in rows), default=0),
        "shared_memory": max((_shared(r) for r in rows), default=0),
        "cluster": max((p.cluster_blocks for p in programs), default=1),
        # Machine code stores to a multicast address like to any other; only PTX tells.
        "multicast": max((p.multicast for p in programs), default=0),
        "block_size": max((p.threads or 0 for p in programs), default=0),
        "wide_loads": wide_percent(accesses),
    }


def _spill(rows: Sequence[Mapping[str, Scalar]], programs: Sequence[ProgramFact]) -> int:
    """The most that one kernel spills: its frame without the arrays that its own author declared. A frame
    without local accesses is a call's.

    Resources stand in the order of the kernels; where they do not match them nothing counts as declared.
    """
    levels = {level: {p.subject: p for p in programs if p.level == level} for level in ("ptx", "sass")}
    subjects = sorted(levels["sass"], key=lambda subject: (len(subject), subject))
    if len(subjects) != len(rows) or levels["ptx"].keys() != levels["sass"].keys():
        return max((int(r["frame_bytes"] or 0) for r in rows), default=0)
    spilled = [
        max(0, int(row["frame_bytes"] or 0) - levels["ptx"][subject].local_bytes)
        for row, subject in zip(rows, subjects, strict=True)
        if levels["sass"][subject].local_accesses
    ]
    return max(spilled, default=0)


def wide_percent(accesses: Sequence[AccessFact]) -> int:
    """Share of a kernel's global load instructions that move 16 bytes or more a thread, in percent."""
    wide, loads = _wide_loads(accesses)
    return 100 * wide // loads if loads else 100


def _wide_loads(accesses: Sequence[AccessFact]) -> tuple[int, int]:
    loads = [a for a in accesses if a.level == "sass" and a.kind == "load" and a.width_bytes is not None]
    return sum((a.width_bytes or 0) >= WIDE_BYTES for a in loads), len(loads)


def figures(
    samples: Samples, programs: Sequence[ProgramFact], accesses: Sequence[AccessFact]
) -> tuple[Figure, ...]:
    """Everything a reader compares between architectures and heads."""
    rows = _resources(samples)
    total = costs(samples, programs, accesses)
    sass = [p for p in programs if p.level == "sass"]
    wide, loads = _wide_loads(accesses)
    return (
        Figure(name="registers", value=total["registers"]),
        Figure(name="spill_bytes", value=total["spill"]),
        Figure(name="local_accesses", value=total["local_accesses"]),
        _shared_figure(rows, total["shared_memory"]),
        Figure(name="named_barriers", value=max((int(r["named_barriers"] or 0) for r in rows), default=0)),
        Figure(name="mbarriers", value=sum(int(r["mbarriers"] or 0) for r in rows)),
        _occupancy(rows),
        Figure(name="cluster_blocks", value=total["cluster"]),
        Figure(name="instructions", value=sum(p.instructions for p in sass), note="SASS"),
        Figure(name="matrix_instructions", value=sum(p.tensor_core for p in sass), note=_matrix_note(sass)),
        _main_loop(sass),
        Figure(name="multicast_instructions", value=total["multicast"]),
        Figure(
            name="load16_share",
            value=round(wide / loads, 4) if loads else None,
            missing=None if loads else "the kernel has no global loads by threads",
            note="share of global load instructions that move 16 bytes or more a thread",
        ),
        Figure(name="accesses", value=len(accesses), note="PTX and SASS together"),
        Figure(name="unclassed_accesses", value=len(unclassed(accesses))),
    )


def _matrix_note(sass: Sequence[ProgramFact]) -> str:
    used = dict.fromkeys(p.matrix_opcode for p in sass if p.matrix_opcode is not None)
    return f"SASS, mostly {', '.join(used)}" if used else "SASS"


def _main_loop(sass: Sequence[ProgramFact]) -> Figure:
    """Of the kernel with the largest one."""
    main = max(sass, key=lambda p: p.loop_instructions, default=None)
    if main is None or not main.loop_instructions:
        return Figure(name="main_loop_instructions", value=None, missing="no loop reads memory or multiplies")
    note = f"SASS: {main.loop_tensor_core} matrix instructions and {main.loop_accesses} accesses among them"
    return Figure(name="main_loop_instructions", value=main.loop_instructions, note=note)


def _shared(row: Mapping[str, Scalar]) -> int:
    return int(row["shared_bytes"] or 0) + int(row["dynamic_shared_bytes"] or 0)


def _shared_figure(rows: Sequence[Mapping[str, Scalar]], total: int) -> Figure:
    if any(r["dynamic_shared_bytes"] is None for r in rows):
        return Figure(name="shared_bytes", value=None, missing="the launch's dynamic part is no constant")
    return Figure(name="shared_bytes", value=total, note="static and dynamic, the driver's part included")


def _occupancy(rows: Sequence[Mapping[str, Scalar]]) -> Figure:
    known = [r for r in rows if r["threads"] and r["dynamic_shared_bytes"] is not None]
    if not known:
        return Figure(name="blocks_per_sm", value=None, missing="block size or shared memory is not fixed")
    fit = min(occupancy_blocks(int(r["registers"] or 0), _shared(r), int(r["threads"] or 0)) for r in known)
    return Figure(name="blocks_per_sm", value=fit)


def _resources(samples: Samples) -> Sequence[Mapping[str, Scalar]]:
    table = samples.table("resources")
    return table.records() if table else ()
