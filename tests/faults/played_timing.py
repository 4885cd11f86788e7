"""Faults of a device's timer: its own code, changed, over layers on a device played in virtual time.

On such a device every duration is known and no load disturbs it, so that the suite finds these faults on
a machine without a GPU; the samples go through the real sampler and the real judge.
"""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from harness.domain.faults import Sighting
from harness.domain.machine import Gpu
from harness.faults.bench import Bench
from harness.faults.fault import Fault
from harness.stages.sweep.planning import plan
from tests.fakes.played_device import played
from tests.fakes.played_layers import LayerPack
from tests.faults.planting import changed

__all__ = ["PlayedScene", "timer_faulty"]

TIMER = "harness.measure.layers:_timed"


@dataclass(frozen=True, slots=True)
class PlayedScene:
    """One cell of whole layers, timed and judged on a played device."""

    fault: Mapping[str, str] = field(default_factory=dict)
    """Texts of the timer's source, and what stands in their place."""
    repaired: Mapping[str, str] = field(default_factory=dict)
    is_warm: bool = False
    """Whether the faulty layers read one set of weights."""

    def look(self, bench: Bench, is_repaired: bool) -> Iterator[Sighting]:
        """What the judge says of the cell."""
        card = Gpu(name="NVIDIA H200", arch="sm_90a", memory_bytes=2**37)
        machine = bench.request.machine.model_copy(update={"gpus": (card,)})
        edits = self.repaired if is_repaired else self.fault
        with played() as device, changed(TIMER, edits) if edits else nullcontext():
            pack = LayerPack(device, is_warm=self.is_warm and not is_repaired)
            request = replace(bench.request, pack=pack, machine=machine)
            check = next(c for c in plan(request) if "kda_moe.sharded/" in c.id and ".tp8.dcp1.b1." in c.id)
            yield from bench.run((check,), request)


def timer_faulty(
    name: str, title: str, report: str, fault: Mapping[str, str], repaired: Mapping[str, str]
) -> Fault:
    """A fault in the code that times a pass."""
    return Fault(name, title, report, "timing", "sweep", PlayedScene(fault, repaired))
