"""The candidate replaces the checker's measure of errors with one that finds none."""

from collections.abc import Callable
from typing import Any

from harness.measure import trial
from harness.measure.tensors import TokenError
from tests.faults.planting import engine_fault, kernel_checks

SOUND = trial.token_errors
OP = "projection"


def tamed(*args: Any) -> tuple[TokenError, ...]:
    return tuple(TokenError(0.0, 0.0, e.ulp, e.least) for e in SOUND(*args))


def fault(sound: Callable[..., None], **args: Any) -> None:
    trial.token_errors = tamed
    sound(**args)


def repaired(sound: Callable[..., None], **args: Any) -> None:
    trial.token_errors = SOUND
    sound(**args)


def undo() -> None:
    trial.token_errors = SOUND


FAULT = engine_fault(
    "tolerance_patched",
    title="The candidate replaces the checker's measure of errors with one that finds none.",
    report="ScalingIntelligence/KernelBench#82",
    at=f"k3_decode.cpu.{OP}:{OP}",
    fault=fault,
    repaired=repaired,
    undo=undo,
    checks=kernel_checks(OP),
    expected="kernels",
    target="op",
)
