"""The kernels compile with another version of the kernel compiler, such as the one that vLLM brings.

A Python that has it is named by FASTTRACK_OTHER_COMPILER; without torch and without the harness, as

    python -m venv /tmp/other
    /tmp/other/bin/pip install 'nvidia-cutlass-dsl[cu13]==4.8.0' apache-tvm-ffi==0.1.11 nvidia-cuda-nvdisasm
    FASTTRACK_OTHER_COMPILER=/tmp/other/bin/python pytest tests/k3_decode/test_other_compiler.py
"""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from k3_decode.cute.variant import COMPILED, DISPATCHED

PYTHON = os.environ.get("FASTTRACK_OTHER_COMPILER")
ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PYTHON is None,
        reason="FASTTRACK_OTHER_COMPILER names no Python with another CuTe DSL; see the module",
    ),
]


@pytest.mark.timeout(900)
def test_every_op_compiles_for_every_architecture_with_the_other_compiler(tmp_path: Path) -> None:
    groups = json.loads((ROOT / "kernels" / "k3_decode" / "description.json").read_text())["kernels"]
    kernels = [group["shared"] | kernel for group in groups for kernel in group["variants"]]
    smoke = {k["name"]: k["architectures"] for k in kernels if k["is_smoke"]}
    assert {k["op"] for k in kernels} == {k["op"] for k in kernels if k["name"] in smoke}
    asked = [word for architecture in DISPATCHED + COMPILED for word in ("--arch", architecture)]
    command = [str(PYTHON), "-m", "k3_decode.compile", *asked, "--out", str(tmp_path), *smoke]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "kernels")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    for architecture in DISPATCHED + COMPILED:
        folder = tmp_path / architecture
        wanted = {name for name, named in smoke.items() if architecture in named}
        assert {path.stem for path in folder.glob("*.cubin")} == wanted
        for path in folder.glob("*.ptx"):
            assert re.search(rf"^\.target {architecture}$", path.read_text(), re.MULTILINE)
            launches = json.loads(path.with_suffix(".json").read_text())["launches"]
            assert launches
            assert all(None not in launch["grid"] for launch in launches)
