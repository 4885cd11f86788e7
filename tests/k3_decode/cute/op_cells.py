"""One op in one cell: fresh arguments, a call, and how far it and stock are from the float64 oracle."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from k3_decode.ops.contract import Args, Cell, OpSpec, Role

FLOOR = {torch.bfloat16: 2.0**-7, torch.float32: 2.0**-22, torch.float8_e4m3fn: 2.0**-3}
"""Two ulp of each output type, relative to the row."""


def spec_of(op: str) -> OpSpec:
    """The op's signature, oracle and stock composition."""
    spec: OpSpec = importlib.import_module(f"k3_decode.ops.{op}").SPEC
    return spec


def arguments(op: str, cell: Cell, regime: str = "gaussian", device: Any = "cpu", seed: int = 3) -> Args:
    """Seeded arguments of the op."""
    generator = torch.Generator().manual_seed(seed)
    return spec_of(op).make_args(cell, regime, generator, torch.device(device))


def written_copy(op: str, args: Args) -> Args:
    """The arguments with what a call may write copied at the same strides."""
    names = {p.name for p in spec_of(op).params if p.role in (Role.STATE, Role.OUTPUT)}
    return {k: _clone(v) if k in names and isinstance(v, torch.Tensor) else v for k, v in args.items()}


def require_close(op: str, args: Args, call: Callable[[Args], None]) -> Args:
    """Calls on fresh copies and asserts: exact outputs equal, untouched state unchanged, errors within 2 x
    stock + 2 ulp.

    Returns the arguments after the call.
    """
    spec = spec_of(op)
    truth = spec.oracle(args)
    masks = spec.touched(args) if spec.touched else {}
    result, stock = written_copy(op, args), written_copy(op, args)
    call(result)
    spec.stock(**stock)
    for param in spec.written():
        got, want, base = result[param.name], truth[param.name], stock[param.name]
        before = args[param.name]
        assert isinstance(got, torch.Tensor)
        assert isinstance(base, torch.Tensor)
        assert isinstance(before, torch.Tensor)
        if param.name in masks:
            mask = masks[param.name]
            assert torch.equal(_bits(got)[~mask], _bits(before)[~mask]), (
                f"{param.name} changed where it must not"
            )
            got, base, want = got[mask].unsqueeze(0), base[mask].unsqueeze(0), want[mask].unsqueeze(0)
        if param.is_exact:
            assert torch.equal(got, want.to(got.dtype)), f"{param.name} differs from its exact value"
            continue
        error, allowed = _row_error(got, want), 2 * _row_error(base, want) + FLOOR[got.dtype]
        assert (error <= allowed).all(), f"{param.name}: {error.max().item()} against {allowed.max().item()}"
    return result


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements as integers, so that NaN equals itself."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def _row_error(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Relative L2 error of each row along axis 0; infinities that agree count as exact."""
    a, b = got.double().flatten(1), want.double().flatten(1)
    agree = a == b
    a, b = a.masked_fill(agree & a.isinf(), 0.0), b.masked_fill(agree & b.isinf(), 0.0)
    ratio: torch.Tensor = (a - b).norm(dim=1) / b.norm(dim=1).clamp_min(1e-300)
    return ratio


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    """A copy at the same strides, gaps included."""
    if tensor.dtype == torch.float8_e4m3fn:
        return _clone(tensor.view(torch.uint8)).view(tensor.dtype)
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    flat = tensor.as_strided((span,), (1,), tensor.storage_offset()).clone()
    return flat.as_strided(tensor.shape, tensor.stride())


def assert_activations_after_wait(ptx: str, architecture: str) -> None:
    """Before the dependency wait only constants (weights' own loads, cp.async), after it none of them."""
    before, after = ptx.split("griddepcontrol.wait", 1)
    assert f".target {architecture}" in before
    assert "ld.global" not in before
    assert "ld.weak.global" not in after
    assert "griddepcontrol.launch_dependents" in before
