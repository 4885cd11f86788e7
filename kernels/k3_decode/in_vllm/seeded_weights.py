"""vLLM plugin for tests and measurements: useful random weights for `--load-format dummy`, always equal.

vLLM's own dummy weights are within 1e-3 of zero in every tensor, norms too, so all logits are about zero and
every comparison passes. Here norms are 1, matrices N(0, 1 / fan-in), and small vectors keep useful ranges;
each tensor has a seed of its own, counted in model order. The dummy loader also leaves the copies of the
convolution taps and of the norm that vLLM's fused KDA decode reads as they were allocated: they are filled
here from the parameters, as loading a checkpoint does.

Near ties of a random router flip with any rounding, and every flip moves all later log-probabilities: two
correct arms then differ by tenths. `k3_decode_router_spread: 100` in `--additional-config` draws the
selection's bias from so wide a range that ties are rare, which leaves the arithmetic to be compared.
"""

import math
from typing import Any

__all__ = ["SPREAD_SETTING", "register"]

SPREAD_SETTING, SPREAD = "k3_decode_router_spread", 0.1
SELECTION_BIAS = "e_score_correction_bias"

FIRST_SEED = 1234
_MARK = "_k3_decode_seeded"


def register() -> None:
    """Entry point `vllm.general_plugins`; safe to call again. Weights of a checkpoint are not touched."""
    import torch
    import vllm.model_executor.model_loader.dummy_loader as loader

    if getattr(loader, _MARK, False):
        return
    setattr(loader, _MARK, True)
    stock_fill, stock_load = loader.initialize_single_dummy_weight, loader.DummyModelLoader.load_weights
    seen, spread = [0], [SPREAD]

    @torch.no_grad()  # type: ignore[untyped-decorator,unused-ignore]  # by torch version
    def fill(tensor: Any, low: float = 0, high: float = 0, seed: int = 0, name: str = "") -> None:
        seen[0] += 1
        own = FIRST_SEED + seen[0]
        if tensor.device.type == "meta" or not _is_wide_float(tensor):
            stock_fill(tensor, seed=own, name=name)
            return
        generator = torch.Generator(device=tensor.device).manual_seed(own)
        if name == "A_log":
            tensor.uniform_(0.0, 1.0, generator=generator)
        elif name.endswith(SELECTION_BIAS):
            tensor.uniform_(-spread[0], spread[0], generator=generator)
        elif "bias" in name:
            tensor.uniform_(-0.1, 0.1, generator=generator)
        elif tensor.dim() <= 1:
            tensor.fill_(1.0)
        elif tensor.dim() == 3 and tensor.shape[1] == 1:  # short convolution
            tensor.uniform_(-0.5, 0.5, generator=generator)
        else:
            tensor.normal_(0.0, 1.0 / math.sqrt(tensor.shape[-1]), generator=generator)

    def load_weights(self: Any, model: Any, model_config: Any) -> None:
        spread[0] = _asked_spread(model)
        stock_load(self, model, model_config)
        for module in model.modules():
            _fill_decode_copies(module)

    loader.initialize_single_dummy_weight = fill
    loader.DummyModelLoader.load_weights = load_weights


def _asked_spread(model: Any) -> float:
    """What the served configuration says, where it says something."""
    config = getattr(model, "vllm_config", None)
    extra = getattr(config, "additional_config", None)
    return float(extra.get(SPREAD_SETTING, SPREAD)) if isinstance(extra, dict) else SPREAD


def _is_wide_float(tensor: Any) -> bool:
    import torch

    return torch.is_floating_point(tensor) and torch.finfo(tensor.dtype).bits >= 16


def _fill_decode_copies(module: Any) -> None:
    """Of a KDA layer: taps in the fused kernel's order, and the norm in fp32."""
    taps = getattr(module, "decode_conv1d_weight", None)
    if taps is not None:
        kinds, width, channels = taps.shape
        taps.copy_(module.conv1d.weight.data.view(kinds, channels, width).transpose(1, 2))
    norm = getattr(module, "decode_norm_weight", None)
    if norm is not None:
        norm.copy_(module.o_norm.weight.data)
