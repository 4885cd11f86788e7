"""How a layer's concurrent pieces share a GPU, as a table: one entry a batch bucket and width of the shared
expert's shard, each from a measurement (README.md). Chain, step counts and manifest read it, so that none of
them restates it.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal, get_args

__all__ = ["AHEAD", "FILE", "Overlap", "Place", "Schedule", "aside_from", "overlap_of", "places_of", "read"]

FILE = Path(__file__).with_name("sm_90a.json")
Place = Literal["along", "aside", "narrow", "narrow_down"]
"""Where the shared expert runs: `along` with the MoE front and a projection, `aside` on a stream of its own
beside front, router and experts; `narrow` on that stream by a few multiprocessors alone; `narrow_down` along
with the front but for its down-projection, which is narrow."""
AHEAD = ("front", "tail", "in_proj")
"""What may be asked into L2 from the side stream while ranks meet: the MoE front's weights during the
attention's sum, the tail's during the latents', the next layer's input projection during the output's."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """One entry."""

    shared: Place
    experts_sms: int
    """Multiprocessors of the routed experts, of `multiprocessors` of the table's GPU."""
    shared_sms: int
    """Those of a shared expert that is narrow; of one that is not, how many it may find."""
    unserved: Place = "aside"
    """Where the shared expert runs if its widths have no narrow form."""
    prefetch: Mapping[str, int] = field(default_factory=dict)
    """Bytes of each of `AHEAD` that are asked for; empty: nothing is."""

    @property
    def spared_sms(self) -> int:
        """Multiprocessors that the routed experts leave to others."""
        return read().multiprocessors - self.experts_sms

    def first_narrow(self, inter: int) -> int | None:
        """The first hidden value of the shard that the narrow form computes; None where it computes none."""
        return {"narrow": 0, "narrow_down": inter}.get(self.shared)

    def served(self, has_narrow: bool) -> "Overlap":
        """The entry for widths that have a narrow form, or have none."""
        if has_narrow or not self.shared.startswith("narrow"):
            return self
        multiprocessors = read().multiprocessors
        return Overlap(self.unserved, multiprocessors, multiprocessors, self.unserved, self.prefetch)


Schedule = Callable[[int, int], Overlap]
"""The entry for a shard of the shared expert so many values wide and a step of so many rows."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table as it was read."""

    multiprocessors: int
    entries: Mapping[tuple[int, int], Overlap]
    """By width of the shard and bucket of rows."""


@cache
def read(file: Path = FILE) -> Table:
    """The table; `ValueError` where an entry is none, or is there twice."""
    content = json.loads(file.read_text(encoding="utf-8"))
    most = int(content["multiprocessors"])
    entries: dict[tuple[int, int], Overlap] = {}
    for number, one in enumerate(content["entries"]):
        key, found = (int(one.pop("shared_inter")), int(one.pop("bucket"))), Overlap(**one)
        wrong = _objection(found, most)
        if wrong or key in entries:
            raise ValueError(
                f"{file.name}: entry {number} {wrong or 'is a second one for its shard and bucket'}"
            )
        entries[key] = found
    return Table(most, entries)


def _objection(entry: Overlap, most: int) -> str:
    """What is wrong with an entry, in words."""
    if not {entry.shared, entry.unserved} <= set(get_args(Place)) or entry.unserved.startswith("narrow"):
        return f"places the shared expert {entry.shared!r}, else {entry.unserved!r}"
    if not 0 < entry.experts_sms <= most or not 0 < entry.shared_sms <= most:
        return f"gives {entry.experts_sms} and {entry.shared_sms} of {most} multiprocessors"
    if entry.shared.startswith("narrow") and entry.experts_sms + entry.shared_sms > most:
        return "gives narrow multiprocessors away twice"
    if unknown := set(entry.prefetch) - set(AHEAD):
        return f"prefetches {sorted(unknown)}; there are {', '.join(AHEAD)}"
    if any(size <= 0 or size % 16 for size in entry.prefetch.values()):
        return "prefetches a size that is no multiple of 16"
    return ""


def overlap_of(inter: int, rows: int) -> Overlap:
    """The table's entry: of the narrowest shard at least as wide, else the widest, and of the smallest bucket
    that holds the rows, else the largest.
    """
    entries: Mapping[tuple[int, int], Overlap] = read().entries
    width = _at_least(inter, {width for width, _ in entries})
    return entries[width, _at_least(rows, {bucket for at, bucket in entries if at == width})]


def aside_from(first: int) -> Schedule:
    """For comparisons: the table, but what is not narrow runs aside from `first` rows on, else along."""

    def schedule(inter: int, rows: int) -> Overlap:
        found = overlap_of(inter, rows)
        place: Place = "aside" if rows >= first else "along"
        if found.shared.startswith("narrow"):
            return Overlap(found.shared, found.experts_sms, found.shared_sms, place, found.prefetch)
        return Overlap(place, found.experts_sms, found.shared_sms, place, found.prefetch)

    return schedule


def places_of(schedule: Schedule, inter: int, most_rows: int, *, has_narrow: bool) -> frozenset[Place]:
    """Everywhere that the shared expert runs in steps of up to `most_rows` rows."""
    return frozenset(schedule(inter, rows).served(has_narrow).shared for rows in range(1, most_rows + 1))


def _at_least(wanted: int, known: set[int]) -> int:
    return min((one for one in known if one >= wanted), default=max(known))
