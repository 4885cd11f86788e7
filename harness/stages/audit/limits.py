"""What kernels may cost, as a file of the pack says it, and what a change did to it.

The file is the change's own, so that a change could loosen its limits together with its kernels. Therefore
the base's limits are read as well, wherever in the pack the base keeps them and whatever file the change
names: a limit that is looser than there fails, and says old and new. It passes, still told, where the file
itself accepts just that, with a reason (`fasttrack audit expect --accept-looser`). A kernel that the base
does not know has no older limits; it is told where it has none at all, and where kernels of the base are gone
and no new one is held to their limits (a rename, say).
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from harness.domain.change import SourceTree
from harness.domain.check import Check, Finding, Samples, SampleTable, Severity
from harness.domain.errors import EvidenceError, InputError
from harness.domain.pack import KernelVariant
from harness.domain.record import Scalar
from harness.stages.audit.cost import SHARED_LIMIT_BYTES

__all__ = [
    "ACCEPTED",
    "BASE_LIMIT_COLUMNS",
    "Loosening",
    "base_files",
    "base_limits",
    "limits_of",
    "loosened",
    "loosening_findings",
    "lost_findings",
    "lost_limits",
]

ACCEPTED = "_accepted"
"""Key of the file under which loosened limits are accepted: by kernel and limit [old, new, reason]."""
BASE_LIMIT_COLUMNS = ("limit", "value", "accepted", "reason")
UNLIMITED, GONE = "unlimited", "gone"
"""Why a kernel's limits are lost."""
MOST_NAMED = 5
"""Kernels that one finding names."""
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


@lru_cache(maxsize=2)
def base_files(tree: SourceTree, prefix: str, named: str) -> tuple[Mapping[str, Any], ...]:
    """Every file of limits that the base has under a pack's prefix, and the one that the change names."""
    found = [_file(tree.read("base", named))] if named else []
    for path in tree.paths("base"):
        if path != named and path.startswith(prefix) and path.endswith(".json"):
            try:
                file = _file(tree.read("base", path))
            except (EvidenceError, InputError):  # another kind of file, or one too large to be read
                continue
            if any(_is_entry(v) for v in file.values()) and all(
                k == ACCEPTED or not v or _is_entry(v) for k, v in file.items()
            ):
                found.append(file)
    return tuple(file for file in found if file)


def base_limits(
    files: Sequence[Mapping[str, Any]],
    head: bytes | None,
    kernel: str,
    architecture: str,
    fixed: Iterable[str],
) -> SampleTable:
    """The base's limits on a kernel, with what the head's file accepts for each: the value and the reason.

    No rows where no file of the base knows the kernel. `fixed`: limits that the policy sets.
    """
    own = _file(head)
    names = {rule: name for name, rule in RULES.items()}
    rows: list[tuple[Scalar, ...]] = []
    for rule, value in _older(files, kernel, architecture).items():
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


def lost_limits(
    files: Sequence[Mapping[str, Any]],
    own: KernelVariant,
    variants: Iterable[KernelVariant],
    architecture: str,
    fixed: Iterable[str],
) -> SampleTable | None:
    """Beside a kernel that is new to a base with limits: whether it has none, and which kernels of the base
    are gone without a new one that is held to all that they were. None where nothing is lost.
    """
    known = {name for file in files for name in file if name != ACCEPTED}
    if not known or own.name in known:
        return None
    here = {v.name: v for v in variants}
    new = [v for v in here.values() if v.name not in known and architecture in v.architectures]
    held = [dict(x) for x in {tuple(limits_of(dict(v.expected), architecture).items()) for v in new}]
    rows = [] if own.expected else [(own.name, UNLIMITED)]
    for name in sorted(known - here.keys()):
        old = {r: x for r, x in _older(files, name, architecture).items() if r not in fixed}
        if all(any(_is_looser(rule, x, limits.get(rule)) for rule, x in old.items()) for limits in held):
            rows.append((name, GONE))
    return SampleTable(name="lost_limits", columns=("kernel", "why"), rows=tuple(rows)) if rows else None


def lost_findings(samples: Samples) -> tuple[Finding, ...]:
    """Warnings of limits that the base had and that hold nothing any more."""
    table = samples.table("lost_limits")
    records = table.records() if table else ()
    unlimited, gone = ([str(r["kernel"]) for r in records if r["why"] == why] for why in (UNLIMITED, GONE))
    said = [f"the kernel {name} is new and has no limits, while the base has some" for name in unlimited]
    if gone:
        more = f" and {len(gone) - MOST_NAMED} more" if len(gone) > MOST_NAMED else ""
        names = ", ".join(gone[:MOST_NAMED]) + more
        said.append(f"no new kernel is held to the limits of those that are gone since the base: {names}")
    return tuple(
        Finding(
            rule="limits_lost",
            severity=Severity.WARNING,
            message=message,
            remedy="commit the kernel's limits: fasttrack audit expect; look at those of what it replaces",
        )
        for message in said
    )


def loosened(old: Mapping[str, int], new: Mapping[str, int]) -> Iterator[Loosening]:
    """What one kernel's entry allows that its older one did not, by architecture where either names one."""
    named = {name.split(".", 1)[0] for name in (*old, *new) if "." in name}
    for architecture in sorted(named) or [""]:
        before, after = limits_of(old, architecture), limits_of(new, architecture)
        for name, rule in RULES.items():
            if rule in before and _is_looser(rule, before[rule], after.get(rule)):
                label = f"{architecture}.{name}" if architecture else name
                yield Loosening(label, before[rule], after.get(rule))


def _older(files: Sequence[Mapping[str, Any]], kernel: str, architecture: str) -> dict[str, int]:
    """The tightest limits by rule that any file has for a kernel."""
    held: dict[str, int] = {}
    for file in files:
        for rule, value in limits_of(file[kernel], architecture).items() if kernel in file else ():
            held[rule] = (max if rule in SHRINKS else min)(value, held.get(rule, value))
    return held


def _is_entry(said: object) -> bool:
    """Whether this is a kernel's entry of a file of limits."""
    return isinstance(said, dict) and bool(said) and all(n.rsplit(".", 1)[-1] in RULES for n in said)


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
