"""The gate: from bundles and a policy to admitted, rejected or could not judge. Pure; reads bundles only
through `load_submission`.
"""

from harness.gate.decision import decide
from harness.gate.freshness import Move
from harness.gate.submission import Submission, load_submission

__all__ = ["Move", "Submission", "decide", "load_submission"]
