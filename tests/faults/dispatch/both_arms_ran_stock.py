"""Ledger, counters and manifest agree that the fast path ran; stock did, in both arms."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from harness.faults.fault import Fault
from harness.faults.scenes import PatchScene
from tests.faults.planting import PATH_CHECK, wrapped


@contextmanager
def plant(is_repaired: bool) -> Iterator[None]:
    from k3_decode.decode import calls_of_a_step
    from k3_decode.ops.contract import OP_NAMES
    from k3_decode.shapes import NANO

    def run(sound: Any, engine: Any, live: Any, rows: Any, *, is_optimised: bool) -> Any:
        out = sound(engine, live, rows, is_optimised=is_optimised and is_repaired)
        if is_optimised and not is_repaired:
            for op, count in calls_of_a_step(NANO).items():
                engine._optimised[0].launches[OP_NAMES.index(op)] += count
        return out

    with wrapped("k3_decode.engine:Engine._run", run):
        yield


FAULT = Fault(
    "both_arms_ran_stock",
    "Ledger, counters and manifest agree that the fast path ran; stock did, in both arms.",
    "pytorch/pytorch#146554",
    "dispatcher",
    "coverage",
    PatchScene(plant, (PATH_CHECK,)),
)
