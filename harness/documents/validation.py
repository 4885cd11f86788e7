"""Plain data into a record, with errors that people can act on."""

import difflib
import json
import types
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from harness.documents.yaml_text import PlainData
from harness.domain.errors import InputError
from harness.domain.record import Record

__all__ = ["parse_record"]

R = TypeVar("R", bound=Record)

MAX_TOLD = 8
"""Problems told in one message; the rest is counted."""


def parse_record(model: type[R], data: PlainData, origin: str) -> R:
    """A record from plain data; raises one `InputError` with every problem found.

    Types are strict, as in JSON: text is no number and 1 is no boolean.
    """
    if not isinstance(data, dict):
        raise InputError(
            f"{origin}: the document is a {_kind(data)}, not a mapping of keys; see the README beside it"
        )
    try:
        return model.model_validate_json(json.dumps(data, allow_nan=False), strict=True)
    except ValueError as error:
        if not isinstance(error, ValidationError):
            raise InputError(f"{origin}: a number is infinite or not a number; write a finite one") from error
        problems = error.errors(include_url=False, include_context=False)
        told = [_problem(model, problem) for problem in problems[:MAX_TOLD]]
        more = f"; and {len(problems) - MAX_TOLD} more" if len(problems) > MAX_TOLD else ""
        raise InputError(f"{origin}: {'; '.join(told)}{more}") from error


def _problem(model: type[BaseModel], problem: Any) -> str:
    place = tuple(problem["loc"])
    key = ".".join(str(part) for part in place) or "the document"
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(place[-1]), _fields(model, place[:-1]), n=1)
        return f"{key} is no key that is known here; " + (
            f"did you mean {near[0]!r}?" if near else "remove it"
        )
    if problem["type"] == "missing":
        return f"{key} is missing; add it"
    if problem["type"] == "value_error":
        return f"{problem['msg'].removeprefix('Value error, ')}; correct {key}"
    return f"{key} is {_shown(problem['input'])}, but {_lower(problem['msg'])}; correct it"


def _fields(model: Any, place: tuple[Any, ...]) -> list[str]:
    """Names of the fields that the record at `place` knows; empty where there is no record."""
    for part in place:
        model = _record_in(model)
        if model is None:
            return []
        if isinstance(part, str):
            field = model.model_fields.get(part)
            model = field.annotation if field is not None else None
    model = _record_in(model)
    return list(model.model_fields) if model is not None else []


def _record_in(annotation: Any) -> type[BaseModel] | None:
    """The record type inside `X`, `X | None` or `tuple[X, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (tuple, Union, types.UnionType):
        return next((r for a in get_args(annotation) if (r := _record_in(a)) is not None), None)
    return None


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]


def _kind(data: PlainData) -> str:
    return {list: "list", type(None): "blank", str: "text"}.get(type(data), "single value")
