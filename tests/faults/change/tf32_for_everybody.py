"""Importing the model turns TF32 on for the whole process."""

from harness.faults.fault import Fault
from harness.faults.scenes import ChangeScene

FAULT = Fault(
    name="tf32_for_everybody",
    title="Importing the model turns TF32 on for the whole process.",
    report="NVlabs/curobo#720",
    target="change",
    expected="isolation",
    scene=ChangeScene(
        path="kernels/k3_decode/model.py",
        fault="\n\ntorch.backends.cuda.matmul.allow_tf32 = True\n",
        repaired="\n\nALLOWS_TF32 = False\n",
    ),
)
