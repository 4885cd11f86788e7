"""The ledger says optimised for every step; from the fourth on stock runs."""

from tests.faults.planting import engine_fault

FAULT = engine_fault(
    "ledger_lies",
    title="The ledger says optimised for every step; from the fourth on stock runs.",
    report="NVIDIA/TensorRT-LLM#18599",
    target="dispatcher",
    at="k3_decode.engine:Engine._step",
    fault={'if decision.path == "optimised":': 'if decision.path == "optimised" and decision.step < 4:'},
    repaired={
        'if decision.path == "optimised":': 'if decision.path == "optimised" and decision.step < 2**31:'
    },
    checks=("coverage/path/{arch}.tp1.dcp1.b2.c24.d0.bf16.decode",),
    expected="coverage",
)
