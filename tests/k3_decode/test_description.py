"""The pack's description as data: the same as the dossiers say, and only while it is of the same sources."""

import json
import subprocess
import sys
from pathlib import Path

from k3_decode.description import FILE, load_description, source_digest
from k3_decode.pack import K3DecodePack, live_contracts, live_variants

PLANNING = """
import json, sys
from k3_decode import description
description.source_digest = lambda root: json.loads(description.FILE.read_text())["sources"]
from k3_decode.pack import K3DecodePack
pack = K3DecodePack()
print(len(pack.ops()), len(pack.variants()) > 100, "torch" in sys.modules, "cutlass" in sys.modules)
"""


def test_the_committed_description_says_what_dossiers_and_kernels_say(tmp_path: Path) -> None:
    described = load_description(_as_if_of(tmp_path))
    assert described is not None
    assert described["ops"] == [op.model_dump(mode="json") for op in live_contracts()]
    assert described["variants"] == [variant.model_dump(mode="json") for variant in live_variants()]


def test_ops_and_variants_are_read_from_a_fresh_description_without_torch_or_compiler() -> None:
    ran = subprocess.run([sys.executable, "-c", PLANNING], capture_output=True, text=True, check=True)
    assert ran.stdout == "11 True False False\n"


def test_a_description_of_other_sources_does_not_count(tmp_path: Path) -> None:
    file = _as_if_of(tmp_path)
    (tmp_path / "shapes.py").write_text("CHANGED = True\n", encoding="utf-8")
    assert load_description(file) is None


def test_every_source_counts_in_the_digest(tmp_path: Path) -> None:
    for name in ("ops/router.py", "cute/router.py", "cpu/router.py", "shapes.py", "compile.py"):
        before = source_digest(tmp_path)
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("VALUE = 1\n", encoding="utf-8")
        assert source_digest(tmp_path) != before, name


def test_what_a_cpu_implementation_holds_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "router.py").write_text("VALUE = 1\n", encoding="utf-8")
    before = source_digest(tmp_path)
    (tmp_path / "cpu" / "router.py").write_text("VALUE = 2\n", encoding="utf-8")
    assert source_digest(tmp_path) == before


def _as_if_of(folder: Path) -> Path:
    """The committed description in a folder of its own, bound to that folder's (no) sources."""
    content = json.loads(FILE.read_text(encoding="utf-8"))
    file = folder / FILE.name
    file.write_text(json.dumps(content | {"sources": source_digest(folder)}), encoding="utf-8")
    return file


def test_a_file_that_is_no_ops_own_may_decide_every_op() -> None:
    ops_of_file = K3DecodePack().ops_of_file
    assert ops_of_file("kernels/k3_decode/cute/router.py") == ("router",)
    for path in (
        "oracle.py",
        "layers.py",
        "canary/weights.safetensors",
        "cute/row_gemm.py",
        "peers/timing.py",
    ):
        assert len(ops_of_file(f"kernels/k3_decode/{path}")) == 11, path
    assert ops_of_file("kernels/k3_decode/NOTES.md") == ()
    assert ops_of_file("vllm/config.py") == ()
