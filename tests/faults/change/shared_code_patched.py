"""The model's code replaces a function of torch for everybody who imports it."""

from harness.faults.fault import Fault
from harness.faults.scenes import ChangeScene

FAULT = Fault(
    name="shared_code_patched",
    title="The model's code replaces a function of torch for everybody who imports it.",
    report="gpu-mode/reference-kernels#162",
    target="change",
    expected="isolation",
    scene=ChangeScene(
        path="kernels/k3_decode/model.py",
        fault="\n\nimport torch.nn.functional as F\n\nF.silu = lambda x: x.sigmoid() * x\n",
        repaired="\n\nimport torch.nn.functional as F\n\n\ndef silu(x: torch.Tensor) -> torch.Tensor:\n    return F.silu(x)\n",
    ),
)
