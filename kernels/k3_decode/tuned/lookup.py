"""Look a kernel's tuned configuration up by architecture, kernel and shape.

Exact entries first, then the nearest measured one along the axes for which the entry allows that; nothing
otherwise. The file is read once a process, and checked whole before anything of it is taken: a table may come
from a change. `configured` puts one choice in front of the table for a while, which is how a search tries it.
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Choice", "TableError", "choice", "configured", "read_table", "source_of", "table_file", "tables"]

FOLDER = Path(__file__).resolve().parent
Shape = Mapping[str, int]
MAX_BYTES, MAX_ENTRIES, MAX_SIZE = 2**20, 2000, 2**31
FORMS: Mapping[str, tuple[tuple[str, ...], Mapping[str, range]]] = {
    "row_product": (
        ("rows", "k", "tokens"),
        {
            "row_tiles": range(1, 9), "row_warps": range(1, 17), "k_warps": range(1, 33),
            "cluster": range(1, 17), "depth": range(1, 65), "blocks_per_sm": range(1, 9),
            "is_grouped": range(2),
        },
    ),
    "experts": (("experts", "top_k", "tokens"), {"most_waste": range(4097)}),
    "mla_attend": (("queries",), {"pages_at_once": range(1, 4097)}),
}  # fmt: skip
"""Kernels that ask, each with the axes of its shapes and what of a choice it can take at all."""


class TableError(ValueError):
    """A table that holds something else than choices; says what, where, and what to do."""


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
        gap = _distance(wanted, dict(entry["shape"]), frozenset(entry.get("near", ())))
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


def tables() -> tuple[Path, ...]:
    """Every table that is here."""
    return tuple(sorted(FOLDER.glob("*.json")))


def read_table(file: Path) -> tuple[Mapping[str, Any], ...]:
    """The entries of a table; raises `TableError` where any of them is none."""
    try:
        with file.open("rb") as opened:
            raw = opened.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES} bytes")
        entries = _object(json.loads(raw, parse_constant=_no_number), "the table").get("entries")
        if not isinstance(entries, list) or len(entries) > MAX_ENTRIES:
            raise ValueError(f"its `entries` are no list of at most {MAX_ENTRIES}")
        known: set[tuple[object, ...]] = set()
        for number, entry in enumerate(entries):
            key = _checked(entry, f"entry {number}")
            if key in known:
                raise ValueError(f"entry {number} is the second one of {key[0]} at one shape")
            known.add(key)
    except (OSError, ValueError, RecursionError) as error:
        words = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise TableError(
            f"{file} is no tuned table: {words[:300]}; take its version at the base of the change, or "
            "remove the file (kernels then take what is built in) and write it anew with `fasttrack tune`"
        ) from error
    return tuple(entries)


def _checked(entry: object, where: str) -> tuple[object, ...]:
    """The key of an entry; raises `ValueError` where it is none that a kernel can take."""
    given = _object(entry, where)
    kernel = given.get("kernel")
    if not isinstance(kernel, str) or kernel not in FORMS:
        raise ValueError(f"{where} is of kernel {str(kernel)[:60]!r}; those that ask are {', '.join(FORMS)}")
    axes, choices = FORMS[kernel]
    shape = _pairs(given.get("shape"), f"the shape of {where}")
    if tuple(shape) != axes or any(not 0 <= value < MAX_SIZE for value in shape.values()):
        raise ValueError(f"the shape of {where} is no {', '.join(axes)} of {kernel}, each from 0 on")
    near = given.get("near", [])
    if not isinstance(near, list) or any(name not in axes for name in near):
        raise ValueError(f"`near` of {where} names no axes of its shape")
    values = _pairs(given.get("configuration"), f"the configuration of {where}")
    if values.keys() != choices.keys():
        raise ValueError(f"the configuration of {where} is not of {', '.join(choices)}")
    for name, value in values.items():
        if value not in choices[name]:
            most = f"{choices[name].start} to {choices[name].stop - 1}"
            raise ValueError(f"{name} of {where} is {value}; {kernel} takes {most}")
    return (kernel, tuple(shape.items()))


def _object(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is no object")
    return value


def _pairs(value: object, where: str) -> dict[str, int]:
    """Names and whole numbers, each name once."""
    found: dict[str, int] = {}
    for pair in value if isinstance(value, list) else [None]:
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError(f"{where} is no list of names and numbers")
        name, number = pair
        if not isinstance(name, str) or type(number) is not int or name in found:
            raise ValueError(f"{where} is no list of names, each once, and whole numbers")
        found[name] = number
    return found


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is no number")


@lru_cache(maxsize=4)
def _entries(file: Path) -> tuple[Mapping[str, Any], ...]:
    return read_table(file) if file.is_file() else ()
