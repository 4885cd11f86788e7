"""Evals: the model's answers, stock against optimised, paired, with the share of tokens that the optimised
path produced.

`drift` compares teacher-forced log-probabilities with a float64 oracle and needs no right answers; the pack's
embedded tasks are answered by its canary model. A score without path share is no evidence, whatever it is.
"""

from harness.stages.evals.judging import judge
from harness.stages.evals.planning import plan
from harness.stages.evals.sampling import run, sample

__all__ = ["judge", "plan", "run", "sample"]
