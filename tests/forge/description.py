"""GitHub's published description: checks requests and answers against it, and makes answers out of it."""

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote

from jsonschema import Draft202012Validator

__all__ = ["Operation", "answer_faults", "example_answer", "find_operation", "request_faults"]

DOCUMENT: dict[str, Any] = json.loads((Path(__file__).parent / "openapi" / "github.json").read_text())


class Operation:
    """One operation of the description that a method and path name."""

    def __init__(self, key: str, path_values: dict[str, str]) -> None:
        self.key = key
        self.path_values = path_values
        self.content: dict[str, Any] = DOCUMENT["operations"][key]


def find_operation(method: str, path: str) -> Operation | None:
    """The operation, or None where GitHub has no such path among ours."""
    for key in DOCUMENT["operations"]:
        verb, template = key.split(" ")
        pattern = re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", template)
        if verb.upper() == method and (match := re.fullmatch(pattern, path)):
            return Operation(key, {name: unquote(value) for name, value in match.groupdict().items()})
    return None


def request_faults(operation: Operation, query: str, body: bytes) -> list[str]:
    """What GitHub's description does not allow in a request. Unknown names count as faults."""
    faults = []
    known = {p["name"]: p for p in operation.content["parameters"]}
    values = {**operation.path_values, **dict(parse_qsl(query, keep_blank_values=True))}
    for name, text in values.items():
        if name not in known:
            faults.append(f"{operation.key} has no parameter {name}")
            continue
        schema = known[name]["schema"]
        value: Any = int(text) if schema.get("type") == "integer" and text.isdigit() else text
        faults += _faults(schema, value)
    faults += [f"{name} is missing" for name, p in known.items() if p["required"] and name not in values]
    expected = operation.content["body"]
    if expected is None:
        return faults + (["a body where none belongs"] if body else [])
    given = json.loads(body)
    faults += _faults(expected, given)
    faults += [
        f"the body has {n!r}, which GitHub does not know" for n in given if n not in _properties(expected)
    ]
    return faults


def answer_faults(operation: Operation, status: int, answer: Any) -> list[str]:
    """What the description does not allow in an answer of ours."""
    schema = operation.content["responses"].get(str(status))
    return _faults(schema, answer) if schema else []


def example_answer(operation: Operation, status: int) -> Any:
    """The smallest answer that the description allows."""
    return _example(operation.content["responses"][str(status)])


def _faults(schema: dict[str, Any], value: Any) -> list[str]:
    validator = Draft202012Validator({**schema, "schemas": DOCUMENT["schemas"]})
    return [
        f"{'/'.join(map(str, e.absolute_path))}: {e.validator}: {e.message[:300]}"
        for e in validator.iter_errors(value)
    ]


def _properties(schema: dict[str, Any]) -> set[str]:
    parts = [schema, *schema.get("oneOf", []), *schema.get("anyOf", [])]
    return {name for part in parts for name in part.get("properties", {})}


def _example(schema: dict[str, Any]) -> Any:
    if "$ref" in schema:
        return _example(DOCUMENT["schemas"][schema["$ref"].removeprefix("#/schemas/")])
    if "enum" in schema:
        return schema["enum"][0]
    if "anyOf" in schema or "oneOf" in schema:
        options = schema.get("anyOf") or schema["oneOf"]
        return None if {"type": "null"} in options else _example(options[0])
    if "allOf" in schema:
        return {k: v for part in schema["allOf"] for k, v in _example(part).items()}
    kind = schema.get("type")
    if kind == "object" or "properties" in schema:
        properties = schema.get("properties", {})
        return {name: _example(properties.get(name, {})) for name in schema.get("required", [])}
    if kind == "string":
        return {"date-time": "2026-11-29T20:30:00Z", "uri": "https://example.com/"}.get(
            schema.get("format", ""), "x"
        )
    return {"array": [], "integer": 1, "number": 1, "boolean": False}.get(kind or "")
