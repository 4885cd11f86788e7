"""The fast path draws from the process's random numbers, so sampling changes for everybody."""

import torch

from tests.faults.planting import step_fault

OWN = torch.Generator().manual_seed(0)

FAULT = step_fault(
    "random_state_consumed",
    title="The fast path draws from the process's random numbers, so sampling changes for everybody.",
    report="vllm-project/vllm#48613",
    fault=lambda _: torch.rand(1),
    repaired=lambda _: torch.rand(1, generator=OWN),
)
