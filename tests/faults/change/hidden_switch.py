"""An environment variable that the claim does not name selects another path."""

from harness.faults.fault import Fault
from harness.faults.scenes import ChangeScene

FAULT = Fault(
    name="hidden_switch",
    title="An environment variable that the claim does not name selects another path.",
    report="vllm-project/vllm#52109",
    target="change",
    expected="isolation",
    scene=ChangeScene(
        path="kernels/k3_decode/decode.py",
        fault='\n\nimport os\n\nIS_FAST = os.environ.get("K3_FAST", "1") == "1"\n',
        repaired="\n\nIS_FAST = False\n",
    ),
)
