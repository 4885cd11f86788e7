"""Cubins joined for one run of the disassembler read as each of them does alone."""

from pathlib import Path

import pytest
from k3_decode.disassembly import DisassemblyError, disassemble, find_disassembler, joined

DATA = Path(__file__).resolve().parents[1] / "stages" / "audit" / "data"
CUBINS = tuple((DATA / f"hoisted_load_{kind}.cubin").read_bytes() for kind in ("fault", "fixed"))

ANSWER = """	.target	sm_90a
//--------------------- .text.cubin0$$planted --------------------------
	.section	.text.cubin0$$planted,"ax",@progbits
        /*0000*/   BRA `(.L_x_4) ;
.L_x_4:
        /*0010*/   EXIT      (*"Remark"*);
//--------------------- .text.cubin1$$planted --------------------------
	.section	.text.cubin1$$planted,"ax",@progbits
        /*0000*/   BRA `(.L_x_9) ;
.L_x_9:
//--------------------- SYMBOLS --------------------------
	.type	cubin0$$planted,@function
"""


def test_an_answer_is_cut_by_cubin_with_labels_counted_from_0_in_each() -> None:
    first, second = disassemble(Path("tool"), CUBINS, lambda *_: ANSWER)
    assert first == (
        "\t.target\tsm_90a\n"
        "//--------------------- .text.planted \n"
        '\t.section\t.text.planted,"ax",@progbits\n'
        "        /*0000*/   BRA `(.L_x_0) ;\n"
        ".L_x_0:\n"
        '        /*0010*/   EXIT (*"Remark"*);\n'
    )
    assert isinstance(second, str)
    assert "BRA `(.L_x_0)" in second
    assert "SYMBOLS" not in second


def test_a_cubin_whose_kernels_are_not_in_the_answer_is_read_alone() -> None:
    asked: list[bytes] = []

    def run(tool: Path, cubin: bytes) -> str:
        asked.append(cubin)
        return ANSWER.split("//--------------------- .text.cubin1")[0] if len(asked) == 1 else "alone"

    assert disassemble(Path("tool"), CUBINS, run)[1] == "alone"
    assert asked[1:] == [CUBINS[1]]


def test_what_is_no_cubin_spoils_none_of_the_others() -> None:
    def run(tool: Path, cubin: bytes) -> str:
        if cubin == b"text":
            raise DisassemblyError("no ELF file")
        return "alone"

    texts = disassemble(Path("tool"), [CUBINS[0], b"text", CUBINS[1]], run)
    assert (texts[0], texts[2]) == ("alone", "alone")
    assert isinstance(texts[1], DisassemblyError)


def test_cubins_of_two_architectures_are_not_joined() -> None:
    other = CUBINS[0][:0x30] + b"\x02\x64\x00\x09" + CUBINS[0][0x34:]
    with pytest.raises(DisassemblyError, match="different architectures"):
        joined([CUBINS[0], other])


def test_joined_cubins_read_as_each_does_alone() -> None:
    tool = find_disassembler()
    if tool is None:
        pytest.skip("no nvdisasm (nvidia-cuda-nvdisasm)")
    together = disassemble(tool, CUBINS)
    assert together == tuple(disassemble(tool, [cubin])[0] for cubin in CUBINS)
    assert all("//## File" in str(text) or "LDG" in str(text) for text in together)
    assert together[0] != together[1]
