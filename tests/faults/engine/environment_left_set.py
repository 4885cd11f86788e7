"""The fast path sets an environment variable that other components read."""

import os

from tests.faults.planting import step_fault

NAME = "NCCL_ALGO"


def set_and_unset() -> None:
    os.environ[NAME] = "Ring"
    del os.environ[NAME]


FAULT = step_fault(
    "environment_left_set",
    title="The fast path sets an environment variable that other components read.",
    report="NVIDIA/TensorRT-LLM#16937",
    fault=lambda _: os.environ.update({NAME: "Ring"}),
    repaired=lambda _: set_and_unset(),
    undo=lambda: os.environ.pop(NAME, None),
)
