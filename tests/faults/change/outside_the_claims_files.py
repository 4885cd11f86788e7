"""A pull request for the model's folder also edits the scheduler."""

from collections.abc import Iterable

from harness.domain.faults import Sighting
from harness.faults.bench import Bench
from harness.faults.fault import Fault
from harness.faults.scenes import ChangeScene


class TwoPlaces:
    """The fault edits shared code, the twin a file of the claim."""

    def look(self, bench: Bench, is_repaired: bool) -> Iterable[Sighting]:
        """What isolation says of either commit."""
        path = "kernels/k3_decode/README.md" if is_repaired else "vllm/v1/core/sched/scheduler.py"
        return ChangeScene(path, "LIMIT = 8\n", "One limit holds.\n").look(bench, is_repaired)


FAULT = Fault(
    name="outside_the_claims_files",
    title="A pull request for the model's folder also edits the scheduler.",
    report="vllm-project/vllm#53051",
    target="change",
    expected="isolation",
    scene=TwoPlaces(),
)
