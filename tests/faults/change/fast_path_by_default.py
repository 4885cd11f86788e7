"""The switch stands on the fast path where nobody sets it."""

from harness.faults.fault import Fault
from harness.faults.scenes import ChangeScene

FAULT = Fault(
    name="fast_path_by_default",
    title="The switch stands on the fast path where nobody sets it.",
    report="vllm-project/vllm#46142",
    target="change",
    expected="isolation",
    scene=ChangeScene(
        path="kernels/k3_decode/decode.py",
        # A field and no reading of the switch, which would be a second selection in either form.
        fault='\n\nclass DecodeOptions:\n    decode_backend: str = "latency_specialized"\n',
        repaired='\n\nclass DecodeOptions:\n    decode_backend: str = "auto"\n',
    ),
)
