"""The model's code starts a thread beside the engine."""

from harness.faults.fault import Fault
from harness.faults.scenes import ChangeScene

FAULT = Fault(
    name="work_in_a_thread",
    title="The model's code starts a thread beside the engine.",
    report="gpu-mode/reference-kernels#162",
    target="change",
    expected="isolation",
    scene=ChangeScene(
        path="kernels/k3_decode/decode.py",
        fault="\n\nimport threading\n\nthreading.Thread(target=print, daemon=True).start()\n",
        repaired="\n\nTHREADS = 1\n",
    ),
)
