"""One op of the fast path is done by a stock product, and its counter is kept up."""

from typing import Any

import torch

from tests.faults.planting import PATH_CHECK, engine_fault


def beside(sound: Any, chain: Any, op: str, **arguments: Any) -> None:
    sound(chain, op, **arguments)
    if op == "attn_res":
        torch.nn.functional.linear(arguments["out"], arguments["out"])


def alone(sound: Any, chain: Any, op: str, **arguments: Any) -> None:
    sound(chain, op, **arguments)


FAULT = engine_fault(
    "stock_kernel_inside_the_path",
    title="One op of the fast path is done by a stock product, and its counter is kept up.",
    report="NVIDIA/TensorRT-LLM#18599",
    target="dispatcher",
    at="k3_decode.layers:LayerChain.run",
    fault=beside,
    repaired=alone,
    checks=(PATH_CHECK,),
)
