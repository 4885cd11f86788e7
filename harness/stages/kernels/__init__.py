"""Kernels: each op against its float64 oracle, together with stock, over the edges of the claim's envelope.

Planning and judging load no torch; sampling does when it is first asked for.
"""

from harness.domain.check import Check, Outcome, Samples
from harness.domain.stage import StageContext
from harness.stages.kernels.judging import judge
from harness.stages.kernels.planning import plan

__all__ = ["judge", "plan", "run", "sample"]


def sample(check: Check, context: StageContext) -> Samples:
    """Run the op; see `sampling`."""
    from harness.stages.kernels import sampling

    return sampling.sample(check, context)


def run(check: Check, context: StageContext) -> Outcome:
    """`sample`, then `judge`."""
    return judge(check, sample(check, context))
