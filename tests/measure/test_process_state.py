"""What a candidate could leave changed in a process is named."""

import gc
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from harness.measure.process_state import changed_names, snapshot

HERE = Path(__file__).parent


def set_variable() -> Callable[[], object]:
    os.environ["PROCESS_STATE_TEST"] = "1"
    return lambda: os.environ.pop("PROCESS_STATE_TEST")


def draw_random() -> Callable[[], object]:
    random.random()
    return lambda: None


def draw_torch() -> Callable[[], object]:
    torch.rand(1)
    return lambda: None


def set_default_dtype() -> Callable[[], object]:
    torch.set_default_dtype(torch.float64)
    return lambda: torch.set_default_dtype(torch.float32)


def set_cudnn() -> Callable[[], object]:
    torch.backends.cudnn.benchmark = True
    return lambda: setattr(torch.backends.cudnn, "benchmark", False)


def hook_modules() -> Callable[[], object]:
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    return handle.remove


def patch_tensor() -> Callable[[], object]:
    before = torch.Tensor.tolist
    torch.Tensor.tolist = lambda self: []  # type: ignore[assignment,method-assign]  # the patch under test
    return lambda: setattr(torch.Tensor, "tolist", before)


def patch_elsewhere() -> Callable[[], object]:
    import json

    before = json.dumps
    json.dumps = lambda *_, **__: ""
    return lambda: setattr(json, "dumps", before)


def stop_collecting() -> Callable[[], object]:
    gc.disable()
    return gc.enable


def handle_signal() -> Callable[[], object]:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    return lambda: signal.signal(signal.SIGUSR1, before)


def add_import_path() -> Callable[[], object]:
    sys.path.append("/nowhere")
    return lambda: sys.path.remove("/nowhere")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (set_variable, "env:PROCESS_STATE_TEST"),
        (draw_random, "rng:python"),
        (draw_torch, "rng:torch"),
        (set_default_dtype, "torch:default_dtype"),
        (set_cudnn, "torch:cudnn_benchmark"),
        (hook_modules, "hook:global_forward_hooks"),
        (patch_tensor, "class:torch.Tensor.tolist"),
        (patch_elsewhere, "elsewhere:json.dumps"),
        (stop_collecting, "hook:gc"),
        (handle_signal, "hook:signals"),
        (add_import_path, "import_path"),
    ],
)
def test_a_change_is_named(change: Callable[[], Callable[[], object]], name: str) -> None:
    before = snapshot(HERE)
    undo = change()
    try:
        assert name in changed_names(before, snapshot(HERE))
    finally:
        undo()


def test_an_untouched_process_is_the_same() -> None:
    before = snapshot(HERE)
    assert changed_names(before, snapshot(HERE)) == ()


def test_importing_more_is_no_change() -> None:
    before = snapshot(HERE)
    sys.modules["a_module_of_a_test"] = type(sys)("a_module_of_a_test")
    sys.modules["a_module_of_a_test"].f = test_importing_more_is_no_change  # type: ignore[attr-defined]  # new
    try:
        assert changed_names(before, snapshot(HERE)) == ()
    finally:
        del sys.modules["a_module_of_a_test"]
