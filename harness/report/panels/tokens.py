"""Generated tokens by the path that produced them: what a coverage check or an eval is evidence about.

Read from the ledger's rows in the samples, which are foreign data: rows that do not fit are left out, and
samples that cannot be read count as none.
"""

from collections import Counter
from typing import NamedTuple

from harness.domain.cell_tokens import GENERATED
from harness.domain.check import Check
from harness.domain.errors import EvidenceError
from harness.domain.record import Scalar
from harness.report.panels.material import Material
from harness.report.text import plain

__all__ = ["Flow", "loads_of", "records_of", "tokens_by_path"]


class Flow(NamedTuple):
    """Tokens of one phase that took one path for one reason."""

    phase: str
    path: str
    reason: str
    tokens: int


def tokens_by_path(material: Material, check: Check, arm: str) -> tuple[Flow, ...]:
    """Generated tokens of one arm of a check, most first; empty where the samples say nothing."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for row in records_of(material, check, "steps"):
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
    counts: Counter[int] = Counter()
    for row in records_of(material, check, "loads"):
        requests, tokens = row.get("requests"), row.get("tokens")
        is_sound = isinstance(requests, int) and isinstance(tokens, int) and requests > 0 < tokens
        if row.get("arm") == arm and row.get("phase") in GENERATED and is_sound:
            counts[int(requests or 0)] += int(tokens or 0)
    return tuple(sorted(counts.items()))


def records_of(material: Material, check: Check, name: str) -> tuple[dict[str, Scalar], ...]:
    """Rows of one of a check's tables; none where the samples cannot be read or have no such table."""
    try:
        samples = material.samples(check.id)
    except EvidenceError:
        return ()
    found = None if samples is None else samples.table(name)
    return () if found is None else tuple(found.records())
