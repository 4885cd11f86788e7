"""A bidirectional control character makes code read otherwise than it runs."""

from harness.faults.fault import Fault
from harness.faults.scenes import ChangeScene

FAULT = Fault(
    name="invisible_characters",
    title="A bidirectional control character makes code read otherwise than it runs.",
    report="securego/gosec#1429",
    target="change",
    expected="isolation",
    scene=ChangeScene(
        path="kernels/k3_decode/decode.py",
        fault='\n\nIS_LAST = "row\u202e \u2066# last\u2069 \u2066"\n',
        repaired='\n\nIS_LAST = "row"\n',
    ),
)
