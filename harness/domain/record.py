"""Base of every record that crosses a file, a process or the command line.

Invariant: a record is frozen, knows all its fields, holds no NaN or infinity, and has one canonical form (RFC
8785), so that its digest is the same on every machine.
"""

import hashlib
import json
from typing import Annotated, Self, TypeVar

import rfc8785
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

__all__ = [
    "MAX_WHOLE", "Digest", "Name", "Number", "Positive", "Record", "Scalar", "Setting", "Whole",
    "canonical_bytes", "sha256_hex",
]  # fmt: skip

MAX_WHOLE = 2**53 - 1
"""Largest whole number that every reader of JSON keeps exact (RFC 8785, section 3.2.2.3)."""
_V = TypeVar("_V")


def _require_exact(value: _V) -> _V:
    """The value, unless it is a whole number that has no canonical form."""
    if isinstance(value, int) and not -MAX_WHOLE <= value <= MAX_WHOLE:
        raise ValueError(f"whole numbers go to {MAX_WHOLE} (2^53 - 1); a larger one has no canonical JSON")
    return value


class _ExactBounds:
    """Says in the JSON Schema what `_require_exact` holds, beside a field's own narrower bounds."""

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"minimum": -MAX_WHOLE, "maximum": MAX_WHOLE, **handler(schema)}


Whole = Annotated[int, AfterValidator(_require_exact), _ExactBounds()]
"""A whole number with a canonical form. Every whole number of a record has this type, or `Positive`."""
Positive = Annotated[int, Field(ge=1), AfterValidator(_require_exact), _ExactBounds()]
"""A whole number from 1."""
Number = Annotated[float | int, BeforeValidator(_require_exact)]
"""A figure. Checked before its type is chosen, as a large whole number would turn into a float unseen."""
Setting = Annotated[float | int | str | bool, BeforeValidator(_require_exact)]
"""A threshold's value."""

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""Lower-case hex sha256."""
Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_.-]{0,63}$")]
"""An identifier: lower-case letters, digits, `_`, `.`, `-`."""
Scalar = Annotated[bool | int | float | str | None, BeforeValidator(_require_exact)]
"""One cell of a sample table, or a parameter."""


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
    """RFC 8785 canonical JSON of plain JSON data. Integers past 2^53 raise `rfc8785.IntegerDomainError`; no
    record holds one.
    """
    return rfc8785.dumps(value)  # type: ignore[arg-type]  # its JSON type is narrower


def sha256_hex(content: bytes) -> str:
    """sha256 of `content` in hex."""
    return hashlib.sha256(content).hexdigest()
