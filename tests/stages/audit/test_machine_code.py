"""Reading cubins and disassembly."""

from pathlib import Path

import pytest

from harness.domain.errors import EvidenceError
from harness.stages.audit.cost import occupancy_blocks
from harness.stages.audit.cubin import KernelResources, parse_cubin
from harness.stages.audit.facts import Launch, Parameter, ProgramFact, read_facts
from harness.stages.audit.origins import trace_addresses
from harness.stages.audit.program import Origin, OriginKind, Program, Slot, reached_without_wait
from harness.stages.audit.sass import parse_sass

DATA = Path(__file__).parent / "data"
TWO_POINTERS = KernelResources("k", 8, 0, 0, 0, 0, None, 0x210, (Slot(0, 0, 8), Slot(1, 8, 8)))


def kernel(*lines: str) -> Program:
    rows = [
        line if line.endswith(":") else f"        /*{16 * i:04x}*/  {line} ;" for i, line in enumerate(lines)
    ]
    (program,) = parse_sass("\n".join(['\t.section\t.text.k,"ax"', *rows]), {"k": TWO_POINTERS})
    return program


def origins(program: Program) -> list[set[Origin]]:
    return [set(found) for _, found in sorted(trace_addresses(program).items())]


def test_a_cubin_names_registers_parameters_and_where_they_lie() -> None:
    (found,) = parse_cubin((DATA / "hoisted_load_fixed.cubin").read_bytes())
    assert found.name == "planted"
    assert found.bank_offset == 0x210
    assert found.slots == (Slot(0, 0, 8), Slot(1, 8, 8))
    assert found.threads == (128, 1, 1)
    assert (found.frame_bytes, found.shared_bytes, found.named_barriers) == (0, 0, 0)
    assert found.registers == 14  # as `cuobjdump -res-usage` says


def test_a_file_that_is_no_cubin_is_refused_in_words() -> None:
    with pytest.raises(EvidenceError, match="not a complete 64-bit ELF file"):
        parse_cubin(b"not a cubin")
    with pytest.raises(EvidenceError, match="not a complete 64-bit ELF file"):
        parse_cubin((DATA / "hoisted_load_fixed.cubin").read_bytes()[:900])


def test_a_register_that_is_used_again_loses_its_old_origin() -> None:
    program = kernel(
        "LDC.64 R2, c[0x0][0x210]",
        "LDG.E R4, desc[UR4][R2.64]",
        "LDC.64 R2, c[0x0][0x218]",
        "STG.E desc[UR4][R2.64], R4",
    )
    assert origins(program) == [{Origin(OriginKind.POINTER, 0)}, {Origin(OriginKind.POINTER, 1)}]


def test_a_stride_next_to_a_pointer_in_one_wide_constant_load_is_a_number() -> None:
    wide = KernelResources("k", 8, 0, 0, 0, 0, None, 0x210, (Slot(0, 0, 24),))
    lines = ("/*0000*/ LDC.128 R4, c[0x0][0x210] ;", "/*0010*/ LDG.E R8, desc[UR4][R6.64] ;")
    (program,) = parse_sass("\n ".join(('\t.section\t.text.k,"ax"', *lines)), {"k": wide})
    assert origins(program) == [set()]


def test_threads_go_on_after_a_barrier_where_its_own_bssy_says() -> None:
    program = kernel(
        "BSSY B0, `(.L_a)", "NOP", "BSYNC B0", ".L_a:", "BSSY B0, `(.L_b)", "NOP", "BSYNC B0", ".L_b:", "EXIT"
    )
    assert [i.follows for i in program.instructions] == [(1,), (2,), (3,), (4,), (5,), (6,), ()]


def test_a_wait_under_a_predicate_does_not_hold_back_what_follows() -> None:
    program = kernel("@P0 ACQBULK", "LDC.64 R2, c[0x0][0x210]", "LDG.E R4, desc[UR4][R2.64]")
    assert 2 in reached_without_wait(program)


def test_an_address_written_under_a_predicate_is_known_under_that_predicate_alone() -> None:
    lines = ("LDC.64 R2, c[0x0][0x210]", "LDC.64 R4, c[0x0][0x218]", "@P1 MOV R2, R4")
    both = {Origin(OriginKind.POINTER, 0), Origin(OriginKind.POINTER, 1)}
    second = {Origin(OriginKind.POINTER, 1)}
    assert origins(kernel(*lines, "@P1 LDG.E R6, desc[UR4][R2.64]")) == [second]
    assert origins(kernel(*lines, "@!P1 LDG.E R6, desc[UR4][R2.64]")) == [both]
    assert origins(kernel(*lines, "LDG.E R6, desc[UR4][R2.64]")) == [both]
    kept = (*lines, "@!P1 LDC.64 R2, c[0x0][0x210]", "@P1 LDG.E R6, desc[UR4][R2.64]")
    assert origins(kernel(*kept)) == [second]


def test_a_predicate_that_was_written_again_says_nothing_of_what_it_guarded() -> None:
    lines = ("LDC.64 R2, c[0x0][0x210]", "LDC.64 R4, c[0x0][0x218]", "@P1 MOV R2, R4")
    both = {Origin(OriginKind.POINTER, 0), Origin(OriginKind.POINTER, 1)}
    load = "@P1 LDG.E R6, desc[UR4][R2.64]"
    for writes in ("ISETP.NE.AND P1, PT, R8, RZ, PT", "IADD3 R8, P1, R8, R9, RZ", "R2P PR, R8, 0x7f"):
        assert origins(kernel(*lines, writes, load)) == [both]
    assert origins(kernel(*lines, "@P2 MOV R2, R8", load)) == [both]


def test_a_predicated_address_is_known_after_branches_meet_only_if_all_of_them_wrote_it() -> None:
    both = {Origin(OriginKind.POINTER, 0), Origin(OriginKind.POINTER, 1)}
    lines = ("LDC.64 R2, c[0x0][0x210]", "LDC.64 R4, c[0x0][0x218]", "@P0 BRA `(.L_a)", "@P1 MOV R2, R4")
    assert origins(kernel(*lines, ".L_a:", "@P1 LDG.E R6, desc[UR4][R2.64]")) == [both]


def test_a_store_through_the_shared_window_is_on_chip() -> None:
    program = kernel("S2R R5, SR_SWINHI", "MOV R4, 0x400", "ST.E [R4], R7")
    assert origins(program) == [{Origin(OriginKind.ON_CHIP)}]


def test_a_descriptor_is_known_by_its_offset_in_the_parameter_space() -> None:
    program = kernel(
        "ULDC.64 UR4, c[0x0][0x198]", "UIADD3 UR4, UP0, UR4, 0x8, URZ", "UTMALDG.1D [UR8], [UR4]"
    )
    assert origins(program) == [{Origin(OriginKind.DESCRIPTOR, 1)}]


def test_a_branch_through_a_register_without_a_table_is_unresolved() -> None:
    assert kernel("BRX R2 -0x10", "EXIT").unresolved == ("BRX R2 -0x10",)


def test_occupancy_is_the_tightest_of_registers_shared_memory_and_threads() -> None:
    assert occupancy_blocks(registers=64, shared_bytes=2944, threads=128) == 8
    assert occupancy_blocks(registers=32, shared_bytes=100 * 1024, threads=128) == 2
    assert occupancy_blocks(registers=16, shared_bytes=0, threads=1024) == 2


def fact_of(*lines: str) -> ProgramFact:
    roles = (Parameter("x", "activation"), Parameter("out", "output"))
    return read_facts(kernel(*lines), "k", roles, Launch(), lambda _: "")[0]


def test_the_main_loop_is_the_shortest_with_most_matrix_instructions() -> None:
    inner = (".L_b:", "HMMA.16816.F32.BF16 R4, R8, R12, R4", "@P0 BRA `(.L_b)")
    fact = fact_of(
        "LDC.64 R2, c[0x0][0x210]", ".L_a:", "LDG.E R8, desc[UR4][R2.64]", *inner, "@P1 BRA `(.L_a)"
    )
    assert (fact.tensor_core, fact.matrix_opcode) == (1, "HMMA.16816.F32.BF16")
    assert (fact.loop_instructions, fact.loop_tensor_core, fact.loop_accesses) == (2, 1, 0)


def test_without_matrix_instructions_the_main_loop_is_that_with_most_accesses() -> None:
    load = "LDG.E R8, desc[UR4][R2.64]"
    fact = fact_of(
        "LDC.64 R2, c[0x0][0x210]", ".L_a:", load, "NOP", load, "@P1 BRA `(.L_a)", ".L_b:", "BRA `(.L_b)"
    )
    assert (fact.loop_instructions, fact.loop_tensor_core, fact.loop_accesses) == (4, 0, 2)
    assert fact_of(load, "EXIT").loop_instructions == 0
