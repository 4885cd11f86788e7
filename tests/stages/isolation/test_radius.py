"""Who can reach a change, and what of it tests import, from a commit to the figures."""

from typing import Any

from harness.domain.change import ChangedFile, FileKind
from harness.domain.check import Samples
from harness.stages.isolation.named_lines import count_named_lines
from harness.stages.isolation.planning import plan
from harness.stages.isolation.source import Source
from tests.stages.isolation.test_stage import _samples, request_for


def tables(bench: Any) -> dict[str, tuple[Any, ...]]:
    check = next(c for c in plan(request_for(bench)) if c.subject == "blast_radius")
    samples: Samples = _samples(bench, check)
    return {table.name: table.rows for table in samples.tables}


def test_a_module_that_can_now_reach_the_change_is_named_with_the_way_there(bench: Any) -> None:
    bench.commit({"engine/run.py": "import models.k3.step\n", "models/k3/fast.py": "rows = 1\n"})
    bench.commit({"models/k3/step.py": "from models.k3 import fast\n", "models/k3/fast.py": "rows = 2\n"})
    found = tables(bench)
    assert ("shared_core", 2, 1, 1) in found["reach_by_zone"]
    bench.commit({"models/k3/new.py": "rows = 1\n", "engine/core.py": "import models.k3.new\n"})
    assert ("engine/core.py", "shared_core", "engine.core > models.k3.new") in tables(bench)["newly_reaching"]


def test_added_lines_are_exercised_where_a_test_imports_their_file(bench: Any) -> None:
    bench.commit({"tests/k3/test_step.py": "from models.k3.step import rows\n"})
    bench.commit({"models/k3/step.py": "rows = 2\nmore = 1\nlast = 1\n", "models/k3/alone.py": "x = 1\n"})
    found = tables(bench)["exercised"]
    assert found == (("models/k3/alone.py", 2, 0, False), ("models/k3/step.py", 3, 1, True))
    figures = {f.name: f.value for f in bench.judge()["blast_radius"].figures}
    assert figures["share_imported_by_tests"] == 0.6
    assert figures["modules_reaching_after"] == 1


def test_public_functions_and_defaults_that_changed_are_listed(bench: Any) -> None:
    bench.commit({"models/k3/step.py": "def step(a, rows=1):\n    return a\n\n\ndef _own(a): ...\n"})
    bench.commit({"models/k3/step.py": "def step(a, rows=2, *, b):\n    return a\n\n\ndef _own(): ...\n"})
    path = "models/k3/step.py"
    assert tables(bench)["altered"] == (
        (path, 1, "step", "breaks calls that fitted"),
        (path, 1, "step(rows)", "default 1 became 2"),
    )


def test_a_change_without_python_code_says_why_there_is_no_graph(bench: Any) -> None:
    bench.commit({"models/k3/kernel.cu": "__global__ void k() {}\n"})
    figures = {f.name: f for f in bench.judge()["blast_radius"].figures}
    assert figures["modules_reaching_after"].missing == "no Python code changed"


def test_added_lines_are_named_where_a_test_names_their_function_or_what_it_calls(bench: Any) -> None:
    bench.commit({"models/k3/step.py": "rows = 1\n"})
    bench.commit({"tests/k3/test_step.py": "from models.k3 import step\n\nstep.run(1)\n"})
    text = (
        "rows = 1\n\n\ndef run(x):\n    return inner(x)\n\n\ndef inner(x):\n    return x\n\n\n"
        "def other(x):\n    return x\n\n\nclass Own:\n    def forward(self):\n        return 1\n"
    )
    bench.commit({"models/k3/step.py": text})
    assert dict(tables(bench)["named"]) == {"models/k3/step.py": 12}
    assert [row[:2] for row in tables(bench)["exercised"]] == [("models/k3/step.py", 17)]
    figures = {f.name: f.value for f in bench.judge()["blast_radius"].figures}
    assert figures["share_imported_by_tests"] == 1.0
    assert figures["share_named_by_tests"] == 0.7059


def test_a_method_that_no_test_names_is_left_out_of_its_class() -> None:
    text = (
        "class Own:\n    rows = 1\n\n    def forward(self):\n        return 1\n\n"
        "    def unused(self):\n        return 2\n"
    )
    file = ChangedFile(path="models/k3/step.py", status="added", kind=FileKind.TEXT, hunks=())
    source = Source(file, "model_code", "model_code", None, text)
    assert count_named_lines(source, ["Own"]) == len(source.added) - 2
    assert count_named_lines(source, ["Own", "unused"]) == len(source.added)
    assert count_named_lines(source, ["Other"]) == len(source.added) - 8
    assert count_named_lines(source, []) == 0
