"""One trace for all architectures gives what the compiler itself gives for each, byte for byte."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALONE = """
import json, sys
from k3_decode.cute.attn_res import _compile
made = _compile(128, 2, True, 1)
print(json.dumps({"ptx": made.__ptx__, "cubin": made.__cubin__.hex()}))
"""
"""The DSL alone, as it compiles before a launch."""
ASKING = """
import json, sys
from pathlib import Path
import cutlass.cute as cute
from cutlass import Int32
from cutlass.base_dsl import BaseDSL
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from k3_decode.device_code import device_code

@cute.kernel
def _mark(out: cute.Tensor):
    out[0] = Int32(1000 * BaseDSL._get_dsl().get_arch_enum().major + 7)

@cute.jit
def _launch(out: cute.Tensor, stream):
    _mark(out).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

def build():
    out = make_fake_tensor(Int32, (cute.sym_int32(),), (1,), assumed_align=4)
    return cute.compile(_launch, out, make_fake_stream())

found = device_code(build, ("sm_90a", "sm_100a"), Path(sys.argv[1]))
print(json.dumps({name: code.ptx for name, code in found.items()}))
"""
"""A kernel that stores a number made of its architecture's."""
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="CuTe DSL (nvidia-cutlass-dsl) is not installed"
)


def _run(folder: Path, architecture: str, *command: str) -> str:
    env = {
        **os.environ,
        "CUTE_DSL_ARCH": architecture,
        "CUTE_DSL_KEEP": "ptx,cubin",
        "CUTE_DSL_DUMP_DIR": str(folder),
        "CUTE_DSL_LINEINFO": "1",
        "CUTE_DSL_NO_CACHE": "1",
        "PYTHONPATH": f"{ROOT / 'kernels'}:{ROOT}",
    }
    done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_a_shared_trace_gives_the_bytes_of_a_process_for_each_architecture(tmp_path: Path) -> None:
    name, named = "attn_res_d128_n2_c1", ("--arch", "sm_90a", "--arch", "sm_103a")
    _run(tmp_path, "sm_90a", "-m", "k3_decode.compile", *named, "--out", str(tmp_path), name)
    for architecture in ("sm_90a", "sm_103a"):
        alone = json.loads(_run(tmp_path, architecture, "-c", ALONE))
        assert (tmp_path / architecture / f"{name}.ptx").read_text() == alone["ptx"]
        assert (tmp_path / architecture / f"{name}.cubin").read_bytes().hex() == alone["cubin"]
    (launch,) = json.loads((tmp_path / "sm_103a" / f"{name}.json").read_text())["launches"]
    assert (launch["is_dependent"], launch["grid"]) == (True, ["a0.0 1 *", "1", "1"])


def test_a_kernel_that_asks_for_its_architecture_is_traced_for_each(tmp_path: Path) -> None:
    program, dump = tmp_path / "asking.py", tmp_path / "dump"
    program.write_text(ASKING)
    dump.mkdir()
    found = json.loads(_run(tmp_path, "sm_90a", str(program), str(dump)))
    assert ".target sm_90a" in found["sm_90a"]
    assert ", 9007;" in found["sm_90a"]
    assert ".target sm_100a" in found["sm_100a"]
    assert ", 10007;" in found["sm_100a"]
