"""Machine code without a pack: what was read is counted, and what was not is shown."""

import zipfile
from pathlib import Path

import pytest

from harness.domain.errors import InputError
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
