"""How the optimised path is chosen and left: selection, state, guard, decline and return, with file and line.

The whole model code at head is read, not the diff alone, as a second selection may have been there before.
Names are followed from the place that reads the switch: through functions that hand its value on, to the
attribute or variable that keeps it, to the conditions on that, and from each condition to the statement
that runs when it does not hold, which is the return to stock. Functions that a guarded branch asks first,
and their ways out, are the declines; a pack that decides by reason codes declines at each code.

What this does not follow: values in containers, and names that are computed.
"""

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Final, Literal, NamedTuple

from harness.domain.claim import Switch
from harness.stages.isolation.defaults import Constants, is_lookup, values_when_unset
from harness.stages.isolation.zones import ZoneIndex

__all__ = ["Graph", "Place", "Role", "draw_opt_in", "is_together"]

Role = Literal["selection", "default", "carrier", "state", "guard", "left", "decline", "return"]
"""`left`: state that is written before a decline, which stock then finds."""
MAX_BYTES: Final = 2 * 2**20
MAX_HOPS: Final = 5
MAX_PLACES: Final = 200
PLATFORMS: Final = ("amd", "nvidia", "rocm", "cuda", "cpu", "xpu", "tpu", "neuron", "ascend", "metal")
"""Folders whose code never runs in one process."""
TOO_COMMON: Final = ("forward", "run", "call", "apply", "main")
"""Names under which a graph of names would join what has nothing to do with each other."""
TAKEN: Final = re.compile(r"(?i)taken|optimi|ok$")
"""Reason codes that are no decline."""
ARMS: Final = ("optimised", "stock")
"""What a ledger calls the two paths; a pack that builds a decision from them selects there."""


class Place(NamedTuple):
    """One node of the graph."""

    role: Role
    path: str
    line: int
    text: str
    leads_to: str = ""
    """`path:line` of the place that comes next; empty at the end."""

    @property
    def where(self) -> str:
        """`path:line`."""
        return f"{self.path}:{self.line}"


class Graph(NamedTuple):
    """Every place, in the order in which a step meets them."""

    places: tuple[Place, ...]

    def of(self, role: Role) -> tuple[Place, ...]:
        """Places of one role."""
        return tuple(place for place in self.places if place.role == role)


class _Module:
    """A parsed file with what lies around each node."""

    def __init__(self, path: str, tree: ast.Module) -> None:
        self.path, self.tree = path, tree

    @cached_property
    def above(self) -> dict[ast.AST, ast.AST]:
        """The node around each node."""
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def function_of(self, node: ast.AST) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        """The function that a node lies in."""
        here: ast.AST | None = self.above.get(node)
        while here is not None and not isinstance(here, ast.FunctionDef | ast.AsyncFunctionDef):
            here = self.above.get(here)
        return here

    def statement_of(self, node: ast.AST) -> ast.AST:
        """The statement that a node lies in."""
        here = node
        while not isinstance(here, ast.stmt) and here in self.above:
            here = self.above[here]
        return here

    def after(self, node: ast.stmt) -> ast.stmt | None:
        """The statement that runs after `node` in its block, or after the block."""
        here: ast.AST = node
        while here in self.above:
            around = self.above[here]
            for block in ("body", "orelse", "finalbody"):
                listed = getattr(around, block, None)
                if isinstance(listed, list) and here in listed and listed.index(here) + 1 < len(listed):
                    found: ast.stmt = listed[listed.index(here) + 1]
                    return found
            if isinstance(around, ast.FunctionDef | ast.AsyncFunctionDef):
                return None
            here = around
        return None


class _Code:
    """The model's files, parsed where a name is asked for that they hold."""

    def __init__(self, paths: Sequence[str], read: Callable[[str], bytes | None]) -> None:
        self._texts: dict[str, str] = {}
        for path in paths:
            content = read(path)
            if content is not None and len(content) <= MAX_BYTES:
                self._texts[path] = content.decode("utf-8", "replace")
        self._modules: dict[str, _Module | None] = {}

    def holding(self, name: str, near: str = "") -> Iterator[_Module]:
        """Files in which the name occurs, and which may run in one process with the file `near`."""
        for path, text in self._texts.items():
            if name in text and is_together(path, near) and (module := self._module(path)) is not None:
                yield module

    def _module(self, path: str) -> _Module | None:
        if path not in self._modules:
            try:
                self._modules[path] = _Module(path, ast.parse(self._texts[path]))
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                self._modules[path] = None
        return self._modules[path]


def is_together(one: str, other: str) -> bool:
    """Whether two files may run in one process: not where their folders name different platforms."""
    named = [next((part for part in path.split("/") if part in PLATFORMS), None) for path in (one, other)]
    return named[0] == named[1] or None in named


def draw_opt_in(
    switch: Switch, zones: ZoneIndex, paths: tuple[str, ...], read: Callable[[str], bytes | None]
) -> Graph:
    """The graph of the model code among `paths`; empty where nothing reads the switch or decides by arm."""
    own = [p for p in paths if p.endswith(".py") and zones.zone_of(p) == "model_code"]
    code = _Code(own, read)
    found: dict[tuple[Role, str, int], Place] = {}
    for module, node, value in _selections(code, switch):
        function = module.function_of(node)
        trail = _Trail(code, found)
        here = trail.add("selection", module, node)
        if value is not None:
            trail.add("default", module, value, text=_default_text(module, value, zones, read))
        trail.follow_value(module, node, here, 0)
        if function is not None:
            trail.reasons(module, function, here)
            trail.follow_function(function.name, here, 0)
    return Graph(tuple(sorted(found.values(), key=_order)[:MAX_PLACES]))


def _selections(code: _Code, switch: Switch) -> Iterator[tuple[_Module, ast.expr, ast.expr | None]]:
    """(file, place, expression with its default) of each read of the switch, and of each decision by arm."""
    for module in code.holding(switch.name):
        keys = {
            target.id
            for node in module.tree.body if isinstance(node, ast.Assign) and _is_text(node.value, switch.name)
            for target in node.targets if isinstance(target, ast.Name)
        }  # fmt: skip
        for node in ast.walk(module.tree):
            if (
                isinstance(node, ast.Call)
                and is_lookup(node)
                and any(_is_key(a, switch.name, keys) for a in node.args)
            ):
                yield module, node, _whole(module, node)
            elif (
                isinstance(node, ast.Subscript)
                and isinstance(node.ctx, ast.Load)
                and _is_key(node.slice, switch.name, keys)
            ):
                yield module, node, None
    for module in code.holding(f'"{ARMS[0]}"'):
        for node in ast.walk(module.tree):
            if isinstance(node, ast.keyword) and node.arg == "path" and isinstance(node.value, ast.IfExp):
                arms = {getattr(part, "value", None) for part in (node.value.body, node.value.orelse)}
                if arms == set(ARMS):
                    yield module, node.value, None


class _Trail:
    """Follows one selection; adds each place once."""

    def __init__(self, code: _Code, found: dict[tuple[Role, str, int], Place]) -> None:
        self._code, self._found = code, found

    def add(self, role: Role, module: _Module, node: ast.AST, leads_to: str = "", text: str = "") -> Place:
        """A place, its text from the source's tree."""
        line = getattr(node, "lineno", 1)
        shown = text or " ".join(ast.unparse(_head(node)).split())[:160]
        place = Place(role, module.path, line, shown, leads_to)
        self._found.setdefault((role, module.path, line), place)
        return place

    def follow_function(self, name: str, origin: Place, hops: int) -> None:
        """Where a function's result goes: on to the caller's result, into state, or into a condition."""
        if hops > MAX_HOPS or name.startswith("__") or name in TOO_COMMON:
            return
        for module in self._code.holding(f"{name}(", origin.path):
            for call in ast.walk(module.tree):
                if isinstance(call, ast.Call) and _called(call) == name:
                    self.follow_value(module, call, origin, hops)

    def follow_value(self, module: _Module, node: ast.expr, origin: Place, hops: int) -> None:
        """Where a value goes: into an attribute or a variable, to the caller, or into a condition."""
        statement, function = module.statement_of(node), module.function_of(node)
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for target in targets:
                if isinstance(target, ast.Attribute):
                    self._keep(module, statement, target.attr, origin, hops)
                elif isinstance(target, ast.Name) and function is not None:
                    self._local(module, function, statement, target.id, origin, hops)
        elif isinstance(statement, ast.Return) and function is not None:
            self._link(origin, self.add("carrier", module, statement))
            self.follow_function(function.name, origin, hops + 1)
        elif isinstance(statement, ast.If | ast.While):
            self._guard(module, statement, origin)

    def _keep(self, module: _Module, statement: ast.AST, name: str, origin: Place, hops: int) -> None:
        """An attribute holds the choice: its conditions, and what is made from it."""
        if ("state", module.path, getattr(statement, "lineno", 1)) in self._found:
            return
        state = self.add("state", module, statement)
        self._link(origin, state)
        for other in self._code.holding(f".{name}", module.path):
            for node in ast.walk(other.tree):
                if isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Load):
                    self._use(other, node, state, hops)

    def _local(
        self, module: _Module, function: ast.AST, statement: ast.AST, name: str, origin: Place, hops: int
    ) -> None:
        """A variable holds it: conditions on it, calls that it is handed to, and the function's result."""
        kept, is_told = origin, False
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
                around = module.statement_of(node)
                is_told = is_told or _tells(around)
                if isinstance(around, ast.If | ast.While) and _lies_in(node, around.test):
                    if kept is origin:
                        kept = self.add("state", module, statement)
                        self._link(origin, kept)
                    self._guard(module, around, kept)
                elif isinstance(around, ast.Expr | ast.Assign):
                    self._handed(module, node, kept, hops)
        if is_told:
            owner = function.name if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) else ""
            self.follow_function(owner, origin, hops + 1)

    def _use(self, module: _Module, node: ast.expr, state: Place, hops: int) -> None:
        statement, function = module.statement_of(node), module.function_of(node)
        if isinstance(statement, ast.If | ast.While) and _lies_in(node, statement.test):
            self._guard(module, statement, state)
        elif (chosen := _conditional(module, node)) is not None:
            self._chosen(module, chosen, state, hops)
        elif isinstance(statement, ast.Assign) and hops < MAX_HOPS:
            for target in statement.targets:
                if isinstance(target, ast.Attribute):
                    self._keep(module, statement, target.attr, state, hops + 1)
                elif isinstance(target, ast.Name) and function is not None and statement.value is node:
                    self._alias(module, function, target.id, state, hops)

    def _alias(self, module: _Module, function: ast.AST, name: str, state: Place, hops: int) -> None:
        """A variable that is the attribute: its conditions."""
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
                around = module.statement_of(node)
                if isinstance(around, ast.If | ast.While) and _lies_in(node, around.test):
                    self._guard(module, around, state)
                elif (chosen := _conditional(module, node)) is not None:
                    self._chosen(module, chosen, state, hops)

    def _chosen(self, module: _Module, node: ast.IfExp, state: Place, hops: int) -> None:
        """`None if decode is None else decode.plan(...)`: a guard on one line; what it asks may decline."""
        guard = self.add("guard", module, node.test)
        self._link(state, guard)
        off = node.body if _is_off(node.test) else node.orelse
        back = self.add("return", module, off)
        self._link(guard, back)
        asked = node.orelse if off is node.body else node.body
        for call in ast.walk(asked):
            if isinstance(call, ast.Call):
                self._declines(_called(call), back)
        function = module.function_of(node)
        if function is not None:
            self.follow_function(function.name, guard, hops + 1)

    def _handed(self, module: _Module, node: ast.expr, origin: Place, hops: int) -> None:
        """An argument of a call of the model's own: what the parameter is kept as."""
        call = module.above.get(node)
        if not isinstance(call, ast.Call) or node not in call.args or hops > MAX_HOPS:
            return
        for other in self._code.holding(f"def {_called(call)}(", module.path):
            for function in ast.walk(other.tree):
                if isinstance(function, ast.FunctionDef) and function.name == _called(call):
                    names = [a.arg for a in function.args.args if a.arg not in ("self", "cls")]
                    place = call.args.index(node)
                    if place < len(names):
                        self._parameter(other, function, names[place], origin, hops + 1)

    def _parameter(
        self, module: _Module, function: ast.FunctionDef, name: str, origin: Place, hops: int
    ) -> None:
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id == name:
                for target in node.targets:
                    if isinstance(target, ast.Attribute):
                        self._keep(module, node, target.attr, origin, hops)

    def _guard(self, module: _Module, statement: ast.If | ast.While, origin: Place) -> None:
        """A condition on the choice, the statement that runs when it is off, and what it asks first."""
        guard = self.add("guard", module, statement.test)
        self._link(origin, guard)
        off_first = _is_off(statement.test)
        otherwise = statement.orelse[0] if statement.orelse else module.after(statement)
        off = statement.body[0] if off_first else otherwise
        back = self.add("return", module, off) if off is not None else None
        if back is not None:
            self._link(guard, back)
        taken = statement.orelse if off_first else statement.body
        for inner in [s for part in taken for s in ast.walk(part)] if back is not None else []:
            asked = inner.value if isinstance(inner, ast.Assign) and _asks(inner, taken) else None
            if isinstance(asked, ast.Call) and back is not None:
                self._declines(_called(asked), back)

    def _declines(self, name: str, back: Place) -> None:
        """Ways out of what a guarded branch asks first: each `return None` or `return False`."""
        if not name or name.startswith("__"):
            return
        for module in self._code.holding(f"def {name}(", back.path):
            for function in ast.walk(module.tree):
                if isinstance(function, ast.FunctionDef) and function.name == name:
                    for node in ast.walk(function):
                        if isinstance(node, ast.Return) and _is_nothing(node.value):
                            self._link(self.add("decline", module, node), back)
                            self._left(module, function, node)

    def _left(self, module: _Module, function: ast.FunctionDef, decline: ast.Return) -> None:
        """What is written to an object before a way out, in the same function; counters are none."""
        block = module.above.get(decline)
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and node.lineno < decline.lineno:
                is_before = module.above.get(node) in (function, block)
                if is_before and any(isinstance(t, ast.Attribute | ast.Subscript) for t in node.targets):
                    self._link(self.add("left", module, node), self.add("decline", module, decline))

    def reasons(self, module: _Module, function: ast.AST, origin: Place) -> None:
        """Reason codes of a decision: members of an enumeration of the file, in the deciding function and
        those that it calls.
        """
        codes = {
            node.name
            for node in module.tree.body
            if isinstance(node, ast.ClassDef) and any("Enum" in ast.unparse(base) for base in node.bases)
        }
        asked = {_called(c) for c in ast.walk(function) if isinstance(c, ast.Call)}
        helpers = [n for n in ast.walk(module.tree) if isinstance(n, ast.FunctionDef) and n.name in asked]
        self._off_at_first(module, helpers)
        for node in (n for part in (function, *helpers) for n in ast.walk(part)):
            is_code = isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in codes
            if is_code and not TAKEN.search(getattr(node, "attr", "")):
                self._link(self.add("decline", module, node), origin)

    def _off_at_first(self, module: _Module, helpers: Sequence[ast.FunctionDef]) -> None:
        """What the attribute is at first that a reason asks for as `not self.NAME`."""
        asked = {
            n.operand.attr
            for helper in helpers for n in ast.walk(helper)
            if isinstance(n, ast.UnaryOp) and isinstance(n.op, ast.Not)
            and isinstance(n.operand, ast.Attribute)
            and isinstance(n.operand.value, ast.Name) and n.operand.value.id == "self"
        }  # fmt: skip
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                names = {t.attr for t in node.targets if isinstance(t, ast.Attribute)}
                if names & asked:
                    self.add("default", module, node, text=repr(node.value.value))

    def _link(self, first: Place, second: Place) -> None:
        """The earliest link of a place is kept: where it leads to first."""
        key = (first.role, first.path, first.line)
        held = self._found.get(key)
        if held is not None and not held.leads_to and held.where != second.where:
            self._found[key] = held._replace(leads_to=second.where)
        elif (
            held is not None and held.where != second.where and second.where not in held.leads_to.split(", ")
        ):
            self._found[key] = held._replace(leads_to=f"{held.leads_to}, {second.where}"[:400])


def _default_text(
    module: _Module, value: ast.expr, zones: ZoneIndex, read: Callable[[str], bytes | None]
) -> str:
    """What the switch is when nobody sets it, in words."""
    package = ".".join(module.path.split("/")[:-1])
    found = values_when_unset(value, Constants(module.tree, package, zones, read))
    return "cannot be evaluated" if found is None else " or ".join(sorted(map(repr, found)))


def _whole(module: _Module, node: ast.expr) -> ast.expr:
    """A lookup with `or` around it, and the conditional that it is a branch of."""
    here: ast.expr = node
    while isinstance(above := module.above.get(here), ast.BoolOp | ast.IfExp) and here is not getattr(
        above, "test", None
    ):
        here = above
    return here


def _conditional(module: _Module, node: ast.AST) -> ast.IfExp | None:
    """The conditional expression whose test a node lies in."""
    here = node
    while here in module.above and not isinstance(here, ast.stmt):
        around = module.above[here]
        if isinstance(around, ast.IfExp) and around.test is here:
            return around
        here = around
    return None


def _asks(assignment: ast.Assign, block: Sequence[ast.stmt]) -> bool:
    """Whether what was assigned is a condition later in the block."""
    names = {t.id for t in assignment.targets if isinstance(t, ast.Name)}
    tests = (node.test for part in block for node in ast.walk(part) if isinstance(node, ast.If))
    return any(isinstance(n, ast.Name) and n.id in names for test in tests for n in ast.walk(test))


def _is_off(test: ast.expr) -> bool:
    """Whether a condition holds where the path is not taken: `x is None`, `not x`, `x == "auto"`."""
    if isinstance(test, ast.UnaryOp):
        return isinstance(test.op, ast.Not)
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        other = test.comparators[0]
        says_on = isinstance(other, ast.Constant) and other.value == ARMS[0]
        return isinstance(test.ops[0], ast.Is | ast.Eq) and not says_on
    return False


def _tells(statement: ast.AST) -> bool:
    """Whether a function's own result says how a condition came out, so that its callers choose by it."""
    if isinstance(statement, ast.Return):
        return True
    first = statement.body[0] if isinstance(statement, ast.If) else None
    return isinstance(first, ast.Return) and _is_nothing(first.value)


def _is_nothing(node: ast.expr | None) -> bool:
    return node is None or (isinstance(node, ast.Constant) and node.value in (None, False))


def _is_text(node: ast.expr, text: str) -> bool:
    return isinstance(node, ast.Constant) and node.value == text


def _is_key(node: ast.expr, name: str, keys: set[str]) -> bool:
    return _is_text(node, name) or (isinstance(node, ast.Name) and node.id in keys)


def _called(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _lies_in(node: ast.AST, whole: ast.AST) -> bool:
    return any(part is node for part in ast.walk(whole))


def _head(node: ast.AST) -> ast.AST:
    """A compound statement's first line stands for it."""
    return node.test if isinstance(node, ast.If | ast.While) else node


def _order(place: Place) -> tuple[int, str, int]:
    roles = ("selection", "default", "carrier", "state", "guard", "left", "decline", "return")
    return roles.index(place.role), place.path, place.line
