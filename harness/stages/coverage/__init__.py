"""Coverage: proof that the optimised path ran, and that what claims to cover an op would notice it being
wrong.

Three witnesses must agree: the dispatcher's ledger, the kernels' own launch counters, and the manifest of
launches that the pack states for a step. Controls: the switch off, each op poisoned, a planted write.
"""

from harness.stages.coverage.judging import judge
from harness.stages.coverage.planning import plan
from harness.stages.coverage.sampling import run, sample

__all__ = ["judge", "plan", "run", "sample"]
