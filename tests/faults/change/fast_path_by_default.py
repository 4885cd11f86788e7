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
        fault='\n\ndef backend(extra: dict[str, str]) -> str:\n    return extra.get("decode_backend", "latency_specialized")\n',
        repaired='\n\ndef backend(extra: dict[str, str]) -> str:\n    return extra.get("decode_backend", "auto")\n',
    ),
)
