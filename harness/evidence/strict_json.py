"""Reading JSON that somebody else wrote: bounded, canonical, nothing that two readers could see differently.

Invariant: bytes that `parse_record` accepts are the RFC 8785 canonical form of the record it gives. That
form has no duplicate keys, no NaN, no spare whitespace and one spelling of each number, so a digest stands
for a value.
"""

import json
import os
import re
import stat
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import rfc8785
from pydantic import ValidationError

from harness.domain.errors import EvidenceError
from harness.domain.record import Record, canonical_bytes

__all__ = ["MAX_DEPTH", "load_record", "open_regular", "parse_json", "parse_record", "read_bounded"]

MAX_DEPTH = 40
"""Nesting of arrays and objects. The deepest record of ours has 8 levels."""
_TEXT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))
_PLAIN_FLOAT = re.compile(r"-?(?:0\.[0-9]{0,3}[1-9][0-9]*|[1-9][0-9]{0,14}\.[0-9]*[1-9])")
"""From 1e-4 to 1e15 with a fraction: Python writes these as ECMAScript does, and so as RFC 8785 wants."""
_PLAIN_DIGITS = 15
"""A whole number of as many digits is below 2^53."""
_STEP = bytes(1 if byte in b"[{" else 255 for byte in range(256))
"""What a bracket adds to the depth, as a signed byte."""
_R = TypeVar("_R", bound=Record)


def parse_json(raw: bytes, max_depth: int = MAX_DEPTH) -> Any:
    """JSON value of UTF-8 bytes; raises `EvidenceError` for NaN, infinities, duplicate keys, numbers out of
    range, nesting over `max_depth`, or text that is no Unicode.
    """
    return _parse(raw, max_depth)[0]


def _parse(raw: bytes, max_depth: int) -> tuple[Any, bool]:
    """The value, and whether Python's own writer gives its canonical form: it holds plain numbers alone, and
    no character whose place in the order of UTF-16 units is another than in Unicode's.
    """
    is_plain = True

    def whole(text: str) -> int:
        nonlocal is_plain
        is_plain = is_plain and len(text) <= _PLAIN_DIGITS
        return int(text)

    def real(text: str) -> float:
        nonlocal is_plain
        is_plain = is_plain and _PLAIN_FLOAT.fullmatch(text) is not None
        return _finite_float(text)

    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise EvidenceError(f"is not UTF-8 at byte {error.start}") from None
    depth = _depth(raw)
    if depth > max_depth:
        raise EvidenceError(f"nests {depth} levels deep; the limit is {max_depth}")
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_refuse_constant,
            parse_float=real,
            parse_int=whole,
        )
    except (ValueError, RecursionError) as error:  # also integers past Python's digit limit
        raise EvidenceError(f"is not JSON: {str(error)[:200]}") from None
    return value, is_plain and (text.isascii() or max(text) <= "\uffff")


def parse_record(raw: bytes, kind: type[_R]) -> _R:
    """Record from its canonical JSON; raises `EvidenceError` with the first few faults."""
    value, is_plain = _parse(raw, MAX_DEPTH)
    if not (is_plain and _as_python_writes(value) == raw):
        _require_canonical(value, raw)
    try:
        return kind.model_validate_json(raw, strict=True)
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(str(p) for p in fault['loc'])[:120]}: {fault['msg'][:200]}"
            for fault in error.errors(include_url=False, include_input=False)[:3]
        )
        raise EvidenceError(f"is no {kind.__name__}: {faults}") from None


def load_record(path: Path, kind: type[_R], max_bytes: int) -> _R:
    """Record from a file; raises `EvidenceError` that names the file."""
    try:
        return parse_record(read_bounded(path, max_bytes), kind)
    except EvidenceError as error:
        raise EvidenceError(f"{path}: {error}") from error


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """Content of a regular file of at most `max_bytes`; follows no link."""
    handle = open_regular(path)
    with os.fdopen(handle, "rb") as file:
        size = os.fstat(handle).st_size  # a read of the limit would allocate the limit
        if size > max_bytes:
            raise EvidenceError(f"takes {size} bytes, over the limit of {max_bytes} bytes")
        return file.read(size)


def open_regular(path: Path) -> int:
    """File descriptor of a regular file with one name; raises `EvidenceError` for links, pipes, devices."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise EvidenceError(f"cannot be opened: {error.strerror}") from None
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        os.close(handle)
        raise EvidenceError("is a link, a device or a pipe, not a regular file with one name")
    return handle


def _as_python_writes(value: Any) -> bytes:
    """JSON by the standard library's writer, several times as fast as the canonical one. A lone surrogate is
    dropped, and what is compared with differs then.
    """
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "ignore")


def _require_canonical(value: Any, raw: bytes) -> None:
    try:
        canonical = canonical_bytes(value)
    except (rfc8785.CanonicalizationError, UnicodeEncodeError) as error:
        raise EvidenceError(f"has no canonical form: {error}") from None
    if canonical != raw:
        raise EvidenceError("is not in canonical form (RFC 8785); it was edited or written by another tool")


def _depth(raw: bytes) -> int:
    """Deepest nesting, found before parsing, as a parser may recurse."""
    steps = _TEXT.sub(b"", raw).translate(None, _NO_BRACKET).translate(_STEP)
    return max(accumulate(memoryview(steps).cast("b")), default=0)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {twice[:80]!r} appears twice in one object")
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _finite_float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"number {text[:40]} is out of range")
    return value
