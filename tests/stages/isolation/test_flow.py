"""What an expression may stand for, followed through one file."""

import ast

import pytest

from harness.stages.isolation.flow import Flow

IMPORT = "from engine.core import Scheduler\n"


def targets(text: str) -> set[str]:
    """Dotted names of what the last attribute assignment of the text may change."""
    flow = Flow(ast.parse(text), "models.k3")
    assigned = [node for node, _ in flow.statements if isinstance(node, ast.Assign)]
    last = max(
        (node for node in assigned if isinstance(node.targets[0], ast.Attribute)), key=lambda n: n.lineno
    )
    scope = next(scope for node, scope in flow.statements if node is last)
    target = last.targets[0]
    assert isinstance(target, ast.Attribute)
    return {f"{o.kind} {o.dotted}" for o in flow.origins(target.value, scope) if o.held == 0}


@pytest.mark.parametrize(
    "text",
    [
        "x = Scheduler\nx.limit = 1\n",
        "for x in (Scheduler,):\n    x.limit = 1\n",
        "x, y = Scheduler, 1\nx.limit = 1\n",
        "x, *y = [Scheduler, 1]\nx.limit = 1\n",
        "x = {'a': [(Scheduler, 'n')]}\nfor y, n in x['a']:\n    y.limit = 1\n",
        "match Scheduler:\n    case x:\n        x.limit = 1\n",
        "def f(x):\n    x.limit = 1\n\n\nf(Scheduler)\n",
        "def f(x=Scheduler):\n    x.limit = 1\n",
        "def f():\n    return Scheduler\n\n\nf().limit = 1\n",
        "x = None\n\n\ndef f():\n    global x\n    x = Scheduler\n\n\ndef g():\n    x.limit = 1\n",
        "class A:\n    def f(self):\n        self.x = Scheduler\n    def g(self):\n        self.x.n = 1\n",
        "(Scheduler or object).limit = 1\n",
        "globals()['Scheduler'].limit = 1\n",
        "next(iter([Scheduler])).limit = 1\n",
        "class A(Scheduler):\n    def f(self):\n        type(self).__mro__[1].limit = 1\n",
        "class M(type):\n    def __new__(m, n, bases, d):\n        bases[0].limit = 1\n\n\n"
        "class A(Scheduler, metaclass=M):\n    pass\n",
        "class S:\n    def __set_name__(self, o, n):\n        o.__base__.limit = 1\n\n\n"
        "class A(Scheduler):\n    s = S()\n",
        "def d(cls):\n    cls.__bases__[0].limit = 1\n\n\n@d\nclass A(Scheduler):\n    pass\n",
        "def f():\n    x = yield\n    x.limit = 1\n\n\nf().send(Scheduler)\n",
    ],
)
def test_a_class_is_followed_wherever_the_file_carries_it(text: str) -> None:
    assert "import engine.core.Scheduler" in targets(IMPORT + text)


@pytest.mark.parametrize(
    "text",
    [
        "x = Scheduler()\nx.limit = 1\n",
        "def f(Scheduler):\n    Scheduler.limit = 1\n",
        "def f():\n    Scheduler = Own()\n    Scheduler.limit = 1\n",
        "from typing import cast\n\nx = cast(Scheduler, own)\nx.limit = 1\n",
        "class A(Scheduler):\n    def f(self):\n        type(self).limit = 1\n",
        "def d(cls):\n    cls.limit = 1\n\n\n@d\nclass A(Scheduler):\n    pass\n",
    ],
)
def test_what_the_file_made_itself_or_names_alike_is_not_the_import(text: str) -> None:
    assert "import engine.core.Scheduler" not in targets(IMPORT + text)


def test_an_annotation_makes_a_parameter_an_instance_in_its_own_function_only() -> None:
    text = IMPORT + "def f(x: 'Scheduler | None'):\n    return x\n\n\ndef g(x):\n    x.limit = 1\n"
    assert targets(text) == {"handed x"}
    assert "instance engine.core.Scheduler" in targets(IMPORT + "def f(x: Scheduler):\n    x.limit = 1\n")


def test_names_that_stand_for_each_other_end_the_search() -> None:
    assert targets("a = b\nb = a\na.limit = 1\n") == set()
