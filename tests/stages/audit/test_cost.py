"""What kernels cost, where a variant has several."""

from dataclasses import replace

from harness.domain.check import Samples, SampleTable
from harness.domain.machine import Tier
from harness.stages.audit.cost import RESOURCE_COLUMNS, costs
from harness.stages.audit.facts import ProgramFact
from harness.stages.audit.planted import planted_facts

SOUND = next(p.program for p in planted_facts("sm_90a") if p.name == "hoisted_load.fixed.sm_90a")


def spill_of(*kernels: tuple[int, int, int]) -> int:
    """Of kernels as (frame bytes, declared bytes, local accesses)."""
    rows = tuple((64, frame, 0, 0, 0, 0, 128) for frame, _, _ in kernels)
    table = SampleTable(name="resources", columns=RESOURCE_COLUMNS, rows=rows)
    samples = Samples(check="audit/k/sm_90a", tier=Tier.SMOKE, tables=(table,))
    return costs(samples, programs(*kernels), ())["spill"]


def programs(*kernels: tuple[int, int, int]) -> tuple[ProgramFact, ...]:
    return tuple(
        replace(SOUND, subject=f"kernel{number}", level=level, local_bytes=declared, local_accesses=local)
        for number, (_, declared, local) in enumerate(kernels)
        for level in ("ptx", "sass")
    )


def test_a_kernel_s_array_hides_no_spill_of_another_kernel() -> None:
    assert spill_of((64, 64, 4), (32, 0, 2)) == 32
    assert spill_of((32, 0, 2), (64, 64, 4)) == 32


def test_a_declared_array_and_the_frame_of_a_call_are_no_spill() -> None:
    assert spill_of((64, 64, 4), (32, 0, 0)) == 0


def test_the_tenth_kernel_is_not_taken_for_the_second() -> None:
    quiet = [(0, 0, 0)] * 10
    assert spill_of(*quiet, (16, 16, 1)) == 0


def test_where_kernels_and_resources_do_not_match_nothing_counts_as_declared() -> None:
    rows = ((64, 40, 0, 0, 0, 0, 128),)
    table = SampleTable(name="resources", columns=RESOURCE_COLUMNS, rows=rows)
    samples = Samples(check="audit/k/sm_90a", tier=Tier.SMOKE, tables=(table,))
    assert costs(samples, programs((40, 40, 1), (0, 0, 0)), ())["spill"] == 40
