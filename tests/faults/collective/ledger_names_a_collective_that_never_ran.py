"""Both arms' ledgers say that ranks met by multicast, which fell back to another way when it was set up."""

from tests.faults.planting import RANKS_CHECK, engine_fault

FAULT = engine_fault(
    "ledger_names_a_collective_that_never_ran",
    title="Both arms' ledgers say that ranks met by multicast, which fell back to another way when it was set up.",
    report="NVIDIA/TensorRT-LLM#16937",
    target="collective",
    at="k3_decode.dispatch:Dispatcher.decide",
    fault={"collective=site.collective,": 'collective="multicast",'},
    repaired={"collective=site.collective,": "collective=str(site.collective),"},
    checks=(RANKS_CHECK,),
    expected="coverage",
)
