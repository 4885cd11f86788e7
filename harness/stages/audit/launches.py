"""What a kernel is launched with over the whole envelope, checked against what the architecture takes.

A compile leaves each dimension of a grid as a formula over the sizes of the kernel's arguments (postfix,
such as `prefix.0 7 *`); the claim bounds those sizes. A formula is evaluated over their ranges at once: the
least and the largest value, and a number that divides every value. Sizes are never negative and the
operations never fall where an operand grows (`-` takes the far ends), so the ranges hold every cell of the
envelope. What cannot be bounded is counted, and never passes.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from harness.domain.check import Finding, Severity
from harness.domain.record import Scalar

__all__ = [
    "LAUNCH_COLUMNS",
    "LAUNCH_RULES",
    "Extent",
    "extent",
    "launch_findings",
    "launch_row",
    "planted_launches",
]

LAUNCH_COLUMNS = (
    "subject", "grid_x", "grid_y", "grid_z", "cluster_x", "cluster_y", "cluster_z", "is_cooperative",
)  # fmt: skip
GRID_LIMITS = {"x": 2**31 - 1, "y": 65535, "z": 65535}
"""Most blocks along each axis (CUDA C++ Programming Guide 13, "Technical Specifications per Compute
Capability").
"""
PORTABLE_CLUSTER = 8
"""Most blocks of a cluster that every GPU holds (CUDA C++ Programming Guide 13, "Thread Block Clusters")."""
LAUNCH_RULES: Mapping[str, tuple[str, str]] = {
    "grid": (
        "its grid has {low} to {high} blocks along {axis} ({formula}); a launch takes 1 to {limit}",
        "launch fewer blocks with more work each, or narrow the claim",
    ),
    "grid_cluster": (
        "its grid along {axis} ({formula}) is no multiple of its clusters' {limit} blocks in every cell",
        "round the grid up to whole clusters; such a launch fails",
    ),
    "cluster_limit": (
        "its clusters have {high} blocks; any GPU of the architecture holds {limit}",
        "use clusters of at most 8 blocks",
    ),
}
"""By rule: what is wrong, and what to do."""


class Extent(NamedTuple):
    """Every value that a size may have."""

    low: int
    high: int
    divisor: int
    """Divides each of them."""


def launch_row(subject: str, record: Mapping[str, Any], parameters: Sequence[str]) -> tuple[Scalar, ...]:
    """One launch of a compile's record as a row, with arguments by their names."""
    grid = record.get("grid") or (None, None, None)
    named = [None if formula is None else _named(formula, parameters) for formula in grid]
    return (subject, *named, *record["cluster"], bool(record.get("is_cooperative")))


def extent(formula: str | None, sizes: Mapping[str, tuple[int, int]]) -> Extent | None:
    """All values of a formula; None where it, or a size in it, is not known."""
    stack: list[Extent] = []
    for word in (formula or "").split():
        if word.isdigit():
            stack.append(Extent(int(word), int(word), int(word)))
        elif word in sizes:
            low, high = sizes[word]
            stack.append(Extent(low, high, low if low == high else 1))
        elif word in ("+", "-", "*", "/", "%", "min", "max") and len(stack) >= 2:
            right, left = stack.pop(), stack.pop()
            made = _combined(word, left, right)
            if made is None:
                return None
            stack.append(made)
        else:
            return None
    return stack[0] if len(stack) == 1 else None


def launch_findings(
    rows: Sequence[Mapping[str, Any]], sizes: Mapping[str, tuple[int, int]]
) -> tuple[tuple[Finding, ...], int]:
    """(what is wrong with launches, how many of their dimensions cannot be bounded). No launch at all counts
    as one, and so does a cooperative one: how many blocks must fit at once depends on the GPU.
    """
    found: list[Finding] = []
    unknown = 0 if rows else 1
    for row in rows:
        clusters = [int(row[f"cluster_{axis}"]) for axis in "xyz"]
        if math.prod(clusters) > PORTABLE_CLUSTER:
            found.append(_finding("cluster_limit", high=math.prod(clusters), limit=PORTABLE_CLUSTER))
        unknown += row["is_cooperative"] is True
        for axis, cluster in zip("xyz", clusters, strict=True):
            formula = row[f"grid_{axis}"]
            size = extent(formula, sizes)
            if size is None:
                unknown += 1
                continue
            words = {"axis": axis, "formula": formula, "low": size.low, "high": size.high}
            if size.low < 1 or size.high > GRID_LIMITS[axis]:
                found.append(_finding("grid", **words, limit=GRID_LIMITS[axis]))
            if size.divisor % cluster:
                found.append(_finding("grid_cluster", **words, limit=cluster))
    return tuple(found), unknown


def planted_launches() -> tuple[tuple[Scalar, ...], ...]:
    """Launches with a planted fault and their repaired twins, as rows of the control's table."""
    sizes = {"x.0": (1, 64), "rows.0": (16, 163840)}
    cases = (
        ("grid_too_tall.fault", "grid", ("1", "x.0 1024 *", "1"), 1),
        ("grid_too_tall.fixed", "clean", ("x.0 1024 *", "1", "1"), 1),
        ("grid_empty.fault", "grid", ("x.0 64 /", "1", "1"), 1),
        ("grid_empty.fixed", "clean", ("x.0 63 + 64 /", "1", "1"), 1),
        ("grid_splits_a_cluster.fault", "grid_cluster", ("rows.0 63 + 64 /", "1", "1"), 4),
        ("grid_splits_a_cluster.fixed", "clean", ("rows.0 63 + 64 / 4 *", "1", "1"), 4),
        ("cluster_of_sixteen.fault", "cluster_limit", ("x.0 16 *", "1", "1"), 16),
        ("cluster_of_sixteen.fixed", "clean", ("x.0 8 *", "1", "1"), 8),
        ("grid_unknown.fault", "unknown", ("a9 4 *", "1", "1"), 1),
        ("grid_unknown.fixed", "clean", ("x.0 4 *", "1", "1"), 1),
    )  # fmt: skip
    rows: list[tuple[Scalar, ...]] = []
    for name, expected, grid, cluster in cases:
        launch = dict(zip(LAUNCH_COLUMNS, ("planted", *grid, cluster, 1, 1, False), strict=True))
        found, unknown = launch_findings([launch], sizes)
        said = ", ".join([*(f.rule for f in found), *(["unknown"] if unknown else [])]) or "clean"
        rows.append((name, "launch", expected, said, said == expected))
    return tuple(rows)


def _named(formula: str, parameters: Sequence[str]) -> str:
    """The formula with `a<i>` as the name of tensor i; an argument behind the tensors keeps its number."""

    def word(text: str) -> str:
        ordinal, dot, rest = text[1:].partition(".")
        is_tensor = text[:1] == "a" and ordinal.isdigit() and int(ordinal) < len(parameters)
        return f"{parameters[int(ordinal)]}{dot}{rest}" if is_tensor else text

    return " ".join(word(text) for text in formula.split())


def _combined(sign: str, left: Extent, right: Extent) -> Extent | None:
    """Every value of one operation on any two values; None for a division that may be by 0."""
    match sign:
        case "+":
            return Extent(left.low + right.low, left.high + right.high, math.gcd(left.divisor, right.divisor))
        case "-":
            divisor = math.gcd(left.divisor, right.divisor)
            return Extent(max(0, left.low - right.high), max(0, left.high - right.low), divisor)
        case "*":
            return Extent(left.low * right.low, left.high * right.high, left.divisor * right.divisor)
        case "/" if right.low > 0:
            low, high = left.low // right.high, left.high // right.low
            return Extent(low, high, low if low == high else 1)
        case "%" if right.low > 0:
            return Extent(0, min(left.high, right.high - 1), 1)
        case "min":
            divisor = math.gcd(left.divisor, right.divisor)
            return Extent(min(left.low, right.low), min(left.high, right.high), divisor)
        case "max":
            divisor = math.gcd(left.divisor, right.divisor)
            return Extent(max(left.low, right.low), max(left.high, right.high), divisor)
    return None


def _finding(rule: str, **words: object) -> Finding:
    what, remedy = LAUNCH_RULES[rule]
    return Finding(rule=rule, severity=Severity.ERROR, message=what.format(**words), remedy=remedy)
