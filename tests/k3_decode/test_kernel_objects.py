"""Compiled kernels as files: names that follow form and architecture, and forms found without compiling."""

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL (nvidia-cutlass-dsl) is not installed")

from k3_decode.cute import router
from k3_decode.kernel_objects import Form, recorded_forms

FORM = Form("k3_decode.cute.router", "_compile", (896, 16))


def test_another_form_or_architecture_has_another_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    name = FORM.file_name()
    assert name.startswith("router-")
    assert name == Form("k3_decode.cute.router", "_compile", (896, 16)).file_name()
    assert name != Form("k3_decode.cute.router", "_compile", (256, 8)).file_name()
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_100a")
    assert name != FORM.file_name()


def test_a_recorded_launch_compiles_nothing_and_is_found_once() -> None:
    before = router._compile
    with recorded_forms() as found:
        for _ in range(2):
            router._compile(896, 16)("anything")
    assert found == [FORM]
    assert router._compile is before
