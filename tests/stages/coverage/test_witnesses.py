"""Three witnesses: what ledger, counters and trace amount to where they disagree."""

import pytest

from harness.domain.check import Samples, SampleTable, StageName, Status
from harness.domain.machine import Tier
from harness.domain.record import Scalar
from harness.stages.coverage import judge
from harness.stages.coverage.probe import KERNEL_COLUMNS, STEP_COLUMNS
from harness.stages.coverage.witnesses import compare_builds, kernels_differ, traced, witness
from tests.fakes.requests import planned

Row = tuple[Scalar, ...]
STEP: Row = ("on", 5, "decode", 2, 1, 2, 2, "optimised", "taken", "oo", True, "none")
SOUND: Row = ("on", 5, "router", "router", "graph", 4, 4, 4)


def samples(*kernels: Row, blind: str = "", builds: tuple[Row, ...] = ()) -> Samples:
    arms = dict.fromkeys(("on", *(str(row[0]) for row in kernels)))
    traces = tuple((arm, 10, 10, blind, 1, 1) for arm in arms)
    names = ("arm", "sentinel_seen", "sentinel_planted", "blind", "graph_launches", "steps")
    return Samples(
        check="coverage/path/x",
        tier=Tier.RANK,
        tables=(
            SampleTable(name="steps", columns=STEP_COLUMNS, rows=(STEP,)),
            SampleTable(
                name="launches", columns=("arm", "op", "counted", "expected"), rows=(("on", "router", 4, 4),)
            ),
            SampleTable(name="kernels", columns=KERNEL_COLUMNS, rows=kernels),
            SampleTable(name="traces", columns=names, rows=traces),
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
