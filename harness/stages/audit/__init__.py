"""Audit: read the compiled kernels, with no GPU and no driver."""

from harness.domain.check import Check, Outcome
from harness.domain.stage import StageContext
from harness.stages.audit.judging import judge
from harness.stages.audit.planning import plan
from harness.stages.audit.sampling import sample

__all__ = ["judge", "plan", "run", "sample"]


def run(check: Check, context: StageContext) -> Outcome:
    """`sample`, then `judge`."""
    return judge(check, sample(check, context))
