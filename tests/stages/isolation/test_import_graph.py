"""Imports read from text, and the graph over them."""

import pytest

from harness.domain.policy import Zone, ZoneMap
from harness.stages.isolation.import_graph import ModuleGraph, named_modules, package_roots, read_names
from harness.stages.isolation.zones import ZoneIndex

FILES = {
    "engine/__init__.py": "",
    "engine/run.py": "def start():\n    from models import k3\n",
    "engine/table.py": "MODELS = {'k3': 'models.k3.step:Model'}\n",
    "engine/other.py": "import os\n",
    "models/__init__.py": "",
    "models/k3/__init__.py": "from .step import (\n    Model,  # the model\n)\n",
    "models/k3/step.py": "class Model: ...\n",
    "tests/test_step.py": "from models.k3 import Model\n",
}
ROOTS = package_roots(tuple(FILES))


def graph(files: dict[str, str] = FILES) -> ModuleGraph:
    zones = ZoneIndex(
        ZoneMap(name="m", repository="r", zones=(Zone(name="shared_core", globs=("/**",), why="t"),)),
        frozenset(files),
    )
    return ModuleGraph(zones, read_names(tuple(files), files.get, ROOTS))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import models.k3.step\n", {"models.k3.step"}),
        ("import os, models.k3 as k\n", {"models.k3"}),
        ("from .step import a as b, c\n", {"models.k3.step", "models.k3.step.a", "models.k3.step.c"}),
        ("from models import (\n    a,  # import os\n    b,\n)\n", {"models", "models.a", "models.b"}),
        ("from models import a, \\\n    b\n", {"models", "models.a", "models.b"}),
        ("if x: from models import a\n", {"models", "models.a"}),
        ("x = 'models.k3.step:Model'\n", {"models.k3.step"}),
        ("x = important(models)\n", set()),
        ("import numpy\n", set()),
    ],
)
def test_statements_and_names_in_strings_are_read_and_other_packages_left_out(
    text: str, names: set[str]
) -> None:
    assert named_modules("models/k3/file.py", text, ROOTS) == names


def test_modules_that_import_a_changed_one_at_any_distance_are_found() -> None:
    found = graph().reaching(frozenset({"models/k3/step.py"}))
    assert found == {"engine/run.py", "engine/table.py", "models/k3/__init__.py", "tests/test_step.py"}


def test_the_shortest_way_to_the_change_is_told() -> None:
    assert graph().chain("engine/run.py", frozenset({"models/k3/step.py"})) == (
        "engine.run", "models.k3", "models.k3.step",
    )  # fmt: skip


def test_a_package_that_hands_a_module_on_counts_as_the_module() -> None:
    assert graph().importers("models/k3/step.py") == {
        "engine/run.py", "engine/table.py", "models/k3/__init__.py", "tests/test_step.py",
    }  # fmt: skip


def test_what_tests_reach_is_everything_they_import_at_any_distance() -> None:
    found = graph().reached_from(frozenset({"tests/test_step.py"}))
    assert found == {"models/k3/__init__.py", "models/k3/step.py", "tests/test_step.py"}


def test_a_file_that_imports_itself_or_nests_without_end_is_no_trouble() -> None:
    hostile = {**FILES, "models/k3/step.py": "import models.k3.step\n" + "(" * 50_000 + "import models\n"}
    assert "engine/run.py" in graph(hostile).reaching(frozenset({"models/k3/step.py"}))
