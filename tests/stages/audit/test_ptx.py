"""Reading PTX: parameters, edges, scopes, accesses and where addresses come from."""

from harness.stages.audit.origins import trace_addresses
from harness.stages.audit.program import (
    AccessKind,
    Origin,
    OriginKind,
    Program,
    SourceLine,
    reached_without_wait,
)
from harness.stages.audit.ptx import doubtful_lines, parse_ptx

TWO = "ld.param.u64 %rd1, [a];\nld.param.u64 %rd2, [b];\n"
"""Both parameters' pointers in registers."""


def kernel(body: str, parameters: str = ".param .u64 a, .param .u64 b") -> Program:
    (program,) = parse_ptx(f".visible .entry k(\n{parameters}\n)\n.reqntid 32, 1, 1\n{{\n{body}\nret;\n}}\n")
    return program


def origins(program: Program) -> list[set[Origin]]:
    return [set(found) for _, found in sorted(trace_addresses(program).items())]


def pointer(ordinal: int) -> Origin:
    return Origin(OriginKind.POINTER, ordinal)


def test_parameters_lie_at_their_alignment_and_records_are_told_from_numbers() -> None:
    program = kernel("", ".param .u32 n, .param .align 8 .b8 t[24], .param .u64 size")
    assert [(s.offset, s.size_bytes, s.is_record) for s in program.slots] == [
        (0, 4, False),
        (8, 24, True),
        (32, 8, False),
    ]


def test_the_word_at_offset_0_is_a_tensors_pointer_and_its_strides_are_numbers() -> None:
    program = kernel(
        "ld.param.b64 %rd1, [t+16];\nld.param.b64 %rd2, [t];\nadd.s64 %rd3, %rd2, %rd1;\n"
        "ld.global.b32 %r1, [%rd3];\n"
        "ld.global.b32 %r2, [%rd1];",
        ".param .align 8 .b8 t[24]",
    )
    number = Origin(OriginKind.NUMBER)
    assert origins(program) == [{pointer(0), number}, {number}]


def test_a_pointer_chosen_by_a_predicate_may_be_either() -> None:
    program = kernel(f"{TWO}selp.b64 %rd3, %rd1, %rd2, %p1;\nld.global.b32 %r1, [%rd3];")
    assert origins(program) == [{pointer(0), pointer(1)}]


def test_a_predicated_move_keeps_what_the_register_held() -> None:
    program = kernel(f"{TWO}@%p1 mov.b64 %rd1, %rd2;\nld.global.b32 %r1, [%rd1];")
    assert origins(program) == [{pointer(0), pointer(1)}]


def test_pointers_swapped_in_a_loop_reach_each_other() -> None:
    program = kernel(
        f"{TWO}$L:\nld.global.b32 %r1, [%rd1];\nmov.b64 %rd3, %rd1;\n"
        "mov.b64 %rd1, %rd2;\nmov.b64 %rd2, %rd3;\n@%p1 bra $L;"
    )
    assert origins(program) == [{pointer(0), pointer(1)}]


def test_an_index_read_from_memory_leaves_the_base_pointer_in_charge() -> None:
    program = kernel(
        f"{TWO}ld.global.b32 %r1, [%rd2];\nmul.wide.s32 %rd3, %r1, 8;\n"
        "add.s64 %rd4, %rd1, %rd3;\nld.global.b32 %r2, [%rd4];"
    )
    assert pointer(0) in origins(program)[1]
    assert pointer(1) not in origins(program)[1]


def test_labels_of_inline_assembly_belong_to_their_own_scope() -> None:
    wait = (
        "{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [%r1], 0; @p bra DONE; "
        "bra AGAIN; DONE: }"
    )
    program = kernel(f"{wait}\n{wait}\n@%p1 bra $END;\nmov.b32 %r2, 1;\n$END:")
    follows = [i.follows for i in program.instructions]
    assert follows[:3] == [(1,), (2, 3), (0,)]
    assert follows[3:6] == [(4,), (5, 6), (3,)]
    assert program.unresolved == ()


def test_a_load_behind_the_wait_on_one_path_only_is_reached_without_it() -> None:
    program = kernel("@%p1 bra $SKIP;\ngriddepcontrol.wait;\n$SKIP:\nmov.b32 %r1, 1;")
    assert 2 in reached_without_wait(program)


def test_what_stands_behind_an_unconditional_wait_is_not_reached_without_it() -> None:
    program = kernel("mov.b32 %r1, 1;\ngriddepcontrol.wait;\nmov.b32 %r2, 1;")
    assert reached_without_wait(program) == {0, 1}


def test_widths_kinds_and_coherence_are_read_from_the_opcode() -> None:
    program = kernel(
        "ld.global.nc.L1::no_allocate.L2::256B.v4.b32 {%r1,%r2,%r3,%r4}, [%rd1];\n"
        "st.global.v2.b64 [%rd1], {%rd2,%rd3};\n"
        "red.relaxed.gpu.global.add.s32 [%rd1], %r1;\nprefetch.global.L2 [%rd1];\nld.shared.b32 %r5, [%r6];\n"
        "cp.async.cg.shared.global [%r7], [%rd1], 16;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r1], %r2, [%r3];"
    )
    found = [
        (i.access.kind, i.access.width_bytes, i.access.is_non_coherent)
        for i in program.instructions
        if i.access
    ]
    assert found == [
        (AccessKind.LOAD, 16, True),
        (AccessKind.STORE, 16, False),
        (AccessKind.ATOMIC, 4, False),
        (AccessKind.PREFETCH, None, False),
        (AccessKind.LOAD, 16, False),
    ]


def test_an_instruction_with_a_stand_in_line_takes_the_line_of_its_address() -> None:
    text = (
        ".entry k(.param .u64 a)\n{\n.loc 1 10 4\nld.param.u64 %rd1, [a];\n.loc 1 99 0\n"
        "ld.global.b32 %r1, [%rd1];\nret;\n}\n"
        '.file 1 "copy.py"\n'
    )
    (program,) = parse_ptx(text)
    assert program.instructions[1].line == SourceLine("copy.py", 10)
    assert doubtful_lines(text) == {SourceLine("copy.py", 99)}


def test_a_branch_to_an_unknown_place_is_said() -> None:
    assert kernel("bra $NOWHERE;").unresolved == ("bra $NOWHERE",)


def test_local_memory_that_the_source_asks_for_is_counted() -> None:
    assert kernel(".local .align 8 .b8 __local_depot0[96];").local_bytes == 96
