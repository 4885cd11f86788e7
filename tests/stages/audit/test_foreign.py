"""Machine code without a pack: what was read is counted, and what was not is shown."""

import zipfile
from pathlib import Path
from random import Random

import pytest
from typer.testing import CliRunner

from harness.cli.audit import app
from harness.domain.errors import EvidenceError, InputError
from harness.stages.audit import foreign
from harness.stages.audit.cubin import parse_cubin
from harness.stages.audit.foreign import cubins_in, read_cubin
from harness.stages.audit.sass import unread_lines

DATA = Path(__file__).parent / "data"
needs_disassembler = pytest.mark.skipif(
    not pytest.importorskip("importlib.metadata").packages_distributions().get("nvidia"),
    reason="NVIDIA's disassembler is not installed",
)


@needs_disassembler
def test_a_cubin_without_a_pack_is_read_to_the_last_line() -> None:
    report = read_cubin(DATA / "hoisted_load_fault.cubin")
    (kernel,) = report.kernels
    assert (report.target, report.unread, report.error) == ("sm_90a", 0, "")
    assert (kernel.accesses, kernel.traced, kernel.before_wait, kernel.unresolved) == (2, 2, 1, 0)


def test_a_file_that_is_cut_short_is_reported_and_not_raised(tmp_path: Path) -> None:
    cut = tmp_path / "cut.cubin"
    cut.write_bytes((DATA / "hoisted_load_fault.cubin").read_bytes()[:700])
    report = read_cubin(cut)
    assert report.kernels == ()
    assert "not a complete 64-bit ELF file" in report.error


def test_a_cubin_of_which_any_bytes_were_changed_is_read_or_refused_in_words() -> None:
    content = (DATA / "hoisted_load_fault.cubin").read_bytes()
    # The table of sections far outside, and 400 files with up to 8 bytes changed.
    changed = [content[:0x28] + b"\xff" * 8 + content[0x30:]]
    random = Random(3)
    for _ in range(400):
        edited = bytearray(content)
        for _ in range(random.choice((1, 2, 8))):
            edited[random.randrange(len(edited))] = random.choice((0, 1, 255, random.randrange(256)))
        changed.append(bytes(edited))
    refused = 0
    for cubin in changed:
        try:
            parse_cubin(cubin)
        except EvidenceError:  # its words are those of a file that is cut short
            refused += 1
    assert 0 < refused < len(changed)


SECTIONS = """
	.target	sm_90a
	.section	.text.planted,"ax"
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   ?novel R1 ;
        /*0020*/                   EXIT ;
	.section	.text.helper,"ax"
        /*0000*/                   RET.ABS.NODEC R20 0x0 ;
"""


def test_what_could_not_be_read_of_a_cubin_is_said_and_ends_with_code_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(foreign, "disassembled", lambda _: SECTIONS)
    shown = CliRunner().invoke(app, ["read", str(DATA / "hoisted_load_fault.cubin")])
    assert shown.exit_code == 1
    words = " ".join(shown.output.split())
    assert "code of 1 functions has no record of its parameters, first helper" in words
    assert "not understood: /*0010*/ ?novel R1 ;" in words
    assert "1 kernels in 1 cubins; 1 lines were not understood. Nothing is judged" in words


def test_an_instruction_that_is_not_understood_is_named() -> None:
    text = "        /*0010*/                   S2R R7, SR_TID.X ;\n        /*0020*/          ?novel R1 ;\n"
    assert unread_lines(text) == ["/*0020*/          ?novel R1 ;"]


def test_cubins_of_a_wheel_are_chosen_by_name(tmp_path: Path) -> None:
    wheel = tmp_path / "kernels.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        for name in ("a/one.cubin", "a/../../two.cubin", "a/readme.txt"):
            file.writestr(name, b"x")
    with cubins_in(wheel) as found:
        assert [p.name for p in found] == ["0-one.cubin", "1-two.cubin"]
        assert {p.parent for p in found} == {found[0].parent}
    with cubins_in(wheel, limit=1) as found:
        assert [p.name for p in found] == ["0-one.cubin"]
    with cubins_in(wheel, "one") as found:
        assert [p.name for p in found] == ["0-one.cubin"]
    with (
        pytest.raises(InputError, match="holds no cubin whose name contains 'three'"),
        cubins_in(wheel, "three"),
    ):
        pass


def test_a_missing_file_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"), cubins_in(tmp_path / "none.cubin"):
        pass


def test_of_many_cubins_some_are_taken_from_the_whole_of_the_wheel(tmp_path: Path) -> None:
    wheel = tmp_path / "kernels.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        for number in range(10):
            file.writestr(f"k{number}.cubin", b"x")
    with cubins_in(wheel, limit=4) as found:
        assert [p.name for p in found] == ["0-k0.cubin", "1-k2.cubin", "2-k5.cubin", "3-k7.cubin"]
