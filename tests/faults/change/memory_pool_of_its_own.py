"""The model's code sets the allocator of the whole process."""

from harness.faults.fault import Fault
from harness.faults.scenes import ChangeScene

FAULT = Fault(
    name="memory_pool_of_its_own",
    title="The model's code sets the allocator of the whole process.",
    report="NVIDIA/TensorRT-LLM#13489",
    target="change",
    expected="isolation",
    scene=ChangeScene(
        path="kernels/k3_decode/model.py",
        fault="\n\ntorch.cuda.set_per_process_memory_fraction(0.5)\n",
        repaired="\n\nMEMORY_FRACTION = 0.5\n",
    ),
)
