"""What kernels may cost, as a file of the pack says it, and what a change did to it.

The file is the change's own, so that a change could loosen its limits together with its kernels. Therefore
the base's file is read as well: a limit that is looser than there fails, and says old and new. It passes,
still told, where the file itself accepts just that, with a reason (`fasttrack audit expect --accept-looser`).
A kernel that the base does not know has no older limits.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from harness.domain.check import Check, Finding, Samples, SampleTable, Severity
from harness.domain.errors import EvidenceError
from harness.domain.record import Scalar
from harness.stages.audit.cost import SHARED_LIMIT_BYTES

__all__ = [
    "ACCEPTED",
    "BASE_LIMIT_COLUMNS",
    "Loosening",
    "base_limits",
    "limits_of",
    "loosened",
    "loosening_findings",
]

ACCEPTED = "_accepted"
"""Key of the file under which loosened limits are accepted: by kernel and limit [old, new, reason]."""
BASE_LIMIT_COLUMNS = ("limit", "value", "accepted", "reason")
SHRINKS = frozenset({"wide_loads", "min_wide_loads_percent"})
"""Limits that are a least value; the others are a most."""
RULES = {
    "spill_bytes": "spill", "max_registers": "registers", "max_shared_bytes": "shared_memory",
    "max_multicast": "multicast", "min_wide_loads_percent": "wide_loads",
}  # fmt: skip
"""Limits by their name in the file, as the check's thresholds are named."""
UNSAID = {"spill_bytes": 0, "max_shared_bytes": SHARED_LIMIT_BYTES, "max_multicast": 0}
"""What holds where the file says nothing; no limit where this says nothing either."""


class Loosening(NamedTuple):
    """A limit that became looser."""

    limit: str
    """As the file names it, with its architecture where it has one."""
    old: int
    new: int | None
    """None: there is no limit any more."""


def limits_of(expected: Mapping[str, int], architecture: str) -> dict[str, int]:
    """Limits by rule from one kernel's entry: those of the architecture (`sm_90a.max_registers`) before
    general ones.
    """
    said = {name: expected.get(f"{architecture}.{name}", expected.get(name)) for name in RULES}
    held = {name: UNSAID.get(name) if value is None else value for name, value in said.items()}
    limits = {RULES[name]: value for name, value in held.items() if value is not None}
    return limits | {"shared_memory": min(limits["shared_memory"], SHARED_LIMIT_BYTES)}


def base_limits(
    base: bytes | None, head: bytes | None, kernel: str, architecture: str, fixed: Iterable[str]
) -> SampleTable:
    """The base's limits on a kernel, with what the head's file accepts for each: the value and the reason.

    No rows where the base has no file or does not know the kernel. `fixed`: limits that the policy sets.
    """
    file, own = _file(base), _file(head)
    if kernel not in file:
        return SampleTable(name="base_limits", columns=BASE_LIMIT_COLUMNS, rows=())
    names = {rule: name for name, rule in RULES.items()}
    rows: list[tuple[Scalar, ...]] = []
    for rule, value in limits_of(file[kernel], architecture).items():
        if rule in fixed:
            continue
        rows.append(
            (rule, value, *_accepted(own, kernel, (f"{architecture}.{names[rule]}", names[rule]), value))
        )
    return SampleTable(name="base_limits", columns=BASE_LIMIT_COLUMNS, rows=tuple(rows))


def loosening_findings(check: Check, samples: Samples) -> tuple[Finding, ...]:
    """A finding for each limit of the check that is looser than the base's: a warning where that is accepted,
    an error where not.
    """
    table = samples.table("base_limits")
    found = []
    set_here = {t.name for t in check.thresholds}
    for row in table.records() if table else ():
        rule, old = str(row["limit"]), int(row["value"] or 0)
        new = int(check.number(rule)) if rule in set_here else None
        if not _is_looser(rule, old, new):
            continue
        is_accepted = bool(str(row["reason"] or "").strip()) and row["accepted"] == new
        said = f"the limit {rule} was {old} at the base and is {'gone' if new is None else new} now"
        if is_accepted:
            said += f"; accepted in {dict(check.parameters).get('limits_file')}: {row['reason']}"
        found.append(
            Finding(
                rule="limit_loosened",
                severity=Severity.WARNING if is_accepted else Severity.ERROR,
                message=said,
                remedy="mend the kernel, or accept it: fasttrack audit expect --accept-looser REASON",
            )
        )
    return tuple(found)


def loosened(old: Mapping[str, int], new: Mapping[str, int]) -> Iterator[Loosening]:
    """What one kernel's entry allows that its older one did not, by architecture where either names one."""
    named = {name.split(".", 1)[0] for name in (*old, *new) if "." in name}
    for architecture in sorted(named) or [""]:
        before, after = limits_of(old, architecture), limits_of(new, architecture)
        for name, rule in RULES.items():
            if rule in before and _is_looser(rule, before[rule], after.get(rule)):
                label = f"{architecture}.{name}" if architecture else name
                yield Loosening(label, before[rule], after.get(rule))


def _is_looser(rule: str, old: int, new: int | None) -> bool:
    return new is None or (new < old if rule in SHRINKS else new > old)


def _accepted(
    file: Mapping[str, Any], kernel: str, names: Iterable[str], old: int
) -> tuple[int | None, str | None]:
    """(value, reason) that a file accepts in place of an older one, as far as it is well formed."""
    accepted = file.get(ACCEPTED)
    own = accepted.get(kernel) if isinstance(accepted, dict) else None
    for name in names:
        match own.get(name) if isinstance(own, dict) else None:
            case [int(before), int() | None as new, str(reason)] if before == old and reason.strip():
                return new, reason
    return None, None


@lru_cache(maxsize=4)
def _file(content: bytes | None) -> Mapping[str, Any]:
    """A file of limits; nothing where there is none. Raises `EvidenceError` for one that is none."""
    try:
        found = {} if content is None else json.loads(content)
        return {k: v if k == ACCEPTED else {n: int(x) for n, x in v.items()} for k, v in found.items()}
    except (AttributeError, RecursionError, TypeError, ValueError) as error:
        raise EvidenceError(f"the file of a pack's limits does not hold any: {error}") from error
