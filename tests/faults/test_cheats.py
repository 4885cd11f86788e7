"""Every cheat is rejected for its own reason, and its honest twin accepted."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.faults.bench import Bench
from harness.faults.registry import Registered, registered_faults
from harness.faults.run import plant

REASONS = {
    "answer_for_a_recorded_seed": "error",
    "answer_found_in_memory": "error",
    "answer_kept_by_address": "error",
    "answer_kept_by_content": "on the same again: answers are kept by content",
    "computed_in_a_thread": "error",
    "input_made_to_agree": "error",
    "lazy_output": "error",
    "less_work_when_timed": "error",
    "nan_returned": "error",
    "nothing_after_the_first_call": "error",
    "padded_input_frozen": "error",
    "scale_over_the_batch": "in special_rows: error",
    "stock_after_an_exception": "the launch counter did not rise",
    "stock_called_instead": "stock by another name",
    "tolerance_patched": "the candidate replaced module:harness.measure.trial.token_errors",
    "warm_up_detected": "error",
    "work_skipped_for_large_batches": "error",
    "zeros_returned": "error",
}
"""By cheat: what the rejection must say."""
ASKED = {
    "output cached by data pointer": "answer_kept_by_address",
    "output cached by content": "answer_kept_by_content",
    "no-op after the first call": "nothing_after_the_first_call",
    "no-op after the first call, on the device": "work_done_once_on_the_device",
    "work moved to another stream": "work_on_a_side_stream",
    "work moved to a background thread": "computed_in_a_thread",
    "lazily evaluated tensor": "lazy_output",
    "patched clock": "clock_patched",
    "patched event": "event_patched",
    "patched checker": "checker_patched",
    "patched tolerance": "tolerance_patched",
    "answer read from freed memory": "answer_in_freed_memory",
    "answer found in live memory": "answer_found_in_memory",
    "answer for a recorded seed": "answer_for_a_recorded_seed",
    "precision lowered": "activations_secretly_fp8",
    "input mutated": "input_made_to_agree",
    "input mutated on the device": "weight_written_by_the_kernel",
    "work skipped for shapes": "work_skipped_for_large_batches",
    "stock called": "stock_called_instead",
    "environment variable": "less_work_when_timed",
    "L2 persistence": "weights_kept_in_l2",
    "warm-up detected": "warm_up_detected",
    "binary swapped": "binary_swapped_after_description",
    "less launched than tested": "fewer_blocks_described",
    "worker's clock turned down": "clock_runs_slow",
}
"""By kind of cheat that the harness must survive: its sample. Those under `gpu` need one."""
CHEATS = Path(__file__).parent / "cheats"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def suite() -> dict[str, Registered]:
    return {r.fault.name: r for r in registered_faults()}


def names() -> Iterator[str]:
    yield from sorted(path.stem for path in CHEATS.glob("*.py"))


def test_every_cheat_has_its_reason_here() -> None:
    assert list(names()) == sorted(REASONS)


def test_every_kind_of_cheat_has_its_sample(suite: dict[str, Registered]) -> None:
    assert [kind for kind, name in ASKED.items() if name not in suite] == []


@pytest.mark.parametrize("name", sorted(REASONS))
def test_the_cheat_is_rejected_with_its_reason_and_the_twin_accepted(
    name: str, bench: Bench, suite: dict[str, Registered]
) -> None:
    result = plant(suite[name], bench)
    assert (result.verdict, result.false_alarms) == ("caught", ())
    assert REASONS[name] in next(c.seen.words for c in result.cells if c.is_caught)
