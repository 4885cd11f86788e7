"""The six stages. Each is a package with `plan`, `sample`, `judge` and `run`; they never call each other.

`stage_of` is the one place that maps a stage's name to its functions. It imports a stage only when asked for it, so that a
bare machine needs the packages of the stages it runs and no others.
"""

from typing import cast

from harness.domain.check import StageName
from harness.domain.stage import Stage

__all__ = ["stage_of"]


def stage_of(name: StageName) -> Stage:
    """The functions of one stage."""
    match name:
        case StageName.ISOLATION:
            from harness.stages import isolation as module
        case StageName.AUDIT:
            from harness.stages import audit as module
        case StageName.KERNELS:
            from harness.stages import kernels as module
        case StageName.COVERAGE:
            from harness.stages import coverage as module
        case StageName.EVALS:
            from harness.stages import evals as module
        case StageName.SWEEP:
            from harness.stages import sweep as module
    return cast("Stage", module)
