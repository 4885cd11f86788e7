"""Where the optimised path is selected: each place that reads the claim's switch by name.

The tree at head is searched, not the diff alone, as a second place may have been there before. A switch whose
name is not written in the code (a pack that takes it from its claim) gives no place.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from ast_grep_py import SgRoot

from harness.domain.claim import Switch
from harness.stages.isolation.names import string_value
from harness.stages.isolation.source import MAX_PARSED, Node, language_of
from harness.stages.isolation.zones import ZoneIndex

__all__ = ["Place", "find_selection"]


class Place(NamedTuple):
    """One step of the graph: `selection` or `default`."""

    role: str
    path: str
    line: int
    text: str


def find_selection(
    switch: Switch, zones: ZoneIndex, paths: tuple[str, ...], read: Callable[[str], bytes | None]
) -> Iterator[Place]:
    """Places in the model code among `paths` that read the switch or give its default."""
    for path in paths:
        if language_of(path) != "python" or zones.zone_of(path) != "model_code":
            continue
        content = read(path)
        if content is None or len(content) > MAX_PARSED or switch.name.encode() not in content:
            continue
        text = content.decode("utf-8", "replace")
        yield from _places(path, SgRoot(text, "python").root(), switch)


def _places(path: str, root: Node, switch: Switch) -> Iterator[Place]:
    names = {switch.name}
    for assignment in root.find_all(kind="assignment"):
        left, right = assignment.field("left"), assignment.field("right")
        if left is not None and left.kind() == "identifier" and string_value(right) == switch.name:
            names.add(left.text())
    for call in root.find_all(kind="call"):
        function = call.field("function")
        arguments = [a for a in call.field("arguments").named_children() if a.kind() != "comment"]
        keys = [
            i
            for i, a in enumerate(arguments)
            if string_value(a) == switch.name or a.text() in names - {switch.name}
        ]
        if (
            keys
            and function is not None
            and function.text().rpartition(".")[2] in ("get", "getattr", "pop", "setdefault")
        ):
            yield _place("selection", path, call)
            if len(arguments) > keys[0] + 1:
                yield _place("default", path, arguments[keys[0] + 1])
    for item in root.find_all(kind="subscript"):
        if any(string_value(key) == switch.name for key in item.field_children("subscript")):
            yield _place("selection", path, item)


def _place(role: str, path: str, node: Node) -> Place:
    return Place(role, path, node.range().start.line + 1, " ".join(node.text().split())[:200])
