"""Isolation: what a change touches and reaches, judged from git and syntax trees.

Invariant: a PASS says that a planted violation of each rule was caught by the same code that found none in
the change. State that the optimised path writes at run time is the coverage stage's business.
"""

from harness.stages.isolation.judging import judge
from harness.stages.isolation.planning import plan
from harness.stages.isolation.sampling import run, sample

__all__ = ["judge", "plan", "run", "sample"]
