"""Base of every record that crosses a file, a process or the command line.

Invariant: a record is frozen, knows all its fields, holds no NaN or infinity, and has one canonical form (RFC
8785), so that its digest is the same on every machine.
"""

import hashlib
import json
from typing import Annotated, Self

import rfc8785
from pydantic import BaseModel, ConfigDict, Field

__all__ = ["Digest", "Name", "Record", "Scalar", "canonical_bytes", "sha256_hex"]

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""Lower-case hex sha256."""
Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_.-]{0,63}$")]
"""An identifier: lower-case letters, digits, `_`, `.`, `-`."""
Scalar = bool | int | float | str | None
"""One cell of a sample table."""


class Record(BaseModel):
    """Base of everything that crosses a process or a file."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    def canonical(self) -> bytes:
        """RFC 8785 canonical JSON of this record."""
        return canonical_bytes(self.model_dump(mode="json"))

    def digest(self) -> str:
        """sha256 of the canonical form, in hex."""
        return sha256_hex(self.canonical())

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Parse JSON that this harness wrote; raises pydantic's `ValidationError` on anything else."""
        return cls.model_validate(json.loads(text))


def canonical_bytes(value: object) -> bytes:
    """RFC 8785 canonical JSON of plain JSON data. Integers past 2^53 raise `rfc8785.IntegerDomainError`."""
    return rfc8785.dumps(value)  # type: ignore[arg-type]  # its JSON type is narrower


def sha256_hex(content: bytes) -> str:
    """sha256 of `content` in hex."""
    return hashlib.sha256(content).hexdigest()
