"""The two arms of a comparison run on different collectives, as each was placed on other nodes."""

from tests.faults.planting import PATH_CHECK, engine_fault

FAULT = engine_fault(
    "arms_use_different_collectives",
    title="The two arms of a comparison run on different collectives, as each was placed on other nodes.",
    report="NVIDIA/TensorRT-LLM#16937",
    target="collective",
    at="k3_decode.dispatch:Dispatcher.decide",
    fault={"collective=site.collective,": 'collective="multicast" if is_taken else "ring",'},
    repaired={"collective=site.collective,": "collective=str(site.collective),"},
    checks=(PATH_CHECK,),
    expected="coverage",
)
