"""Generated tokens by the path that produced them: what a coverage check or an eval is evidence about.

Read from the ledger's rows in the samples, which are foreign data: rows that do not fit are left out, and
samples that cannot be read count as none.
"""

from collections import Counter
from typing import NamedTuple

from harness.domain.check import Check, Samples
from harness.domain.errors import EvidenceError
from harness.report.panels.material import Material
from harness.report.text import plain

__all__ = ["Flow", "loads_of", "tokens_by_path"]

GENERATED = ("decode", "verify")
"""Phases whose tokens count: prefill always runs stock."""


class Flow(NamedTuple):
    """Tokens of one phase that took one path for one reason."""

    phase: str
    path: str
    reason: str
    tokens: int


def tokens_by_path(material: Material, check: Check, arm: str) -> tuple[Flow, ...]:
    """Generated tokens of one arm of a check, most first; empty where the samples say nothing."""
    try:
        samples = material.samples(check.id)
    except EvidenceError:
        return ()
    counts: Counter[tuple[str, str, str]] = Counter()
    for row in _steps(samples):
        tokens, phase = row.get("tokens"), row.get("phase")
        if row.get("arm") == arm and phase in GENERATED and isinstance(tokens, int) and tokens > 0:
            counts[
                plain(str(phase), 20), plain(str(row.get("path")), 20), plain(str(row.get("reason")), 60)
            ] += tokens
    return tuple(
        Flow(*key, tokens) for key, tokens in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    )


def loads_of(material: Material, check: Check, arm: str) -> tuple[tuple[int, int], ...]:
    """(requests in a step, generated tokens) of one arm of a check, small batches first."""
    try:
        samples = material.samples(check.id)
    except EvidenceError:
        return ()
    found = None if samples is None else samples.table("loads")
    counts: Counter[int] = Counter()
    for row in () if found is None else found.records():
        requests, tokens = row.get("requests"), row.get("tokens")
        is_sound = isinstance(requests, int) and isinstance(tokens, int) and requests > 0 < tokens
        if row.get("arm") == arm and row.get("phase") in GENERATED and is_sound:
            counts[int(requests or 0)] += int(tokens or 0)
    return tuple(sorted(counts.items()))


def _steps(samples: Samples | None) -> tuple[dict[str, object], ...]:
    found = None if samples is None else samples.table("steps")
    return () if found is None else tuple(dict(record) for record in found.records())
