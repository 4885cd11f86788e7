"""What every judge of an eval reads from its samples: rows, figures, the optimised path's share of the
tokens.
"""

import json
from collections.abc import Mapping, Sequence

from harness.domain.check import Check, Figure, Samples, Status
from harness.domain.record import Scalar
from harness.engines.profiled import KERNELS

__all__ = ["NEXT_STEPS", "Rows", "figure_of", "limit", "low_share", "own_kernels", "path_share", "rows_of"]

Rows = Sequence[Mapping[str, Scalar]]
NEXT_STEPS = {
    Status.FAIL: "find the op: `fasttrack kernels test`, then the poison matrix of the coverage stage",
    Status.NO_EVIDENCE: "make the optimised path run, or choose a model that solves the task",
    Status.INCONCLUSIVE: "run more items: `fasttrack run evals --full`",
    Status.INVALID: "ask both arms the same again, from a cold start each: `fasttrack run evals`",
}


def limit(check: Check, name: str, default: float) -> float:
    """A threshold, or what held before policies named it."""
    return check.number(name) if any(t.name == name for t in check.thresholds) else default


def path_share(samples: Samples) -> float | None:
    """Tokens that the optimised arm decoded on the optimised path over all that it decoded."""
    steps = [
        r for r in rows_of(samples, "steps") if r["arm"] == "optimised" and r["phase"] in ("decode", "verify")
    ]
    total = sum(int(r["tokens"] or 0) for r in steps)
    return sum(int(r["tokens"] or 0) for r in steps if r["path"] == "optimised") / total if total else None


def low_share(check: Check, share: float | None) -> str | None:
    """Why the share of the optimised path is too small to prove anything; None where it is not."""
    least = check.number("min_path_share")
    if share is None or share < least:
        return f"only {share or 0:.1%} of the tokens came from the optimised path (least {least:.0%})"
    return None


def own_kernels(samples: Samples) -> tuple[str, ...] | None:
    """Kernels that the optimised server's profiler saw and stock's did not; None where not both told any."""
    told = {r["arm"]: str(r["value"]) for r in rows_of(samples, "settings") if r["name"] == KERNELS}
    if not {"stock", "optimised"} <= told.keys():
        return None
    try:
        names = {arm: {str(row[0]) for row in json.loads(text)} for arm, text in told.items()}
    except (ValueError, TypeError, IndexError, KeyError, RecursionError):
        return ()
    return tuple(sorted(names["optimised"] - names["stock"]))


def rows_of(samples: Samples, name: str) -> Rows:
    """A table's rows; none where it is missing."""
    table = samples.table(name)
    return () if table is None else table.records()


def figure_of(name: str, value: float | None, missing: str) -> Figure:
    """A figure, or why there is none."""
    return Figure(name=name, value=value, missing=None if value is not None else missing)
