"""Seeded weights over a stand-in of vLLM's dummy loader: always equal, useful, and ties as rare as asked."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from k3_decode.in_vllm.seeded_weights import register

LOADER = "vllm.model_executor.model_loader.dummy_loader"


def stock_fill(tensor: Any, low: float = 0, high: float = 0, seed: int = 0, name: str = "") -> None:
    """As vLLM's own: it takes a seed."""
    tensor.fill_(seed % 251)


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's loader with the seeded initialiser in it."""
    made: Any = ModuleType(LOADER)
    made.initialize_single_dummy_weight = stock_fill
    made.DummyModelLoader = SimpleNamespace(load_weights=lambda self, model, config: None)
    parts = LOADER.split(".")
    for end in range(1, len(parts)):
        package = ModuleType(".".join(parts[:end]))
        monkeypatch.setitem(sys.modules, package.__name__, package)
    for end in range(2, len(parts) + 1):
        child = made if end == len(parts) else sys.modules[".".join(parts[:end])]
        setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], child)
    monkeypatch.setitem(sys.modules, LOADER, made)
    register()
    return made


@pytest.fixture
def fill(loader: Any) -> Any:
    """The initialiser, as the loader calls it."""
    return loader.initialize_single_dummy_weight


def drawn(fill: Any, name: str, *shape: int) -> torch.Tensor:
    tensor = torch.empty(shape)
    fill(tensor, name=name)
    return tensor


def test_norms_are_one_and_matrices_have_unit_gain(fill: Any) -> None:
    assert drawn(fill, "norm", 8).tolist() == [1.0] * 8
    matrix = drawn(fill, "weight", 256, 400)
    assert float(matrix.std()) == pytest.approx(1 / 20, rel=0.02)


def test_codes_are_vllms_own_with_a_seed_of_their_own(fill: Any) -> None:
    codes = torch.empty(4, dtype=torch.uint8)
    fill(codes, name="w13_weight")
    assert codes.tolist() == [1235 % 251] * 4


@pytest.mark.parametrize(
    ("extra", "limit"), [(None, 0.1), ({}, 0.1), ({"k3_decode_router_spread": 100}, 100.0)]
)
def test_the_selections_bias_is_as_wide_as_the_configuration_asks(
    loader: Any, extra: dict[str, int] | None, limit: float
) -> None:
    config = SimpleNamespace(additional_config=extra)
    model = SimpleNamespace(vllm_config=config, modules=list)
    loader.DummyModelLoader.load_weights(None, model, None)
    fill = loader.initialize_single_dummy_weight
    widest = float(drawn(fill, "e_score_correction_bias", 896).abs().max())
    assert 0.98 * limit < widest <= limit
    assert float(drawn(fill, "dt_bias", 896).abs().max()) <= 0.1
