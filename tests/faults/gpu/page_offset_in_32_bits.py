"""A page's offset is computed in 32 bits, which a long cache exceeds."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from harness.domain.machine import Tier
from harness.faults.fault import Fault
from harness.faults.scenes import PatchScene
from tests.faults.planting import wrapped

BYTES_OF_A_PAGE = 64 * 576 * 2


def plant(is_repaired: bool) -> AbstractContextManager[None]:
    def run(sound: Callable[..., None], **args: Any) -> None:
        table = args["block_table"]
        if not is_repaired:
            wrapped_offset = (table.long() * BYTES_OF_A_PAGE) & 0x7FFFFFFF
            args["block_table"] = (wrapped_offset // BYTES_OF_A_PAGE).to(table.dtype)
        sound(**args)

    return wrapped("k3_decode.cute.mla_attend:mla_attend", run)


FAULT = Fault(
    name="page_offset_in_32_bits",
    title="A page's offset is computed in 32 bits, which a long cache exceeds.",
    report="vllm-project/vllm#52109",
    target="kernel",
    expected="kernels",
    scene=PatchScene(plant, ("kernels/mla_attend/k3/sm_90a.tp1.dcp1.b2.c1048576.",), regimes="gaussian"),
    tier=Tier.RANK,
)
