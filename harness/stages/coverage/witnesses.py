"""What ledger, launch counters and traces say of an arm, read from sample tables. Pure.

Three witnesses must agree on every traced step and op: the ledger (which steps took the path, and so how many
kernels the manifest declares), the counters in the kernels themselves, and the trace. A trace that is blind,
or that shows fewer kernels than counters and manifest agree on, is no evidence; any other difference means
that something else ran.
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from harness.domain.check import Check, Figure, Samples, Status
from harness.domain.record import Scalar

__all__ = [
    "GENERATED", "KL_FLOOR", "Rows", "Witness", "arm_rows", "compare_builds", "compare_collectives", "figure",
    "has_pair", "kernels_differ", "launches_per_step", "ledger_objection", "median_kl", "records", "show",
    "step_rows", "traced", "witness", "worst_kl",
]  # fmt: skip

KL_FLOOR = 1e-9
"""Nats. Below this two fp32 softmaxes over a few hundred tokens cannot be told apart."""
GENERATED = ("decode", "verify")
MAX_NAMED = 4
Rows = Sequence[Mapping[str, Scalar]]


class Witness(NamedTuple):
    """What one arm's witnesses say together."""

    status: Status
    words: str
    share: float | None
    tokens: int = 0
    """Generated on the optimised path."""


def witness(samples: Samples, arm: str, least_share: float, least_tokens: int = 0) -> Witness:
    """Ledger share, then counters against the manifest, then the trace, if there is one."""
    steps = step_rows(samples, arm, decode_only=True)
    tokens = sum(int(row["tokens"] or 0) for row in steps)
    optimised = sum(int(row["tokens"] or 0) for row in steps if row["path"] == "optimised")
    launches = arm_rows(samples, "launches", arm)
    wrong = [row for row in launches if row["counted"] != row["expected"]]
    counted = sum(int(row["counted"] or 0) for row in launches)
    if tokens == 0:
        return Witness(Status.NO_EVIDENCE, "the ledger holds no decode step", None)
    share = optimised / tokens
    if wrong:
        row = wrong[0]
        words = f"the manifest says {row['expected']} launches of {row['op']}, counted {row['counted']}"
        return Witness(Status.FAIL, words, share, optimised)
    if share < least_share or counted == 0 or optimised < least_tokens:
        reasons = sorted({str(row["reason"]) for row in steps if row["path"] != "optimised"})
        few = f", fewer than the {least_tokens} that this cell must hold" if optimised < least_tokens else ""
        words = (
            f"{share:.1%} of {tokens} tokens took the optimised path{few}, {counted} launches"
            f"{' (declined: ' + ', '.join(reasons) + ')' if reasons else ''}"
        )
        return Witness(Status.NO_EVIDENCE, words, share, optimised)
    words = f"{share:.1%} of {tokens} tokens on the optimised path, {counted} launches as the manifest says"
    if not arm_rows(samples, "traces", arm):
        return Witness(Status.PASS, words, share, optimised)
    status, said = traced(samples, arm)
    return Witness(status, f"{words}; {said}" if status is Status.PASS else said, share, optimised)


def traced(samples: Samples, arm: str) -> tuple[Status, str]:
    """What the trace adds: every kernel of every traced step against manifest and counters."""
    (row,) = arm_rows(samples, "traces", arm)
    if row["blind"]:
        return Status.NO_EVIDENCE, f"the trace proves nothing: {row['blind']}"
    kernels = arm_rows(samples, "kernels", arm)
    if not kernels:
        return Status.NO_EVIDENCE, "the trace holds no kernel of the arm"
    lost = [k for k in kernels if _is_lost(k)]
    wrong = list(_differences([k for k in kernels if k not in lost]))
    is_graph = any(bool(s["is_graph"]) for s in step_rows(samples, arm, decode_only=True))
    outside = [k for k in kernels if is_graph and k["place"] == "eager" and k["op"] and k["seen"]]
    if outside:
        wrong.append(f"{outside[0]['op']} ran outside the graph that the ledger names")
    if wrong:
        more = f" (and {len(wrong) - MAX_NAMED} more)" if len(wrong) > MAX_NAMED else ""
        return (
            Status.FAIL,
            f"the kernels that ran are not those declared: {'; '.join(wrong[:MAX_NAMED])}{more}",
        )
    if lost:
        k = lost[0]
        return (
            Status.NO_EVIDENCE,
            f"the trace lost events: {k['op']} was seen {k['seen']} times in step {k['step']}, while "
            f"manifest and counters say {k['declared']}",
        )
    seen = sum(int(k["seen"] or 0) for k in kernels if k["op"])
    return Status.PASS, f"{seen} kernels in {row['steps']} traced steps, each one declared and counted"


def kernels_differ(samples: Samples) -> bool:
    """Whether the two arms ran unlike kernels; untraced arms differ in their launches."""
    if not arm_rows(samples, "traces", "on") or not arm_rows(samples, "traces", "off"):
        return _launched(samples, "on") != _launched(samples, "off")
    return _seen(samples, "on") != _seen(samples, "off")


def compare_builds(samples: Samples, is_one_build: bool = True) -> str:
    """What makes the arms no fair comparison of builds; empty where nothing does.

    One build with a switch: equal digests, unlike kernels. Two builds: unlike digests.
    """
    digests = {str(row["arm"]): str(row["digest"]) for row in records(samples, "builds")}
    if set(digests) != {"on", "off"}:
        return "the samples do not say which build ran each arm"
    is_equal = digests["on"] == digests["off"]
    if is_one_build and not is_equal:
        return "the arms are one build with a switch, and their code differs"
    if not is_one_build and is_equal:
        return "the arms should be two builds, and their code is the same"
    return ""


def compare_collectives(samples: Samples) -> str:
    """Unlike collectives of the two arms in generated steps, in words; empty where they are alike."""
    by_arm = {
        arm: {str(row["collective"]) for row in step_rows(samples, arm, decode_only=True)}
        for arm in ("on", "off")
    }
    if not by_arm["on"] or not by_arm["off"] or by_arm["on"] == by_arm["off"]:
        return ""
    on, off = (", ".join(sorted(by_arm[arm])) for arm in ("on", "off"))
    return f"the optimised arm's ranks met by {on}, stock's by {off}"


def ledger_objection(check: Check, samples: Samples) -> str:
    """What the ledger says of a generated step that is not what was asked of it; empty where nothing is.

    The harness drove the steps itself, so it knows every column; how ranks met, the manifest and the trace
    know.
    """
    cell = check.cell
    if cell is None:
        return "the check has no cell to hold the ledger against"
    rows = cell.drafts + 1
    asked: dict[str, Scalar] = {
        "phase": cell.phase, "requests": cell.batch, "rows": rows, "tokens": cell.rows, "tp": cell.tp,
        "dcp": cell.dcp, "drafts": cell.drafts, "is_graph": check.parameter("implementation") == "cute",
    }  # fmt: skip
    for number, step in enumerate(step_rows(samples, "on", decode_only=True), 1):
        length = cell.context + number * rows
        wanted = {**asked, "context_min": length, "context_max": length}
        for name, value in wanted.items():
            if step[name] != value:
                return f"the ledger says {name} {step[name]} of step {step['step']}, which had {value}"
    words = {str(row["collective"]) for row in step_rows(samples, "on", decode_only=True)}
    if ("none" in words) != (cell.tp * cell.dcp == 1):
        said = ", ".join(sorted(words))
        return f"the ledger says that ranks met by {said}, and the cell has {cell.tp * cell.dcp}"
    ran = {str(row["collective"]) for row in arm_rows(samples, "traces", "on")} - {""}
    if ran and ran != words:
        said, seen = (", ".join(sorted(each)) for each in (words, ran))
        return f"the ledger says that ranks met by {said}, and the kernels that ran are those of {seen}"
    return ""


def step_rows(samples: Samples, arm: str, *, decode_only: bool) -> Rows:
    """The ledger of an arm."""
    rows = arm_rows(samples, "steps", arm)
    return [row for row in rows if row["phase"] in GENERATED] if decode_only else rows


def arm_rows(samples: Samples, table: str, arm: str) -> Rows:
    """An arm's rows of a table."""
    return [row for row in records(samples, table) if row["arm"] == arm]


def records(samples: Samples, table: str) -> Rows:
    """All rows of a table; none where it is not there."""
    found = samples.table(table)
    return [] if found is None else found.records()


def worst_kl(samples: Samples, pair: str) -> float | None:
    """Largest KL of a pair of arms; None when any position is not finite or there is none."""
    kls = _kls(samples, pair)
    return None if kls is None else max(kls)


def has_pair(samples: Samples, pair: str) -> bool:
    """Whether a pair of arms was compared at all: a control without rows is no control."""
    return any(row["pair"] == pair for row in records(samples, "divergence"))


def median_kl(samples: Samples, pair: str) -> float | None:
    """Median KL of a pair of arms; None when any position is not finite or there is none.

    The median, because two sound paths of a model with routed experts differ by whole nats at few positions
    where rounding turns a near tie of the router; an error of an op moves every position.
    """
    kls = _kls(samples, pair)
    return None if kls is None else median(kls)


def launches_per_step(samples: Samples, arm: str) -> float | None:
    """Counted launches of an optimised step."""
    steps = [row for row in step_rows(samples, arm, decode_only=True) if row["path"] == "optimised"]
    if not steps:
        return None
    return sum(int(row["counted"] or 0) for row in arm_rows(samples, "launches", arm)) / len(steps)


def figure(name: str, value: float | None, missing: str, note: str = "") -> Figure:
    """A figure that may be missing."""
    return Figure(name=name, value=value, missing=None if value is not None else missing, note=note)


def show(value: float | None) -> str:
    """A KL in words."""
    return "not finite" if value is None else f"{value:.3g}"


def _differences(kernels: Rows) -> Iterator[str]:
    for k in kernels:
        seen, declared, counted = k["seen"], k["declared"], k["counted"]
        at = f"in step {k['step']}"
        if not k["op"] and seen:
            yield f"{k['name']} ran {seen} times {at}, a kernel that the path does not declare"
        elif seen != declared and not declared:
            yield f"{k['op']} ran {seen} times {at} where none is declared"
        elif seen != declared:
            yield f"{k['op']} was seen {seen} times {at}, declared {declared}"
        elif counted is not None and counted != declared:
            yield f"{k['op']} counted {counted} launches {at}, seen and declared {declared}"


def _is_lost(k: Mapping[str, Scalar]) -> bool:
    """Fewer seen than manifest and counters agree on."""
    seen, declared, counted = int(k["seen"] or 0), int(k["declared"] or 0), k["counted"]
    return counted is not None and seen < declared == counted


def _seen(samples: Samples, arm: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for k in arm_rows(samples, "kernels", arm):
        if k["seen"]:
            found[str(k["op"] or k["name"])] = found.get(str(k["op"] or k["name"]), 0) + int(k["seen"] or 0)
    return found


def _launched(samples: Samples, arm: str) -> dict[str, int]:
    rows = arm_rows(samples, "launches", arm)
    return {str(row["op"]): int(row["counted"] or 0) for row in rows if row["counted"]}


def _kls(samples: Samples, pair: str) -> list[float] | None:
    kls = [row["kl"] for row in records(samples, "divergence") if row["pair"] == pair]
    if not kls or any(kl is None for kl in kls):
        return None
    return [float(kl) for kl in kls if kl is not None]
