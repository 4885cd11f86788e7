"""The ledger says that one rank ran a step that two shared."""

from tests.faults.planting import RANKS_CHECK, engine_fault

FAULT = engine_fault(
    "ledger_names_one_rank",
    title="The ledger says that one rank ran a step that two shared.",
    report="NVIDIA/TensorRT-LLM#18599",
    target="dispatcher",
    at="k3_decode.dispatch:Dispatcher.decide",
    fault={"tp=site.tp,": "tp=1,"},
    repaired={"tp=site.tp,": "tp=int(site.tp),"},
    checks=(RANKS_CHECK,),
    expected="coverage",
)
