"""The model's code runs text that it builds at run time."""

from harness.faults.fault import Fault
from harness.faults.scenes import ChangeScene

FAULT = Fault(
    name="code_from_text",
    title="The model's code runs text that it builds at run time.",
    report="ScalingIntelligence/KernelBench#82",
    target="change",
    expected="isolation",
    scene=ChangeScene(
        path="kernels/k3_decode/decode.py",
        fault='\n\nexec("import" + " os")\n',
        repaired="\n\nimport math\n",
    ),
)
