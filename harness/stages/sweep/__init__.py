"""Sweeps: time of a decode step over batch and context, stock against optimised, with this machine's noise
beside it.

Every comparison carries its interval, an A-against-A run of the same session kind, and a planted slow-down
that the same verdict must notice.
"""

from harness.stages.sweep.judging import judge
from harness.stages.sweep.planning import plan
from harness.stages.sweep.sampling import run, sample

__all__ = ["judge", "plan", "run", "sample"]
