"""Three witnesses: what ledger, counters and trace amount to where they disagree."""

import pytest

from harness.domain.cell import Cell
from harness.domain.check import Samples, SampleTable, StageName, Status
from harness.domain.machine import Tier
from harness.domain.record import Scalar
from harness.stages.coverage import judge
from harness.stages.coverage.probe import KERNEL_COLUMNS, STEP_COLUMNS, TRACE_COLUMNS
from harness.stages.coverage.witnesses import (
    compare_builds,
    kernels_differ,
    ledger_objection,
    traced,
    witness,
)
from tests.fakes.requests import planned

Row = tuple[Scalar, ...]
STEP: Row = ("on", 5, "decode", 2, 1, 2, 2, "optimised", "taken", "oo", True, "none", 1, 1, 0, 25, 25)
SOUND: Row = ("on", 5, "router", "router", "graph", 4, 4, 4)


def samples(*kernels: Row, blind: str = "", builds: tuple[Row, ...] = ()) -> Samples:
    arms = dict.fromkeys(("on", *(str(row[0]) for row in kernels)))
    traces = tuple((arm, 10, 10, blind, 1, 1, "") for arm in arms)
    return Samples(
        check="coverage/path/x",
        tier=Tier.RANK,
        tables=(
            SampleTable(name="steps", columns=STEP_COLUMNS, rows=(STEP,)),
            SampleTable(
                name="launches", columns=("arm", "op", "counted", "expected"), rows=(("on", "router", 4, 4),)
            ),
            SampleTable(name="kernels", columns=KERNEL_COLUMNS, rows=kernels),
            SampleTable(name="traces", columns=TRACE_COLUMNS, rows=traces),
            SampleTable(name="builds", columns=("arm", "digest"), rows=builds),
        ),
    )


def kernel(**fields: Scalar) -> Row:
    return tuple({**dict(zip(KERNEL_COLUMNS, SOUND, strict=True)), **fields}.values())


def test_ledger_counters_and_trace_that_agree_pass() -> None:
    found = witness(samples(SOUND), "on", 0.95)
    assert found.status is Status.PASS
    assert found.words.endswith("4 kernels in 1 traced steps, each one declared and counted")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (kernel(seen=3, counted=3), "router was seen 3 times in step 5, declared 4"),
        (kernel(seen=5, counted=5), "router was seen 5 times in step 5, declared 4"),
        (kernel(counted=3), "router counted 3 launches in step 5, seen and declared 4"),
        (
            kernel(op="", name="gemm", seen=2, declared=0, counted=None),
            "gemm ran 2 times in step 5, a kernel",
        ),
        (kernel(op="stock", seen=1, declared=0, counted=None), "stock ran 1 times in step 5 where none is"),
        (kernel(place="eager"), "router ran outside the graph that the ledger names"),
    ],
)
def test_a_kernel_that_is_missing_extra_or_foreign_fails_and_is_named(row: Row, words: str) -> None:
    status, said = traced(samples(row), "on")
    assert (status, words in said) == (Status.FAIL, True), said


def test_a_trace_that_lost_what_counters_and_manifest_agree_on_is_no_evidence() -> None:
    status, said = traced(samples(kernel(seen=1)), "on")
    assert (status, said) == (
        Status.NO_EVIDENCE,
        "the trace lost events: router was seen 1 times in step 5, while manifest and counters say 4",
    )


def test_a_profiler_that_cannot_see_into_graphs_is_no_evidence_with_its_reason() -> None:
    status, said = traced(samples(SOUND, blind="the profiler saw 0 of 10 events"), "on")
    assert (status, said) == (
        Status.NO_EVIDENCE,
        "the trace proves nothing: the profiler saw 0 of 10 events",
    )


def test_a_trace_without_any_kernel_is_never_a_pass() -> None:
    assert traced(samples(), "on")[0] is Status.NO_EVIDENCE


def test_one_build_with_a_switch_must_be_one_build_and_run_unlike_kernels() -> None:
    same = samples(SOUND, ("off", 5, "", "gemm", "eager", 9, 0, None), builds=(("on", "a"), ("off", "a")))
    assert compare_builds(same) == ""
    assert kernels_differ(same)
    moved = samples(SOUND, builds=(("on", "a"), ("off", "b")))
    assert compare_builds(moved) == "the arms are one build with a switch, and their code differs"


def test_two_builds_must_be_two() -> None:
    same = samples(SOUND, builds=(("on", "a"), ("off", "a")))
    assert (
        compare_builds(same, is_one_build=False)
        == "the arms should be two builds, and their code is the same"
    )
    assert compare_builds(samples(SOUND), is_one_build=False) == (
        "the samples do not say which build ran each arm"
    )


def test_arms_that_ran_the_same_kernels_are_no_comparison() -> None:
    rows = (SOUND, ("off", *SOUND[1:]))
    assert not kernels_differ(samples(*rows))


RANKED = Cell.model_validate({"arch": "cpu", "tp": 2, "batch": 2, "context": 24})
RANKED_STEP = {**dict(zip(STEP_COLUMNS, STEP, strict=True)), "is_graph": False, "tp": 2}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"collective": "in_process"}, ""),
        ({"collective": "none"}, "the ledger says that ranks met by none, and the cell has 2"),
        (
            {"collective": "multicast"},
            "the ledger says that ranks met by multicast, and the kernels that ran are those of in_process",
        ),
        ({"collective": "in_process", "tp": 1}, "the ledger says tp 1 of step 5, which had 2"),
        ({"collective": "in_process", "dcp": 2}, "the ledger says dcp 2 of step 5, which had 1"),
        ({"collective": "in_process", "requests": 1}, "the ledger says requests 1 of step 5, which had 2"),
        (
            {"collective": "in_process", "context_max": 24},
            "the ledger says context_max 24 of step 5, which had 25",
        ),
        (
            {"collective": "in_process", "is_graph": True},
            "the ledger says is_graph True of step 5, which had False",
        ),
    ],
)
def test_each_column_of_the_ledger_is_held_to_what_was_asked_and_to_what_ran(
    fields: dict[str, Scalar], words: str
) -> None:
    check = planned(StageName.COVERAGE, "path/cpu.tp1.dcp1.b1.").model_copy(update={"cell": RANKED})
    steps = (tuple({**RANKED_STEP, **fields}.values()),)
    found = Samples(
        check=check.id, tier=Tier.SMOKE,
        tables=(
            SampleTable(name="steps", columns=STEP_COLUMNS, rows=steps),
            SampleTable(name="traces", columns=TRACE_COLUMNS, rows=(("on", 1, 1, "", 0, 1, "in_process"),)),
        ),
    )  # fmt: skip
    assert ledger_objection(check, found) == words


def costs(ledger_us: float, planted_us: float = 800.0) -> Samples:
    rows = (("step", 0, 8000.0), ("step", 1, 8200.0), ("ledger", 0, ledger_us), ("planted", 0, planted_us))
    table = SampleTable(name="costs", columns=("what", "repetition", "us"), rows=rows)
    return Samples(check="coverage/ledger/cost", tier=Tier.SMOKE, tables=(table,))


def test_a_ledger_that_takes_more_than_a_hundredth_of_a_step_fails() -> None:
    check = planned(StageName.COVERAGE, "ledger/cost")
    assert (
        judge(check, costs(20.0)).summary
        == "20.0 us a decision, 0.25% of a decode step of 8100 us (limit 1%)"
    )
    assert judge(check, costs(20.0)).status is Status.PASS
    assert judge(check, costs(90.0)).status is Status.FAIL


def test_a_slow_ledger_that_is_not_noticed_makes_the_cost_no_evidence() -> None:
    check = planned(StageName.COVERAGE, "ledger/cost")
    assert judge(check, costs(20.0, planted_us=40.0)).status is Status.NO_EVIDENCE
