"""What is read after which flag, and which products of indices are too narrow."""

from harness.stages.audit.facts import AccessFact, Launch, Parameter, read_facts
from harness.stages.audit.program import in_cycles
from harness.stages.audit.ptx import parse_ptx
from harness.stages.audit.rules import access_findings, program_findings

BOX = (Parameter("box", "mailbox"), Parameter("ready", "flag"))
START = "ld.param.u64 %rd1, [a];\nld.param.u64 %rd2, [b];\n"
POLL = "L1:\nld.{order}.global.b32 %r1, [%rd2];\nsetp.eq.s32 %p1, %r1, 0;\n@%p1 bra L1;\n"
READ = "ld.global.b32 %r2, [%rd1];\n"


def accesses(body: str, parameters: tuple[Parameter, ...] = BOX) -> tuple[AccessFact, ...]:
    text = (
        f".visible .entry k(\n.param .u64 a, .param .u64 b\n)\n.reqntid 32, 1, 1\n{{\n{START}{body}ret;\n}}\n"
    )
    (program,) = parse_ptx(text)
    return read_facts(program, "k", parameters, Launch(is_dependent=False), lambda _: "")[1]


def rules(body: str, parameters: tuple[Parameter, ...] = BOX) -> list[str]:
    return [f.rule for f in access_findings([], accesses("griddepcontrol.wait;\n" + body, parameters))]


def test_an_acquired_flag_guards_what_is_read_after_it() -> None:
    assert [a.guard for a in accesses(POLL.format(order="acquire.sys") + READ)] == ["none", "acquired"]
    assert rules(POLL.format(order="acquire.sys") + READ) == []


def test_a_flag_acquired_within_the_block_only_guards_nothing() -> None:
    assert rules(POLL.format(order="acquire.cta") + READ) == ["weak_flag_read", "mailbox_read_unguarded"]


def test_a_fence_makes_a_polled_flag_an_acquired_one_and_a_proxy_fence_does_not() -> None:
    polled = POLL.format(order="relaxed.gpu")
    assert rules(polled + "fence.acq_rel.gpu;\n" + READ) == []
    assert rules(polled + "membar.gl;\n" + READ) == []
    assert rules(polled + "fence.proxy.async.global;\n" + READ) == ["mailbox_read_unguarded"]
    assert rules("fence.acq_rel.gpu;\n" + READ) == ["mailbox_read_unguarded"]


def test_threads_that_meet_the_one_that_acquired_may_read_and_those_that_do_not_meet_it_may_not() -> None:
    one = "setp.ne.u32 %p2, %tid.x, 0;\n@%p2 bra L2;\n" + POLL.format(order="acquire.gpu") + "L2:\n"
    assert rules(one + "bar.sync 0;\n" + READ) == []
    assert rules(one + "bar.arrive 0, 64;\n" + READ) == ["mailbox_read_unguarded"]


def test_data_that_carries_its_mark_is_polled_by_strong_loads_in_a_loop() -> None:
    loop = "L3:\nld.{order}.global.b32 %r2, [%rd1];\nsetp.eq.s32 %p1, %r2, -1;\n@%p1 bra L3;\n"
    assert rules(loop.format(order="volatile")) == []
    assert rules(loop.format(order="weak")) == ["mailbox_read_unguarded"]


def test_instructions_of_a_loop_are_known_and_those_around_it_are_not() -> None:
    (program,) = parse_ptx(
        ".visible .entry k(.param .u64 a)\n{\nmov.u32 %r1, 0;\nL:\nadd.s32 %r1, %r1, 1;\n"
        "setp.lt.s32 %p1, %r1, 4;\n@%p1 bra L;\nret;\n}\n"
    )
    assert [program.instructions[i].opcode for i in sorted(in_cycles(program))] == [
        "add.s32",
        "setp.lt.s32",
        "bra",
    ]


def test_a_narrow_product_counts_by_its_factor_and_not_where_the_index_is_bounded() -> None:
    cache = (Parameter("cache", "state"), Parameter("table", "index"))
    index = "ld.global.s32 %r1, [%rd2];\n{bound}mul.lo.s32 %r2, %r1, {factor};\n"
    use = "cvt.s64.s32 %rd3, %r2;\nadd.s64 %rd4, %rd1, %rd3;\nld.global.b32 %r3, [%rd4];\n"
    assert rules(index.format(bound="", factor=2048) + use, cache) == ["narrow_offset"]
    assert rules(index.format(bound="", factor=2047) + use, cache) == []
    assert rules(index.format(bound="min.s32 %r1, %r1, 16;\n", factor=2048) + use, cache) == []
    assert rules(index.format(bound="mov.u32 %r1, %ctaid.x;\n", factor=2048) + use, cache) == []


def test_a_narrow_product_of_which_a_mask_keeps_low_bits_is_right_and_multiplied_again_it_is_not() -> None:
    cache = (Parameter("cache", "state"), Parameter("table", "index"))
    parity = "ld.global.s32 %r1, [%rd2];\nshl.b32 %r2, %r1, 16;\nand.b32 %r2, %r2, 65536;\n"
    use = "cvt.s64.s32 %rd3, %r2;\nadd.s64 %rd4, %rd1, %rd3;\nld.global.b32 %r3, [%rd4];\n"
    assert rules(parity + use, cache) == []
    assert rules(parity + "mul.lo.s32 %r2, %r2, 65536;\n" + use, cache) == ["narrow_offset"]
    assert rules(parity.replace("65536;", "-65536;") + use, cache) == ["narrow_offset"]


def test_a_share_of_wide_loads_below_the_expected_one_is_a_finding_and_one_above_is_not() -> None:
    figures = {"wide_loads": 79, "local_accesses": 0}
    assert [f.rule for f in program_findings(figures, {"wide_loads": 80})] == ["wide_loads"]
    assert program_findings(figures, {"wide_loads": 79}) == ()
