"""Python code that changes something it imported or was handed, wherever that something is shared.

Shared is every module that is not model code: other code of the repository, the standard library and third
parties alike.
"""

import ast
import re
from collections.abc import Iterator
from typing import Final

from harness.domain.policy import Rule
from harness.stages.isolation.changes import Changed, changes_of, resolved_calls
from harness.stages.isolation.flow import Origin, flow_of
from harness.stages.isolation.import_graph import module_of
from harness.stages.isolation.names import (
    imported_names,
    imports_of,
    reached_name,
    root_names,
    string_value,
)
from harness.stages.isolation.source import Node, Source
from harness.stages.isolation.surroundings import Match, Surroundings

__all__ = [
    "find_computed_attribute", "find_computed_call", "find_device_wait_in_step",
    "find_environment_read", "find_handed_object_changed",
    "find_imported_object_changed", "find_model_code_imported", "find_module_imported",
    "find_shared_instance_changed",
]  # fmt: skip

OWN_ZONES: Final = ("model_code", "tests")
STEP: Final = re.compile(r"^_?(forward|step|decode|verify|run|execute|apply|call|launch)(_|$)|^__call__$")
OUTSIDE_SETTINGS: Final = {"os.environ", "os.environb", "sys.argv", "sys.orig_argv", "sys._xoptions"}
ASKED: Final = re.compile(r"environ|argv|_xoptions")
GLOBAL_CONTAINERS: Final = re.compile(
    r"(os\.environb?|sys\.(path|modules|meta_path|path_hooks|path_importer_cache|argv|warnoptions)|gc\.callbacks"
    r"|.*\.(__dict__|_?\w*registry|_?\w*_table)|builtins\.__dict__|warnings\.filters|logging\.root\.\w+)$"
)
"""Containers of others' packages that everybody shares; of this repository's own every one is."""


def find_imported_object_changed(rule: Rule, source: Source, around: Surroundings) -> Iterator[Match]:
    """Attributes and items of imported shared modules, classes and objects that are assigned, deleted, set by
    name, or grown.
    """
    for change in changes_of(source):
        names = sorted(
            o.dotted for o in change.origins if o.kind == "import" and _is_shared(o, change, around)
        )
        names = [n for n in names if not rule.patterns or any(re.search(p, n) for p in rule.patterns)]
        if names and not _is_allowed(rule, change.text, *names):
            yield from _at(source, change.first, change.last, f"changes {names[0]}, which is imported")


def find_shared_instance_changed(rule: Rule, source: Source, around: Surroundings) -> Iterator[Match]:
    """Attributes of objects of a shared class of the same repository: annotated so, or what a getter gave."""
    for change in (c for c in changes_of(source) if not c.is_slice):
        names = sorted(
            o.dotted
            for o in change.origins
            if o.kind == "instance" and around.zones.zone_of_module(o.dotted) not in (None, *OWN_ZONES)
        )
        names = [n for n in names if not rule.patterns or any(re.search(p, n) for p in rule.patterns)]
        if names and not _is_allowed(rule, change.text, *names, *_with_key(names, change)):
            yield from _at(source, change.first, change.last, f"changes an instance of {names[0]}")


def find_handed_object_changed(rule: Rule, source: Source, around: Surroundings) -> Iterator[Match]:
    """Attributes of objects that were handed in under a name that the rule's patterns know."""
    for change in (c for c in changes_of(source) if not c.is_slice):
        names = sorted(o.dotted for o in change.origins if o.kind == "handed")
        known = [name for name in names if any(re.search(p, name) for p in rule.patterns)]
        if known and not _is_allowed(rule, change.text, *known, *_with_key(known, change)):
            yield from _at(source, change.first, change.last, f"changes {known[0]}, which was handed in")


def find_computed_call(rule: Rule, source: Source, around: Surroundings) -> Iterator[Match]:
    """Calls of what the rule's patterns name in full, with a first argument that is no plain string."""
    for call in resolved_calls(source):
        if call.names & set(rule.patterns) and call.argument and not call.is_literal:
            yield from _at(
                source, call.first, call.last, f"calls {sorted(call.names)[0]} with a computed name"
            )


def find_computed_attribute(rule: Rule, source: Source, around: Surroundings) -> Iterator[Match]:
    """`getattr` with a computed name on shared code of the repository, or on a module that is a pattern."""
    root = source.root
    if root is None or "getattr" not in (source.after or ""):
        return
    names = {
        name
        for name, dotted in imported_names(source).items()
        if around.zones.zone_of_module(dotted) not in (None, *OWN_ZONES)
        or dotted.split(".")[0] in rule.patterns
    }
    either = [{"pattern": "getattr($OBJECT, $NAME)"}, {"pattern": "getattr($OBJECT, $NAME, $DEFAULT)"}]
    for call in root.find_all({"rule": {"any": either}}):
        name = call.get_match("NAME")
        if name.kind() != "identifier" and string_value(name) is not None:
            continue
        if root_names(call.get_match("OBJECT")) & names:
            yield from _match(source, call, "reads a computed name of something imported")


def find_model_code_imported(rule: Rule, source: Source, around: Surroundings) -> Iterator[Match]:
    """Imports of model code."""
    for first, last, _, dotted in imports_of(source):
        if around.zones.zone_of_module(dotted) == "model_code":
            yield from _at(source, first, last, f"imports {dotted}, which is model code")


def find_module_imported(rule: Rule, source: Source, around: Surroundings) -> Iterator[Match]:
    """Imports of modules that any pattern matches, and calls of such a module that another one hands on."""
    wanted = re.compile("|".join(f"(?:{pattern})" for pattern in rule.patterns))
    for first, last, _, dotted in imports_of(source):
        reached = reached_name(dotted)
        if wanted.match(dotted) or (reached is not None and wanted.match(reached)):
            yield from _at(source, first, last, f"imports {dotted}")
    if not rule.patterns or source.language != "python":
        return
    for call in resolved_calls(source):
        for name in sorted(call.names):
            reached = reached_name(name)
            if reached is not None and wanted.match(reached) and not _is_allowed(rule, reached):
                yield from _at(source, call.first, call.last, f"calls {name}")


def find_environment_read(rule: Rule, source: Source, around: Surroundings) -> Iterator[Match]:
    """Items of the environment that are read or asked for, under whatever name the environment goes."""
    flow = flow_of(source) if ASKED.search(source.after or "") else None
    for node in ast.walk(source.module) if flow is not None and source.module is not None else ():
        held, key = _asked(node)
        if flow is None or held is None or key is None:
            continue
        name = key.value if isinstance(key, ast.Constant) else ""
        scope = flow.scope_of(node)
        if OUTSIDE_SETTINGS & flow.names(held, scope) and not _is_allowed(rule, str(name)):
            yield from _at(source, key.lineno, key.end_lineno or key.lineno, "reads the environment")


def _asked(node: ast.AST) -> tuple[ast.expr | None, ast.expr | None]:
    """(container, key) of `c[k]` that is read, of `k in c`, and of a loop over `c`."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        return node.value, node.slice
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.In | ast.NotIn):
        return node.comparators[0], node.left
    if isinstance(node, ast.For | ast.comprehension):
        return node.iter, node.iter
    return None, None


def find_device_wait_in_step(rule: Rule, source: Source, around: Surroundings) -> Iterator[Match]:
    """Waits for the whole device in a function that steps call; in C++ and CUDA anywhere."""
    expressions = [re.compile(pattern) for pattern in rule.patterns]
    for call in resolved_calls(source):
        if STEP.search(call.inside) and any(e.fullmatch(name) for e in expressions for name in call.names):
            yield from _at(source, call.first, call.last, f"waits in {call.inside}")
    if source.language in ("cpp", "cuda"):
        for line in sorted(source.added):
            code = source.lines[line - 1].partition("//")[0]
            if any(expression.search(code) for expression in expressions):
                yield Match(line, code.strip())


def _is_shared(origin: Origin, change: Changed, around: Surroundings) -> bool:
    """Whether the change touches something shared; a method of a module, such as `os.remove`, grows
    nothing.
    """
    path = around.zones.file_of_module(origin.dotted)
    if path is not None:
        is_module = origin.dotted == module_of(path)
        return around.zones.zone_of(path) not in OWN_ZONES and not (change.is_grown and is_module)
    return not change.is_grown or GLOBAL_CONTAINERS.match(origin.dotted) is not None


def _with_key(names: list[str], change: Changed) -> list[str]:
    """Full names with the key that is set in them, whatever the file calls the container."""
    place = change.text.rfind("[")
    return [f"{name}{change.text[place:]}" for name in names] if place > 0 else []


def _is_allowed(rule: Rule, *texts: str) -> bool:
    return any(re.fullmatch(expression, text) for expression in rule.allow for text in texts)


def _at(source: Source, first: int, last: int, note: str) -> Iterator[Match]:
    line = source.first_added(first, last)
    if line is not None:
        yield Match(line, source.lines[line - 1].strip(), note)


def _match(source: Source, node: Node, note: str) -> Iterator[Match]:
    place = node.range()
    line = source.first_added(place.start.line + 1, place.end.line + 1)
    if line is not None:
        yield Match(line, source.lines[line - 1].strip(), note)
