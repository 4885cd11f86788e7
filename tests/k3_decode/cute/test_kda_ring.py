"""The state ring of the KDA kernel in machine code: no copy overtakes the loads before it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL (nvidia-cutlass-dsl) is not installed")

from k3_decode.disassembly import disassemble, find_disassembler

ROOT = Path(__file__).parents[3]
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\d\s+)?([A-Z][A-Z0-9_.]*)\s*([^;]*);")
WIDTHS = {".128": 4, ".64": 2}
STORES = ("STS", "STG", "ST")
BUILD = """
import sys
from pathlib import Path
from k3_decode.cute.kda_step import DECODE, Form, _compile
from k3_decode.device_code import device_code
folder = Path(sys.argv[1])
form = Form(split=1, steps=1, threads=256, stages=3, blocks=2, mode=DECODE, has_bound=True)
code = device_code(lambda: _compile(form), ("sm_90a",), folder)["sm_90a"]
(folder / "ring.cubin").write_bytes(code.cubin)
"""
"""One request a block through three places: four passes, the fourth where the first was."""


def copies_over_unread(text: str) -> list[tuple[str, tuple[str, ...]]]:
    """Copies by the engine (`UBLKCP`) that stand before the first use of what was loaded from shared memory,
    each with those loads, by place. Only a use makes the machine wait for a load.
    """
    pending: dict[str, set[int]] = {}
    found = []
    for place, name, operands in INSTRUCTION.findall(text):
        parts = operands.split(",")
        width = max((n for suffix, n in WIDTHS.items() if suffix in name), default=1)
        touched = {int(number) for number in re.findall(r"\bR(\d+)\b", operands)}
        if name.split(".")[0] in STORES:
            touched = {number + i for number in touched for i in range(width)}
        pending = {at: registers for at, registers in pending.items() if not registers & touched}
        loaded = re.match(r"R(\d+)$", parts[0].strip())
        if name.startswith("LDS") and loaded:
            first = int(loaded.group(1))
            pending[place] = set(range(first, first + width))
        if name.startswith("UBLKCP") and pending:
            found.append((place, tuple(sorted(pending))))
    return found


def test_a_copy_before_the_first_use_of_a_load_is_found() -> None:
    text = """
        /*0010*/                   LDS.128 R76, [R8+UR8] ;
        /*0020*/                   FMUL R11, R21, R17 ;
        /*0030*/                   UBLKCP.S.G [UR8], [UR20], UR35 ;
        /*0040*/                   FMUL R81, R48, R79 ;
    """
    assert copies_over_unread(text) == [("0030", ("0010",))]


def test_a_copy_behind_a_use_of_every_load_is_sound() -> None:
    text = """
        /*0010*/                   LDS.128 R76, [R8+UR8] ;
        /*0020*/                   LDS R5, [R8+UR8+0x10] ;
        /*0030*/              @!P0 FADD R81, R48, R79 ;
        /*0040*/                   STG.E.64 desc[UR22][R82.64], R4 ;
        /*0050*/                   UBLKCP.S.G [UR8], [UR20], UR35 ;
    """
    assert copies_over_unread(text) == []


def test_a_place_is_filled_again_only_after_the_values_loaded_from_it_were_used(tmp_path: Path) -> None:
    tool = find_disassembler()
    if tool is None:
        pytest.skip("nvdisasm (nvidia-cuda-nvdisasm) is not installed")
    env = {
        **os.environ, "PYTHONPATH": f"{ROOT / 'kernels'}:{ROOT}", "CUTE_DSL_ARCH": "sm_90a",
        "CUTE_DSL_KEEP": "ptx,cubin", "CUTE_DSL_DUMP_DIR": str(tmp_path), "CUTE_DSL_NO_CACHE": "1",
    }  # fmt: skip
    command = [sys.executable, "-c", BUILD, str(tmp_path)]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (text,) = disassemble(tool, [(tmp_path / "ring.cubin").read_bytes()])
    assert isinstance(text, str), text
    assert len(re.findall(r"\bUBLKCP\b", text)) == 4
    assert copies_over_unread(text) == []
