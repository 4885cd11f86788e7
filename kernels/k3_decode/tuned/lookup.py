"""Look a kernel's tuned configuration up by architecture, kernel and shape.

Exact entries first, then the nearest measured one along the axes for which the entry allows that; nothing
otherwise. The file is read once a process. `configured` puts one choice in front of the table for a while,
which is how a search tries it.
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Choice", "choice", "configured", "source_of", "table_file"]

FOLDER = Path(__file__).resolve().parent
Shape = Mapping[str, int]


class Choice(NamedTuple):
    """A configuration and where it comes from."""

    values: Mapping[str, int]
    source: str
    """`exact`, `nearest` with the shape that was measured, or `tried` while a search tries it."""


_TRIED: dict[tuple[str, str, tuple[tuple[str, int], ...]], Choice] = {}
"""What a search tries now, by architecture, kernel and shape."""


def table_file(arch: str) -> Path:
    """Where the table of an architecture lies, if there is one."""
    return FOLDER / f"{arch}.json"


def choice(arch: str, kernel: str, shape: Shape) -> Choice | None:
    """The configuration for `shape`; None where the kernel's own choice stands."""
    if _TRIED:
        tried = _TRIED.get((arch, kernel, tuple(shape.items())))
        if tried is not None:
            return tried
    return _from_table(table_file(arch), kernel, tuple(shape.items()))


def source_of(arch: str, kernel: str, shape: Shape) -> str:
    """In a word or two, for the ledger: `exact`, `nearest ...` or `built-in`."""
    found = choice(arch, kernel, shape)
    return "built-in" if found is None else found.source


@contextmanager
def configured(arch: str, kernel: str, shape: Shape, values: Mapping[str, int]) -> Iterator[None]:
    """Inside the block `choice` gives `values` for exactly this shape."""
    key = (arch, kernel, tuple(shape.items()))
    before = _TRIED.get(key)
    _TRIED[key] = Choice(dict(values), "tried")
    try:
        yield
    finally:
        if before is None:
            del _TRIED[key]
        else:
            _TRIED[key] = before


@lru_cache(maxsize=1024)
def _from_table(file: Path, kernel: str, shape: tuple[tuple[str, int], ...]) -> Choice | None:
    wanted = dict(shape)
    best: tuple[float, Mapping[str, Any]] | None = None
    for entry in _entries(file):
        if entry["kernel"] != kernel:
            continue
        gap = _distance(wanted, dict(entry["shape"]), frozenset(entry["near"]))
        if gap is not None and (best is None or gap < best[0]):
            best = (gap, entry)
    if best is None:
        return None
    gap, entry = best
    at = " ".join(f"{name} {value}" for name, value in entry["shape"])
    return Choice(dict(entry["configuration"]), "exact" if gap == 0 else f"nearest ({at})")


def _distance(wanted: Shape, measured: Shape, near: frozenset[str]) -> float | None:
    """Octaves between two shapes; None where an axis differs for which no other may stand in."""
    if wanted.keys() != measured.keys():
        return None
    total = 0.0
    for name, value in wanted.items():
        if value != measured[name]:
            if name not in near:
                return None
            total += abs(math.log2(max(value, 1) / max(measured[name], 1)))
    return total


@lru_cache(maxsize=4)
def _entries(file: Path) -> tuple[Mapping[str, Any], ...]:
    if not file.is_file():
        return ()
    return tuple(json.loads(file.read_text(encoding="utf-8"))["entries"])
