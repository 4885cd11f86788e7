"""A dependency moved between two runs, and their difference is told as the change's."""

from collections.abc import Iterable

from harness.domain.faults import Sighting
from harness.domain.machine import Machine
from harness.faults.bench import Bench
from harness.faults.fault import Fault
from tests.faults.result_edits import differing


def moved(machine: Machine) -> Machine:
    libraries = tuple((n, "0.0.1" if n == "torch" else v) for n, v in machine.libraries)
    return machine.model_copy(update={"libraries": libraries})


class TwoBundles:
    """The same run twice; under the fault the second has another torch."""

    def look(self, bench: Bench, is_repaired: bool) -> Iterable[Sighting]:
        """What `bundle diff` names among the conditions."""
        return differing(bench, (lambda machine: machine) if is_repaired else moved)


FAULT = Fault(
    name="dependency_moved",
    title="A dependency moved between two runs, and their difference is told as the change's.",
    report="vllm-project/vllm#51798",
    target="result",
    expected="bundle",
    scene=TwoBundles(),
)
