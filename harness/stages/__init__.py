"""The six stages. Each is a package with `plan`, `sample`, `judge` and `run`; they never call each other.

`stage_of` is the one place that maps a stage's name to its functions. It imports a stage only when asked for
it, so that a bare machine needs the packages of the stages it runs and no others.
"""

from types import ModuleType
from typing import cast

from harness.domain.check import StageName
from harness.domain.stage import Stage

__all__ = ["stage_of"]


def stage_of(name: StageName) -> Stage:
    """The functions of one stage."""
    return cast("Stage", _module(name))


def _module(name: StageName) -> ModuleType:
    match name:
        case StageName.ISOLATION:
            from harness.stages import isolation

            return isolation
        case StageName.AUDIT:
            from harness.stages import audit

            return audit
        case StageName.KERNELS:
            from harness.stages import kernels

            return kernels
        case StageName.COVERAGE:
            from harness.stages import coverage

            return coverage
        case StageName.EVALS:
            from harness.stages import evals

            return evals
        case StageName.SWEEP:
            from harness.stages import sweep

            return sweep
