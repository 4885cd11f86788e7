"""Call one fused op of an implementation with the arguments of its `OpSpec`.

Weights are laid out once, as at load time; what remains is one call that allocates nothing, which is what is
tested, timed and captured.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from k3_decode.op_table import load_ops
from k3_decode.ops import OPS
from k3_decode.ops.contract import Role
from k3_decode.shapes import NANO, RankShapes

__all__ = ["bind"]

LAID_OUT = frozenset(
    {"projection", "moe_front", "experts", "situ_mlp", "latent_tail", "mla_query", "mla_value"}
)
"""Ops of which some implementation takes its weights in a layout of its own."""


def bind(op: str, implementation: str, args: Mapping[str, Any], launches: torch.Tensor) -> Callable[[], None]:
    """A call of `op` on `args`; raises `ValueError` for an unknown implementation."""
    table = load_ops(implementation, _shapes_of(op, args), launches.device)
    weights = [p.name for p in OPS[op].params if p.role is Role.WEIGHT and p.name in args]
    rest = {name: value for name, value in args.items() if name not in weights}
    kept = _kept_weights(op, weights)
    prepared = table[op].prepare(**{n: args[n] for n in weights if n not in kept}) if op in LAID_OUT else {}
    plain = {} if op in LAID_OUT else {name: args[name] for name in weights}
    return partial(
        table[op].run, launches=launches, **rest, **prepared, **plain, **{name: args[name] for name in kept}
    )


def _kept_weights(op: str, weights: list[str]) -> tuple[str, ...]:
    """Weights that `prepare` does not take: small ones that every implementation reads as they are."""
    return tuple(name for name in weights if (op, name) == ("mla_query", "kv_norm"))


def _shapes_of(op: str, args: Mapping[str, Any]) -> RankShapes:
    """Shapes from which an implementation sizes its workspaces; only experts and the MLP have any."""
    from dataclasses import replace

    model = NANO
    if op == "experts":
        inter = args["w2"].shape[-1] * 2
        model = replace(NANO, expert_inter=inter, top_k=args["ids"].shape[-1])
    if op == "situ_mlp":
        inter = args["down_weight"].shape[-1]
        model = replace(NANO, shared_inter=inter, dense_inter=inter)
    return RankShapes(model, 1)
