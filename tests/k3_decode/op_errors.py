"""How far a call is from the oracle, by output, in units of the row's scale."""

import importlib
from collections.abc import Callable, Mapping

import torch
from k3_decode.ops.contract import LAUNCH_SLOTS, Args, OpSpec

ULP = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-23, torch.float8_e4m3fn: 2.0**-4}
"""Unit in the last place of a value just below a power of two, relative to it."""
HARD_CAPS = {torch.bfloat16: 0.02, torch.float32: 1e-5, torch.float8_e4m3fn: 0.07}
"""No row may be further off than this, whatever stock does; fp8 is half a step of e4m3 and a little."""
STATE_CAP = 0.01
"""Of KDA's fp32 state, whose decay comes from logits that stock rounds to bf16."""


def cpu_op(name: str) -> Callable[..., None]:
    """The CPU implementation of an op."""
    function: Callable[..., None] = getattr(importlib.import_module(f"k3_decode.cpu.{name}"), name)
    return function


def run_stock(spec: OpSpec, args: Args) -> Args:
    """Arguments after one stock call; the given ones are untouched."""
    copy = clones(args)
    spec.stock(**copy)
    return copy


def run_cpu(spec: OpSpec, args: Args) -> Args:
    """Arguments after one call of the CPU op, `launches` among them; the given ones are untouched."""
    copy = clones(args)
    copy["launches"] = torch.zeros(LAUNCH_SLOTS, dtype=torch.int32)
    cpu_op(spec.name)(**copy)
    return copy


def clones(args: Args) -> Args:
    """Copies at the same strides."""
    return {name: _clone(value) if isinstance(value, torch.Tensor) else value for name, value in args.items()}


def tensor(value: object) -> torch.Tensor:
    """The value, which must be a tensor."""
    assert isinstance(value, torch.Tensor)
    return value


def hard_cap(output: str, dtype: torch.dtype) -> float:
    """The cap of one output."""
    return STATE_CAP if output == "state" else HARD_CAPS[dtype]


def deviation(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest |got - want| over a row's largest |want|; infinite where NaN or infinities differ."""
    wide = got.double()
    settled = (wide == want) | (torch.isnan(wide) & torch.isnan(want))
    gap = torch.where(settled, 0.0, (wide - want).abs()).nan_to_num(nan=torch.inf)
    scale = want.abs().nan_to_num(nan=0.0, posinf=0.0).amax(-1, keepdim=True)
    return float(torch.where(gap == 0, 0.0, gap / scale).amax())


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits, NaN payloads included."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    a, b = left.contiguous(), right.contiguous()
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if a.numel() else True


def outputs(spec: OpSpec, result: Args, truth: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Deviation of each output or state that is not exact."""
    inexact = [param.name for param in spec.written() if not param.is_exact]
    return {name: deviation(tensor(result[name]), truth[name]) for name in inexact}


def _clone(value: torch.Tensor) -> torch.Tensor:
    span = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)) + 1
    flat = value.as_strided((span,), (1,), value.storage_offset()).clone()
    return flat.as_strided(value.shape, value.stride())
