"""One run says which links join its GPUs, the other does not, and their speeds are compared."""

from collections.abc import Iterable

from harness.domain.faults import Sighting
from harness.domain.machine import Machine
from harness.faults.bench import Bench
from harness.faults.fault import Fault
from tests.faults.result_edits import differing


def moved(machine: Machine) -> Machine:
    return machine.model_copy(update={"nvlinks": 18, "driver": "580.1"})


class TwoBundles:
    """The same run twice; under the fault only the second names links and driver."""

    def look(self, bench: Bench, is_repaired: bool) -> Iterable[Sighting]:
        """What `bundle diff` names among the conditions."""
        return differing(bench, (lambda machine: machine) if is_repaired else moved)


FAULT = Fault(
    name="inventory_missing",
    title="One run says which links join its GPUs, the other does not, and their speeds are compared.",
    report="SemiAnalysisAI/InferenceX#1580",
    target="result",
    expected="bundle",
    scene=TwoBundles(),
)
