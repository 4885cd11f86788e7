"""What an expression of a Python module may stand for: a may-analysis within one file.

Invariant: the origins of an expression hold every imported thing, and every shared object that was handed
in, which the expression may denote as far as assignments, loops, patterns, containers, comprehensions,
attributes of `self`, and calls of the file's own functions carry it. Nothing of the file is run. Calls of
other code give something new, but for those that hand on what they hold (`getattr`, `vars`, `next` and the
like) and getters. Longer than other modules: what a name, a call, an attribute and a class stand for is
asked of each other, so the answers are one class.
"""

import ast
import builtins
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

from harness.stages.isolation.names import HOLDS_STATEMENTS, absolute_name, package_of
from harness.stages.isolation.scopes import (
    NONE,
    SELF,
    Binding,
    InstanceOf,
    Origin,
    Origins,
    Scope,
    annotated,
    is_own_class,
    is_self,
    put_in,
    taken_out,
    with_reached,
)
from harness.stages.isolation.source import Source

__all__ = ["Flow", "Origin", "Scope", "flow_of"]

MAX_STEPS: Final = 90
MAX_ORIGINS: Final = 60
MAX_RETURNS: Final = 20
MAX_TRIES: Final = 3
"""Times that an expression in a loop of names is followed before what was found is taken."""
HANDS_ON: Final = frozenset(
    ("type", "super", "next", "iter", "list", "tuple", "set", "dict", "sorted", "reversed", "zip",
     "enumerate", "filter", "map", "max", "min", "weakref.ref", "weakref.proxy",
     "inspect.unwrap", "gc.get_referents", "functools.partial", "partial", "functools.reduce", "reduce",
     "frozenset", "collections.deque", "itertools.chain", "itertools.cycle", "itertools.repeat",
     "itertools.islice", "contextvars.ContextVar", "types.new_class")
)  # fmt: skip
"""Calls that give what they are given, or a part of it."""
COPIES: Final = frozenset(("list", "tuple", "set", "dict", "sorted", "frozenset"))
"""Those of them that make a container of their own."""
GETTER: Final = re.compile(r"(^|\.)(get|current|default|global)_\w+$")
IMPORTERS: Final = (
    "importlib.import_module", "__import__", "importlib.__import__", "builtins.__import__",
    "pkgutil.resolve_name", "pydoc.locate",
)  # fmt: skip
SAME_MODULE: Final = {"posix": "os", "nt": "os"}
"""Modules that are another one under the name of a platform."""
VIEWS: Final = frozenset(
    ("view", "view_as", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "narrow", "select",
     "expand", "expand_as", "t", "transpose", "permute", "as_strided", "unbind", "split", "chunk", "detach",
     "numpy", "diagonal", "unfold", "contiguous")
)  # fmt: skip
"""Methods of a tensor whose result writes to the same memory."""
ABOVE: Final = ("__mro__", "__bases__", "__base__", "__class__", "__func__", "__self__", "__wrapped__")
"""Attributes that lead from a thing to what it was made from."""
ANCESTORS: Final = ("__mro__", "__bases__", "__base__")
"""Those of them that lead from a class of the file's own to shared ones."""
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class Flow:
    """The names of one file."""

    def __init__(self, tree: ast.Module, package: str, has_globals: bool = True) -> None:
        self._package = package
        self.module = Scope(tree, None)
        self.scopes: dict[ast.AST, Scope] = {}
        self.functions: dict[ast.AST, Scope] = {}
        self._busy: dict[tuple[int, int], int] = {}
        self._cut = _NEVER
        self._lies_in: dict[ast.AST, Scope] = {}
        self._global_names: dict[ast.AST, set[str]] = {}
        self._tries: dict[tuple[int, int], int] = {}
        self._known: dict[tuple[int, int], Origins] = {}
        self._classes: list[tuple[ast.ClassDef, Scope]] = []
        self._sent: list[tuple[ast.expr, Scope]] = []
        self.calls: list[tuple[ast.Call, Scope]] = []
        self.decorators: list[tuple[ast.expr, Scope]] = []
        self.statements: list[tuple[ast.AST, Scope]] = []
        self.is_cut = False
        """Whether something was further away than this follows."""
        self.choices: list[ast.If | ast.IfExp] = []
        self.read_attributes: list[ast.Attribute] = []
        self._returns: dict[ast.AST, list[ast.expr]] = {}
        if has_globals:
            self._enter_globals(tree)
        self._walk(tree, self.module)
        for call, scope in self.calls:
            self._hand_over(call, scope)
            if isinstance(call.func, ast.Attribute) and call.func.attr == "send" and len(call.args) == 1:
                self._sent.append((call.args[0], scope))
        for made, scope in self._classes:
            self._hand_to_class_machinery(made, scope)

    def close(self) -> None:
        """Let go of what refers to itself, so that nobody has to look for it; nothing may be asked then."""
        for scope in (self.module, *self.scopes.values()):
            scope.bindings.clear()

    def origins(self, node: ast.expr | None, scope: Scope, depth: int = 0) -> Origins:
        """Everything shared that an expression may denote."""
        if node is None:
            return NONE
        if depth > MAX_STEPS:
            self.is_cut = True
            return NONE
        key = (id(node), id(scope))
        if key in self._known:
            return self._known[key]
        if key in self._busy:
            self._cut = min(self._cut, self._busy[key])
            return NONE
        outer, self._cut, place = self._cut, _NEVER, len(self._busy)
        self._busy[key] = place
        found = self._evaluate(node, scope, depth + 1)
        del self._busy[key]
        self._tries[key] = self._tries.get(key, 0) + 1
        if self._cut >= place or self._tries[key] >= MAX_TRIES:
            self._known[key] = found if len(found) <= MAX_ORIGINS else frozenset(sorted(found)[:MAX_ORIGINS])
            self._cut = outer
        else:  # what a loop of names left out here is found when its first name is done
            self._cut = min(outer, self._cut)
        return found

    def scope_of(self, node: ast.AST) -> Scope:
        """The scope that a node lies in."""
        return self._lies_in.get(node, self.module)

    def names(self, node: ast.expr, scope: Scope, depth: int = 0) -> frozenset[str]:
        """Dotted names of what was imported, for what is called or read."""
        return frozenset(o.dotted for o in self.origins(node, scope, depth) if o.kind == "import")

    def _evaluate(self, node: ast.expr, scope: Scope, depth: int) -> Origins:
        if isinstance(node, ast.Name):
            return self._look_up(node.id, scope, depth)
        if isinstance(node, InstanceOf):
            return frozenset(Origin("instance", o.dotted) for o in self.origins(node.of, scope, depth))
        if isinstance(node, ast.Attribute):
            return self._attribute(node, scope, depth)
        if isinstance(node, ast.Subscript):
            return self._item(node, scope, depth)
        if isinstance(node, ast.Call):
            return self._call(node, scope, depth)
        if isinstance(node, ast.Lambda):
            return NONE
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp):
            return put_in(self.origins(node.elt, self.scopes[node], depth))
        if isinstance(node, ast.DictComp):
            return put_in(self.origins(node.value, self.scopes[node], depth))
        parts = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        if isinstance(node, ast.List | ast.Tuple | ast.Set | ast.Dict):
            return put_in(frozenset(o for part in parts for o in self.origins(part, scope, depth)))
        if isinstance(node, ast.Starred):
            return taken_out(self.origins(node.value, scope, depth))
        if isinstance(node, ast.IfExp | ast.BoolOp | ast.NamedExpr | ast.Await):
            return frozenset(o for part in parts for o in self.origins(part, scope, depth))
        if isinstance(node, ast.Yield):
            return frozenset(o for sent, inner in self._sent for o in self.origins(sent, inner, depth))
        return NONE

    def _look_up(self, name: str, scope: Scope, depth: int) -> Origins:
        place: Scope | None = self.module if name in scope.globals else scope
        while place is not None:
            is_seen = place is scope or not isinstance(place.node, ast.ClassDef)
            if is_seen and name in place.bindings:
                return frozenset(o for b in place.bindings[name] for o in self._bound(b, depth))
            place = place.above
        return frozenset((Origin("import", f"builtins.{name}"),)) if hasattr(builtins, name) else NONE

    def _bound(self, binding: Binding, depth: int) -> Origins:
        given = self.origins(binding.value, binding.scope or self.module, depth)
        for _ in range(binding.parts):
            given = taken_out(given)
        return binding.origins | given

    def definitions(self, node: ast.expr, scope: Scope) -> Iterator[ast.AST]:
        """Functions and classes of this file that a name may stand for."""
        if isinstance(node, ast.Lambda):
            yield node
        if isinstance(node, ast.Attribute) and is_self(node.value):
            own = self._class_above(scope)
            yield from (
                b.definition for b in (own.bindings.get(node.attr, []) if own else ()) if b.definition
            )
            return
        place: Scope | None = scope if isinstance(node, ast.Name) else None
        while place is not None and isinstance(node, ast.Name):
            if node.id in place.bindings:
                for binding in place.bindings[node.id]:
                    if binding.definition is not None:
                        yield binding.definition
                    elif isinstance(binding.value, ast.Lambda):
                        yield binding.value
                return
            place = place.above

    def _attribute(self, node: ast.Attribute, scope: Scope, depth: int) -> Origins:
        if node.attr in ANCESTORS and is_own_class(node.value):
            found = frozenset(
                o for c, s in self._family(scope) for b in c.bases for o in self.origins(b, s, depth)
            )
            if found:
                return found
        if is_self(node.value) and not self._is_given(node.value, scope):
            own = self._class_above(scope)
            key = f"self.{node.attr}"
            if own is not None and key in own.bindings:
                return frozenset(o for b in own.bindings[key] for o in self._bound(b, depth))
            return frozenset((Origin("handed", node.attr),)) if own is not None else NONE
        held = self.origins(node.value, scope, depth)
        if not held and (given := self._field(node, scope, depth) | self._member(node, scope, depth)):
            return given
        if node.attr in ABOVE:
            bases = (
                b for d in self.definitions(node.value, scope) if isinstance(d, ast.ClassDef) for b in d.bases
            )
            return held | frozenset(o for base in bases for o in self.origins(base, scope, depth))
        return with_reached(origin.part(node.attr) for origin in held)

    def _family(self, scope: Scope) -> Iterator[tuple[ast.ClassDef, Scope]]:
        """The class around a scope, and those of the file that are made from it."""
        own = self._class_above(scope)
        wanted = {own.node} if own is not None else set()
        for made, outer in self._classes:
            bases = {d for base in made.bases for d in self.definitions(base, outer)}
            if made in wanted or bases & wanted:
                wanted.add(made)
                yield made, outer

    def _is_given(self, node: ast.expr, scope: Scope) -> bool:
        """Whether a name such as `cls` was bound to something that this file hands over."""
        return isinstance(node, ast.Name) and node.id in scope.bindings

    def _hand_to_class_machinery(self, made: ast.ClassDef, scope: Scope) -> None:
        """A class's decorators are handed the class, its metaclass the bases, its descriptors their owner."""
        owner = Binding(None, None, definition=made)
        for definition in (d for expr in made.decorator_list for d in self.definitions(expr, scope)):
            self._bind_parameter(definition, 0, owner)
        for definition in (
            d for k in made.keywords if k.arg == "metaclass" for d in self.definitions(k.value, scope)
        ):
            bases = Binding(ast.Tuple(elts=made.bases, ctx=ast.Load()), scope)
            if isinstance(definition, ast.ClassDef):
                for method in (m for m in definition.body if isinstance(m, ast.FunctionDef)):
                    if method.name in ("__new__", "__init__", "__prepare__"):
                        self._bind_parameter(method, 2, bases)
            else:
                self._bind_parameter(definition, 1, bases)
        for value in (part.value for part in made.body if isinstance(part, ast.Assign)):
            kinds = self.definitions(value.func, scope) if isinstance(value, ast.Call) else ()
            for kind in (k for k in kinds if isinstance(k, ast.ClassDef)):
                for method in (m for m in kind.body if isinstance(m, ast.FunctionDef)):
                    if method.name == "__set_name__":
                        self._bind_parameter(method, 1, owner)

    def _bind_parameter(self, definition: ast.AST, place: int, binding: Binding) -> None:
        inner = self.functions.get(definition)
        args = definition.args if isinstance(definition, _Function) else None
        names = [a.arg for a in (*args.posonlyargs, *args.args)] if args is not None else []
        if inner is not None and place < len(names):
            inner.bind(names[place], binding)

    def _member(self, node: ast.Attribute, scope: Scope, depth: int) -> Origins:
        """What the body of a class of the file's own gives a name, asked of the class or an object of it."""
        made = node.value.func if isinstance(node.value, ast.Call) else node.value
        bindings = (
            binding
            for definition in self.definitions(made, scope)
            if isinstance(definition, ast.ClassDef)
            for binding in self.scopes[definition].bindings.get(node.attr, ())
        )
        return frozenset(o for binding in bindings for o in self._bound(binding, depth))

    def _field(self, node: ast.Attribute, scope: Scope, depth: int) -> Origins:
        """What an object of the file's own was given under a keyword of that name."""
        place: Scope | None = scope if isinstance(node.value, ast.Name) else None
        while place is not None and isinstance(node.value, ast.Name) and node.value.id not in place.bindings:
            place = place.above
        made = place.bindings[node.value.id] if place is not None and isinstance(node.value, ast.Name) else []
        given = [
            (keyword.value, binding.scope or self.module)
            for binding in made
            if isinstance(binding.value, ast.Call)
            for keyword in binding.value.keywords
            if keyword.arg == node.attr
        ]
        return frozenset(o for value, inner in given for o in self.origins(value, inner, depth))

    def _item(self, node: ast.Subscript, scope: Scope, depth: int) -> Origins:
        key = node.slice.value if isinstance(node.slice, ast.Constant) else None
        if isinstance(key, str):
            called = node.value.func if isinstance(node.value, ast.Call) and not node.value.args else None
            if called is not None and ast.unparse(called) in ("globals", "vars", "locals"):
                return self._look_up(key, self.module, depth)
            if "sys.modules" in self.names(node.value, scope, depth):
                return frozenset((Origin("import", key),))
            if (of := self._whose_names(node.value, scope, depth)) is not None:
                return with_reached(o.part(key) for o in self.origins(of, scope, depth))
        return taken_out(self.origins(node.value, scope, depth))

    def _whose_names(self, node: ast.expr, scope: Scope, depth: int) -> ast.expr | None:
        """`x` where a node is `vars(x)` or `x.__dict__`."""
        if isinstance(node, ast.Attribute):
            return node.value if node.attr == "__dict__" else None
        is_vars = isinstance(node, ast.Call) and "builtins.vars" in self.names(node.func, scope, depth)
        return node.args[0] if is_vars and isinstance(node, ast.Call) and node.args else None

    def _call(self, node: ast.Call, scope: Scope, depth: int) -> Origins:
        called = {name.removeprefix("builtins.") for name in self.names(node.func, scope, depth)}
        first = node.args[0] if node.args else None
        text = first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else None
        if called & set(IMPORTERS) and text is not None:
            return frozenset((Origin("import", text.replace(":", ".")),))
        if "vars" in called and first is not None:
            return with_reached(o.part("__dict__") for o in self.origins(first, scope, depth))
        if "getattr" in called or "inspect.getattr_static" in called:
            name = node.args[1] if len(node.args) > 1 else None
            part = name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else "*"
            return with_reached(o.part(part) for o in self.origins(first, scope, depth))
        if called & {"cast", "typing.cast"} and len(node.args) == 2:
            return self.origins(node.args[1], scope, depth)
        if called & HANDS_ON:
            given = [*node.args, *(k.value for k in node.keywords)]
            found = frozenset(o for one in given for o in self.origins(one, scope, depth))
            if called & COPIES:
                return frozenset(o._replace(held=max(1, o.held)) for o in found)
            return taken_out(found) if "next" in called else found
        if isinstance(node.func, ast.Attribute) and node.func.attr in (
            "get",
            "values",
            "items",
            "pop",
            "popleft",
            "__getitem__",
            "__subclasses__",
            "mro",
        ):
            return taken_out(self.origins(node.func.value, scope, depth))
        if isinstance(node.func, ast.Attribute) and node.func.attr in VIEWS:
            held = self.origins(node.func.value, scope, depth)
            return frozenset(o for o in held if o.kind != "import")
        if isinstance(node.func, ast.Call):  # attrgetter("x")(thing), partial(f, thing)()
            given = [*node.args, *node.func.args]
            return frozenset(o for one in given for o in self.origins(one, scope, depth))
        returned = frozenset(o for d in self.definitions(node.func, scope) for o in self._returned(d, depth))
        return returned | frozenset(Origin("instance", f"{name}()") for name in called if GETTER.search(name))

    def _returned(self, definition: ast.AST, depth: int) -> Origins:
        inner = self.functions.get(definition)
        if inner is None:
            return NONE
        if isinstance(definition, ast.Lambda):
            return self.origins(definition.body, inner, depth)
        if definition not in self._returns:
            ends = (
                r.value for r in ast.walk(definition) if isinstance(r, ast.Return | ast.Yield) and r.value
            )
            self._returns[definition] = list(islice(ends, MAX_RETURNS))
        return frozenset(o for value in self._returns[definition] for o in self.origins(value, inner, depth))

    def _hand_over(self, call: ast.Call, scope: Scope) -> None:
        """Arguments of a call become what the parameters of the file's own function may stand for."""
        for definition in self.definitions(call.func, scope):
            inner = self.functions.get(definition)
            if inner is None or not isinstance(definition, _Function):
                continue
            names = [a.arg for a in (*definition.args.posonlyargs, *definition.args.args)]
            if isinstance(call.func, ast.Attribute) and names and names[0] in SELF:
                names = names[1:]
            for name, value in zip(names, call.args, strict=False):
                inner.bind(name, Binding(value, scope))
            for keyword in call.keywords:
                if keyword.arg is not None:
                    inner.bind(keyword.arg, Binding(keyword.value, scope))
                    if definition.args.kwarg is not None:
                        held = ast.List(elts=[keyword.value], ctx=ast.Load())
                        inner.bind(definition.args.kwarg.arg, Binding(held, scope))
            if definition.args.vararg is not None:
                for value in call.args:
                    inner.bind(definition.args.vararg.arg, Binding(value, scope))

    def _class_above(self, scope: Scope) -> Scope | None:
        place: Scope | None = scope
        while place is not None and not isinstance(place.node, ast.ClassDef):
            place = place.above
        return place

    def _walk(self, node: ast.AST, scope: Scope) -> None:
        waiting: list[tuple[ast.AST, Scope]] = [(child, scope) for child in _inner(node)]
        while waiting:
            here, inside = waiting.pop()
            kind = type(here)
            if kind in _PLACED:
                self._lies_in[here] = inside
            elif kind is ast.Attribute and type(here.ctx) is ast.Load:  # type: ignore[attr-defined]
                self.read_attributes.append(here)  # type: ignore[arg-type]
            inner = self._enter(here, inside) if kind in _ENTERED else inside
            for name in _FIELDS[kind]:
                value: Any = getattr(here, name, None)
                if type(value) is list:
                    waiting += [(part, inner) for part in value if type(part) in _FIELDS]
                elif type(value) in _FIELDS:
                    waiting.append((value, inner))

    def _enter_globals(self, tree: ast.AST) -> None:
        """`global` holds in the whole function around it, also for what is bound before it is read."""
        waiting: list[tuple[ast.AST, tuple[ast.AST, ...]]] = [(tree, ())]
        while waiting:
            node, around = waiting.pop()
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                around = (*around, node)
            elif isinstance(node, ast.Global):
                for function in around:
                    self._global_names.setdefault(function, set()).update(node.names)
            waiting += [
                (child, around) for child in ast.iter_child_nodes(node) if isinstance(child, HOLDS_STATEMENTS)
            ]

    def _enter(self, node: ast.AST, scope: Scope) -> Scope:
        """Binds what a node binds; the scope of what lies in it."""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            inner = Scope(node, scope)
            self.functions[node] = self.scopes[node] = inner
            if not isinstance(node, ast.Lambda):
                scope.bind(node.name, Binding(None, None, definition=node))
                self.decorators += [(expression, scope) for expression in node.decorator_list]
            inner.globals.update(self._global_names.get(node, ()))
            self._parameters(node, inner, scope)
            return inner
        if isinstance(node, ast.ClassDef):
            inner = self.scopes[node] = Scope(node, scope)
            scope.bind(node.name, Binding(None, None, definition=node))
            self.statements.append((node, scope))
            self._classes.append((node, scope))
            self.decorators += [(expression, scope) for expression in node.decorator_list]
            return inner
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            inner = self.scopes[node] = Scope(node, scope)
            for part in node.generators:
                self._bind_target(part.target, part.iter, inner, parts=1)
                self.statements.append((part, inner))
            return inner
        self._bind(node, scope)
        return scope

    def _bind(self, node: ast.AST, scope: Scope) -> None:
        if isinstance(node, ast.Import):
            for name in node.names:
                dotted = name.name if name.asname else name.name.partition(".")[0]
                origin = Origin("import", SAME_MODULE.get(dotted, dotted))
                scope.bind(name.asname or dotted, Binding(None, None, frozenset((origin,))))
        elif isinstance(node, ast.ImportFrom):
            module = absolute_name("." * node.level + (node.module or ""), self._package)
            module = SAME_MODULE.get(module, module)
            for name in node.names:
                whole = with_reached((Origin("import", f"{module}.{name.name}"),))
                scope.bind(name.asname or name.name, Binding(None, None, whole))
        elif isinstance(node, ast.Global):
            scope.globals.update(node.names)
        elif isinstance(node, ast.Call):
            self.calls.append((node, scope))
        elif isinstance(node, ast.If | ast.IfExp):
            self.choices.append(node)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind_target(target, node.value, scope)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
            self._bind_target(node.target, node.value, scope)
        elif isinstance(node, ast.For | ast.AsyncFor):
            self._bind_target(node.target, node.iter, scope, parts=1)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self._bind_target(node.optional_vars, node.context_expr, scope)
        elif isinstance(node, ast.Match):
            for case in node.cases:
                for part in ast.walk(case.pattern):
                    if isinstance(part, ast.MatchAs | ast.MatchStar) and part.name is not None:
                        scope.bind(part.name, Binding(node.subject, scope))
        if isinstance(node, _STATEMENTS):
            self.statements.append((node, scope))

    def _bind_target(self, target: ast.expr, value: ast.expr | None, scope: Scope, parts: int = 0) -> None:
        binding = Binding(value, scope, parts=parts)
        if isinstance(target, ast.Name):
            (self.module if target.id in scope.globals else _home(scope, value)).bind(target.id, binding)
        elif isinstance(target, ast.Tuple | ast.List):
            own = value.elts if isinstance(value, ast.Tuple | ast.List) and not parts else []
            for place, part in enumerate(target.elts):
                inner = part.value if isinstance(part, ast.Starred) else part
                if len(own) == len(target.elts):
                    self._bind_target(inner, own[place], scope)
                else:
                    self._bind_target(inner, value, scope, parts=parts + 1)
        elif isinstance(target, ast.Attribute) and is_self(target.value):
            own_class = self._class_above(scope)
            if own_class is not None:
                own_class.bind(f"self.{target.attr}", binding)

    def _parameters(self, node: _Function, inner: Scope, outer: Scope) -> None:
        args = node.args
        listed = [*args.posonlyargs, *args.args, *args.kwonlyargs]
        defaults = [None] * (len(args.posonlyargs) + len(args.args) - len(args.defaults)) + list(
            args.defaults
        )
        values = [*defaults, *args.kw_defaults]
        for parameter, default in zip(listed, values, strict=True):
            if parameter.arg in SELF:
                continue
            inner.bind(parameter.arg, Binding(default, outer, frozenset((Origin("handed", parameter.arg),))))
            for name in annotated(parameter.annotation):
                inner.bind(parameter.arg, Binding(InstanceOf(name), outer))


_LEAVES: Final = (
    ast.Name, ast.Constant, ast.expr_context, ast.operator, ast.cmpop, ast.boolop, ast.unaryop,
)  # fmt: skip
_NEVER: Final = 10**9
_GLOBAL: Final = re.compile(r"global[ \t\\]+\w+ *(?:[,;#\n\\]|$)")
_COMPREHENSIONS: Final = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)
_STATEMENTS: Final = (
    ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete, ast.For, ast.AsyncFor, ast.withitem, ast.Call,
    ast.NamedExpr,
)  # fmt: skip
_PLACED: Final = frozenset((ast.Subscript, ast.Compare, ast.For, ast.comprehension))
"""What somebody may ask the scope of."""
_ENTERED: Final = frozenset(
    (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Global,
     ast.If, ast.IfExp, ast.Match, *_COMPREHENSIONS, *_STATEMENTS)
)  # fmt: skip
"""What binds, calls or opens a scope."""
_FIELDS: Final[dict[type, tuple[str, ...]]] = {
    kind: kind._fields
    for kind in vars(ast).values()
    if isinstance(kind, type) and issubclass(kind, ast.AST) and not issubclass(kind, _LEAVES)
}
"""Fields of every kind of node that may hold something to enter."""


def flow_of(source: Source) -> Flow | None:
    """The flow of a Python file; None for another language, or what this interpreter cannot parse."""
    return source.derive("flow", _flow_of)


def _flow_of(source: Source) -> Flow | None:
    tree = source.module
    if tree is None:
        return None
    return Flow(tree, package_of(source.path), has_globals=_GLOBAL.search(source.after or "") is not None)


def _inner(node: ast.AST) -> Iterator[ast.AST]:
    """What lies in a node and may bind or call something; names and constants do neither."""
    for name in node._fields:
        value: Any = getattr(node, name, None)
        if isinstance(value, list):
            yield from (part for part in value if type(part) in _FIELDS)
        elif type(value) in _FIELDS:
            yield value


def _home(scope: Scope, value: ast.expr | None) -> Scope:
    """Where a name is bound: an assignment expression in a comprehension binds around it."""
    home = scope
    while (
        isinstance(home.node, _COMPREHENSIONS) and isinstance(value, ast.NamedExpr) and home.above is not None
    ):
        home = home.above
    return home
