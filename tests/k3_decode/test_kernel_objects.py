"""Compiled kernels as files: names that follow form and architecture, and forms found without compiling."""

import importlib
import pkgutil

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL (nvidia-cutlass-dsl) is not installed")

import k3_decode.cute
from k3_decode.cute import mla_query, router
from k3_decode.kernel_objects import COMPILERS, Form, recorded_forms

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


NO_COMPILERS = {"has_warpgroups", "multiprocessors"}
"""Memoised too, and ask the device."""


def test_every_memoised_function_of_a_kernel_module_is_one_that_recording_knows() -> None:
    names = set()
    for found in pkgutil.iter_modules(k3_decode.cute.__path__):
        module = importlib.import_module(f"k3_decode.cute.{found.name}")
        names |= {name for name, value in vars(module).items() if hasattr(value, "cache_info")}
    assert names - NO_COMPILERS == set(COMPILERS)


def test_a_launch_that_a_module_has_by_import_is_recorded_as_its_owners() -> None:
    with recorded_forms() as found:
        mla_query.launch_wide(1536, 2, False)
    assert found == [Form("k3_decode.cute.mla_query_wide", "launch_wide", (1536, 2, False))]
