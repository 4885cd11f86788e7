"""What the compiling process reads off the compiler's own host code, and how it answers."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from k3_decode import compile as compiling
from k3_decode.compile import compile_variants, main
from k3_decode.cute.variant import Variant
from k3_decode.environment_reads import noted_reads
from k3_decode.launches import Launch, parse_launches

HOST_CODE = """
func.func @launch(%arg0: !memref_gmem_bf16 loc("-":1:2), %arg8: i32 loc("-":1:3), %arg9: !cuda.stream) -> i32 {
%c0_i32 = arith.constant 0 : i32 loc(#loc1)
%c1_i32 = arith.constant 1 : i32 loc(#loc1)
%c7_i32 = arith.constant 7 : i32 loc(#loc2)
%c128_i32 = arith.constant 128 : i32 loc(#loc3)
%c102784_i64 = arith.constant 102784 : i64 loc(#loc4)
%lay = cute.get_layout(%arg0) : !memref_gmem_bf16 loc(#loc4)
%0 = cute.get_shape(%lay) : (!cute.layout<"(?{div=2},7168):(?{i64 div=8},1)">) -> !cute.shape<"(?{div=2},7168)"> loc(#loc4)
%e0, %e1 = cute.get_leaves(%0) : !cute.shape<"(?{div=2},7168)"> loc(#loc4)
%itup = cute.to_int_tuple(%e0) : !cute.shape<"?"> to !cute.int_tuple<"?"> loc(#loc4)
%int_tuple = cute.make_int_tuple() : () -> !cute.int_tuple<"7"> loc(#loc4)
%mul = cute.tuple_mul(%itup, %int_tuple) : (!cute.int_tuple<"?">, !cute.int_tuple<"7">) -> !cute.int_tuple<"?"> loc(#loc4)
%1 = cute.get_scalars(%mul) : !cute.int_tuple<"?{div=7}"> loc(#loc4)
%4 = cuda.launch_cfg.create<max_attrs = 17 : i32> (blockDim = (%c128_i32, %c1_i32, %c1_i32), dynamicSmemBytes = %c102784_i64, gridDim = (%1, %c1_i32, %c1_i32), stream = %arg9) : i32
cuda.launch_cfg.programmatic_stream_serialization_allowed[%4] %c1_i32 : !cuda.launch_cfg<max_attrs = 17>, i32
cuda.launch_cfg.cluster_dim[%4] (%c7_i32, %c1_i32, %c1_i32) : !cuda.launch_cfg<max_attrs = 17>, i32, i32, i32
%5 = cuda.launch_ex @kernels::@kernel_mix<%4> (%arg0) : !cuda.launch_cfg<max_attrs = 17>
%6 = cuda.launch_cfg.create<max_attrs = 17 : i32> (blockDim = (%threads, %c1_i32, %c1_i32), dynamicSmemBytes = %2, gridDim = (%arg8, %hidden, %c1_i32), stream = %arg9) : i32
cuda.launch_cfg.cooperative[%6] %c1_i32 : !cuda.launch_cfg<max_attrs = 17>, i32
cuda.launch_cfg.programmatic_stream_serialization_allowed[%6] %c0_i32 : !cuda.launch_cfg<max_attrs = 17>, i32
%7 = cuda.launch_ex @kernels::@kernel_sum<%6> (%arg0) : !cuda.launch_cfg<max_attrs = 17>
"""  # noqa: E501  # as the compiler writes it


def test_launches_say_whether_they_may_start_early_and_how_blocks_are_grouped() -> None:
    assert parse_launches(HOST_CODE) == (
        Launch("kernel_mix", True, (7, 1, 1), (128, 1, 1), 102784, ("a0.0 7 *", "1", "1"), False),
        Launch("kernel_sum", False, (1, 1, 1), (None, 1, 1), None, ("a8", None, "1"), True),
    )


def _variant(name: str) -> Variant:
    def fail() -> object:
        raise ValueError("no such layout")

    return Variant("copy", name, ("sm_90a",), fail, (), "cute/copy.py")


def test_a_variant_that_does_not_compile_leaves_its_error_and_no_half_written_record(tmp_path: Path) -> None:
    folder, dump = tmp_path / "sm_90a", tmp_path / "dump"
    folder.mkdir()
    dump.mkdir()
    errors = compile_variants([_variant("copy_1")], ("sm_90a",), tmp_path, dump)
    assert errors == {("copy_1", "sm_90a"): "ValueError: no such layout"}
    assert [p.name for p in folder.iterdir()] == ["copy_1.json"]
    assert '"error": "ValueError: no such layout"' in (folder / "copy_1.json").read_text()


def _asking_variant(ask: Callable[[], object]) -> Variant:
    def build() -> object:
        ask()
        raise ValueError("nothing to compile")

    return Variant("copy", "copy_1", ("sm_90a", "sm_100a"), build, (), "cute/copy.py")


@pytest.mark.parametrize(
    ("ask", "what"),
    [
        (lambda: os.environ.get("CUTE_DSL_ARCH"), "CUTE_DSL_ARCH"),
        (lambda: os.getenv("FAST"), "FAST"),
        (lambda: "FAST" in os.environ, "FAST"),
        (lambda: dict(os.environ), "all"),
        (lambda: os.path.expandvars("$FAST"), "FAST"),
        (lambda: eval("os.environ.get('FAST')"), "FAST"),
        (lambda: exec(compile("os.getenv('FAST')", "/nowhere/kernel.py", "exec")), "FAST"),
        (lambda: len(os.environ), "all"),
        (lambda: repr(os.environ), "all"),
        (lambda: list(os.environ), "all"),
        (lambda: os.environ == {}, "all"),
        (lambda: os.environ | {}, "all"),
    ],
)
def test_a_kernel_that_reads_the_environment_while_it_is_traced_does_not_compile(
    ask: Callable[[], object], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("sm_90a", "sm_100a", "dump"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(compiling, "ROOT", Path(__file__).resolve().parent)
    errors = compile_variants([_asking_variant(ask)], ("sm_90a", "sm_100a"), tmp_path, tmp_path / "dump")
    assert len(errors) == 2
    for error in errors.values():
        assert error is not None
        assert error.startswith("test_compile.py:")
        assert f"reads {what} of the environment" in error


def test_what_somebody_else_reads_of_the_environment_is_no_matter(tmp_path: Path) -> None:
    with noted_reads(tmp_path) as reads:
        os.environ.get("CUTE_DSL_ARCH")
    assert reads == []
    with noted_reads(Path(__file__).resolve().parent) as reads:
        pass
    os.environ.get("CUTE_DSL_ARCH")
    assert reads == []


def test_the_exit_code_is_1_when_one_variant_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compiling, "all_variants", lambda: (_variant("copy_1"),))
    monkeypatch.setattr(compiling.os, "environ", {})
    assert main(["--arch", "sm_90a", "--out", str(tmp_path), "copy_1"]) == 1
    assert capsys.readouterr().err == "copy_1 sm_90a: ValueError: no such layout\n"


def test_an_unknown_variant_is_a_usage_error_that_names_the_known_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compiling, "all_variants", lambda: (_variant("copy_1"),))
    monkeypatch.setattr(compiling.os, "environ", {})
    with pytest.raises(SystemExit) as ended:
        main(["--arch", "sm_90a", "--out", str(tmp_path), "copy_2"])
    assert ended.value.code == 2
    assert "sm_90a: no variants copy_2; known: copy_1" in capsys.readouterr().err
