"""Whether an outcome is what its own samples give.

Statuses, tiers, controls, findings and whole numbers must be the same. Other figures may differ by
`RELATIVE_TOLERANCE`, as library versions differ; numbers inside sentences by that or by one unit in the last
place that is printed.
"""

import math
import re
from collections.abc import Sequence

from harness.domain.check import Control, Figure, Finding, Outcome

__all__ = ["RELATIVE_TOLERANCE", "differences"]

RELATIVE_TOLERANCE = 1e-6
ABSOLUTE_TOLERANCE = 1e-12
"""For figures that are zero up to rounding."""
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")


def differences(stored: Outcome, again: Outcome) -> tuple[str, ...]:
    """How the stored outcome differs from the one judged again; empty where it does not."""
    found = [
        f"{name} is {getattr(stored, name)!s}, the samples give {getattr(again, name)!s}"
        for name in ("check", "status", "tier")
        if getattr(stored, name) != getattr(again, name)
    ]
    for name in ("summary", "next_step"):
        found += _text(name, getattr(stored, name), getattr(again, name))
    found += _controls(stored.control, again.control)
    found += _figures(stored.figures, again.figures)
    found += _findings(stored.findings, again.findings)
    return tuple(found)


def _controls(stored: Control | None, again: Control | None) -> list[str]:
    if stored is None or again is None:
        return [] if stored is again else [f"control is {_said(stored)}, the samples give {_said(again)}"]
    if (stored.kind, stored.failed) != (again.kind, again.failed):
        return [f"control is {_said(stored)}, the samples give {_said(again)}"]
    return [
        *_text("control.description", stored.description, again.description),
        *_text("control.observed", stored.observed, again.observed),
    ]


def _said(control: Control | None) -> str:
    return "absent" if control is None else f"{control.kind}, failed={control.failed}"


def _figures(stored: Sequence[Figure], again: Sequence[Figure]) -> list[str]:
    names, other = [f.name for f in stored], [f.name for f in again]
    if names != other:
        return [f"figures are {', '.join(names) or 'none'}; the samples give {', '.join(other) or 'none'}"]
    found = []
    for one, two in zip(stored, again, strict=True):
        for part in ("value", "low", "high"):
            a, b = getattr(one, part), getattr(two, part)
            if not _alike(a, b):
                found.append(f"figure {one.name}.{part} is {a}, the samples give {b}")
        found += _text(f"figure {one.name}.note", one.note, two.note)
        found += _text(f"figure {one.name}.missing", one.missing or "", two.missing or "")
    return found


def _findings(stored: Sequence[Finding], again: Sequence[Finding]) -> list[str]:
    if len(stored) != len(again):
        return [f"findings are {len(stored)}, the samples give {len(again)}"]
    found = []
    for place, (one, two) in enumerate(zip(stored, again, strict=True)):
        found += [
            f"finding {place + 1} ({one.rule}) has another {name} than the samples give"
            for name in ("rule", "severity", "path", "line", "excerpt", "waived", "remedy")
            if getattr(one, name) != getattr(two, name)
        ]
        found += _text(f"finding {place + 1} ({one.rule}).message", one.message, two.message)
    return found


def _text(name: str, stored: str, again: str) -> list[str]:
    if stored == again:
        return []
    numbers = list(zip(_NUMBER.findall(stored), _NUMBER.findall(again), strict=False))
    same_words = _NUMBER.sub("#", stored) == _NUMBER.sub("#", again)
    if same_words and all(_alike_printed(a, b) for a, b in numbers):
        return []
    return [f"{name} says {stored[:160]!r}, the samples give {again[:160]!r}"]


def _alike(a: float | int | None, b: float | int | None) -> bool:
    if a is None or b is None:
        return a is b
    if float(a).is_integer() and float(b).is_integer():
        return a == b
    return math.isclose(a, b, rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE)


def _alike_printed(a: str, b: str) -> bool:
    if "." not in a and "e" not in a.lower() and "." not in b and "e" not in b.lower():
        return a == b
    mantissa, _, exponent = a.lower().partition("e")
    places = len(mantissa.partition(".")[2])
    unit = 10.0 ** (int(exponent or 0) - places)
    x, y = float(a), float(b)
    return abs(x - y) <= max(1.01 * unit, RELATIVE_TOLERANCE * abs(x))
