"""An architecture that was only compiled for, never run, takes the fast path."""

from tests.faults.planting import engine_fault

FAULT = engine_fault(
    "compiled_only_architecture_taken",
    title="An architecture that was only compiled for, never run, takes the fast path.",
    report="NVIDIA/TensorRT-LLM#18599",
    target="dispatcher",
    at="k3_decode.dispatch:Dispatcher._reason",
    fault={'level == "compiled"': 'level == "nothing"'},
    repaired={'level == "compiled"': 'level != "dispatched" and level is not None'},
    checks=("kernels/router/guard/cpu", "coverage/path/{arch}.tp1.dcp1.b2.c24.d0.bf16.decode"),
    expected="kernels",
)
