"""YAML text into plain data, safely.

Invariant: what comes out is plain JSON data (string keys, no NaN), came from at most one document, and cost
time and memory in proportion to the text. Aliases, anchors, tags and merge keys are refused, so a small file
can neither expand nor name a Python object. Callers give the text's origin, which every error names.
"""

import re
from typing import Any, Final, NoReturn

import yaml

from harness.domain.errors import InputError

__all__ = ["MAX_BYTES", "PlainData", "parse_yaml"]

PlainData = None | bool | int | float | str | list["PlainData"] | dict[str, "PlainData"]

MAX_BYTES: Final = 2**20
MAX_DEPTH: Final = 32
MAX_VALUES: Final = 50_000

# libyaml's parser is ten times faster; both give the same events.
_LOADER: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# YAML 1.2 core schema. PyYAML's own table is YAML 1.1, where `on`, `off`, `yes` and `1:30` are not text.
_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"true|false")
_INT = re.compile(r"[-+]?[0-9]{1,18}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]{1,3})?")


def parse_yaml(text: str | bytes, origin: str) -> PlainData:
    """Plain data of one YAML document; raises `InputError` that names `origin` and the line."""
    if len(text) > MAX_BYTES:
        raise InputError(f"{origin}: the file has {len(text)} bytes, over the limit of {MAX_BYTES}; split it")
    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
    except UnicodeDecodeError as error:
        raise InputError(f"{origin}: byte {error.start} is not UTF-8; save the file as UTF-8") from error
    try:
        _require_bounded(decoded, origin)
        root = yaml.compose(decoded, Loader=_LOADER)
    except yaml.YAMLError as error:
        raise InputError(
            f"{origin}: this is no YAML: {' '.join(str(error).split())}; mend the syntax"
        ) from error
    if root is None:
        raise InputError(f"{origin}: the file is empty; write the document or name another file")
    return _plain(root, origin)


def _require_bounded(text: str, origin: str) -> None:
    """Walk the events, which never expand anything, before a tree is built from them."""
    depth = documents = 0
    for values, event in enumerate(yaml.parse(text, Loader=_LOADER), start=1):
        documents += isinstance(event, yaml.DocumentStartEvent)
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        line = event.start_mark.line + 1 if event.start_mark is not None else 0
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            _refuse(origin, line, "an anchor or alias", "write the value out")
        if (tag := getattr(event, "tag", None)) is not None:
            _refuse(origin, line, f"the tag {str(tag)[:60]!r}", "remove it")
        if depth > MAX_DEPTH:
            _refuse(origin, line, f"more than {MAX_DEPTH} levels", "flatten it")
        if values > MAX_VALUES:
            _refuse(origin, line, f"more than {MAX_VALUES} values", "split the file")
        if documents > 1:
            _refuse(origin, line, "a second document", "keep one document in a file")


def _refuse(origin: str, line: int, what: str, remedy: str) -> NoReturn:
    raise InputError(f"{origin}:{line}: {what} is not accepted here; {remedy}")


def _plain(node: yaml.Node, origin: str) -> PlainData:
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, origin)
    if isinstance(node, yaml.SequenceNode):
        return [_plain(child, origin) for child in node.value]
    assert isinstance(node, yaml.ScalarNode)
    return node.value if node.style else _scalar(node.value)  # a style means quoted or block: text


def _mapping(node: yaml.MappingNode, origin: str) -> dict[str, PlainData]:
    result: dict[str, PlainData] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            _refuse(origin, line, "a key that is not plain text", "use a word as the key")
        if key_node.value == "<<":
            _refuse(origin, line, "a merge key", "write the keys out")
        if key_node.value in result:
            _refuse(origin, line, f"the key {key_node.value!r} for a second time", "remove one of the two")
        result[key_node.value] = _plain(value_node, origin)
    return result


def _scalar(text: str) -> PlainData:
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text == "true"
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text
