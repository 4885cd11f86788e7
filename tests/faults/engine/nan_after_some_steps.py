"""Deep into a generation one op starts to give NaN, always at the same step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from harness.faults.fault import Fault
from harness.faults.scenes import PatchScene
from tests.faults.planting import PATH_CHECK, wrapped

CALLS = 80
"""Of the experts: five layers a step, so that the short coverage check is over before."""


@contextmanager
def plant(is_repaired: bool) -> Iterator[None]:
    calls = 0

    def run(sound: Callable[..., None], **args: Any) -> None:
        nonlocal calls
        calls += 1
        sound(**args)
        if calls > CALLS and not is_repaired:
            args["out"][0] = float("nan")

    with wrapped("k3_decode.cpu.experts:experts", run):
        yield


FAULT = Fault(
    name="nan_after_some_steps",
    title="Deep into a generation one op starts to give NaN, always at the same step.",
    report="vllm-project/vllm#57716",
    target="op",
    expected="evals",
    scene=PatchScene(plant, ("evals/drift", PATH_CHECK)),
)
