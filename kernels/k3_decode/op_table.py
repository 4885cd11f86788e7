"""Which implementation of the fused ops the decode step runs on: `cpu`, `cute`, or `stock` to tell them
apart.

An entry takes the arguments of `ops/<op>.py` (its weights as `prepare` left them) and `launches`. Loading a
table imports the implementation and nothing else; `cute` compiles on first use.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from k3_decode.expert_padding import without_padding
from k3_decode.ops import OPS
from k3_decode.ops.contract import Role
from k3_decode.shapes import RankShapes

__all__ = ["IMPLEMENTATIONS", "Bound", "FusedOp", "OpTable", "load_ops", "poisoned"]

IMPLEMENTATIONS = ("stock", "cpu", "cute")
Bound = dict[str, Any]
"""Keyword arguments that stay the same from step to step: weights and workspaces."""
NARROW_INTER = 768
"""Widest shared expert of which a few multiprocessors take a part (`overlap/`)."""
MLP_LAUNCHES = 2
"""Of `cute/situ_mlp.py`: gate and up, then down."""


@dataclass(frozen=True, slots=True)
class FusedOp:
    """One op's implementation."""

    run: Callable[..., None]
    """Takes the op's arguments and `launches`."""
    prepare: Callable[..., Bound]
    """Takes the op's weights, gives what `run` takes in their place; at load time."""
    launches_per_call: int = 1
    """Kernel launches of one call; the same for any number of rows that the envelope allows."""

    from_rows: int = 1
    """Rows from which the op is launched; below, another does its work (for `router`: `experts`)."""
    splits_of: Callable[[int, int, int], int] = lambda requests, rows, heads: 1
    """Of `mla_attend`: parts in which it takes each context, for (requests, rows, heads)."""

    def launches_of(self, rows: int) -> int:
        """Kernel launches that one call for `rows` rows makes."""
        return self.launches_per_call if rows >= self.from_rows else 0


OpTable = Mapping[str, FusedOp]


def load_ops(implementation: str, shapes: RankShapes, device: torch.device) -> OpTable:
    """Every op by name; raises `ValueError` for an implementation that does not exist."""
    if implementation == "stock":
        return {name: FusedOp(_uncounted(spec.stock), _same) for name, spec in OPS.items()}
    if implementation == "cpu":
        return _cpu_ops()
    if implementation == "cute":
        return _cute_ops(shapes, device)
    raise ValueError(f"no implementation {implementation!r}; there are {', '.join(IMPLEMENTATIONS)}")


def poisoned(table: OpTable, op: str, scale: float) -> OpTable:
    """The table with one op made visibly wrong: every other value of its outputs times -`scale`.

    A factor on all values could be undone by a norm behind the op, and a few per cent on some of them are
    less than bf16's rounding leaves of a whole step. Expert ids become the next expert's.
    """
    if op not in table:
        raise ValueError(f"no op {op!r} to poison; there are {', '.join(table)}")
    outputs = tuple(param.name for param in OPS[op].params if param.role is Role.OUTPUT)
    sound = table[op]

    def run(**arguments: Any) -> None:
        sound.run(**arguments)
        for name in outputs:
            if name == "ids":
                arguments[name].add_(1).remainder_(arguments["logits"].shape[1])
            elif arguments[name] is not None:  # an output that a call may leave out
                arguments[name][..., ::2] *= -scale

    return {**table, op: replace(sound, run=run)}


def _same(**weights: torch.Tensor) -> Bound:
    return weights


def _uncounted(function: Callable[..., None]) -> Callable[..., None]:
    def run(*, launches: torch.Tensor, **arguments: Any) -> None:
        function(**arguments)

    return run


def _cpu_ops() -> OpTable:
    from k3_decode.cpu import (
        attn_res,
        experts,
        kda_step,
        latent_tail,
        mla_attend,
        mla_query,
        mla_value,
        moe_front,
        projection,
        router,
        situ_mlp,
    )

    return {
        "attn_res": FusedOp(attn_res.attn_res, _same),
        "projection": FusedOp(projection.projection, projection.prepare),
        "kda_step": FusedOp(kda_step.kda_step, _same),
        "moe_front": FusedOp(moe_front.moe_front, moe_front.prepare),
        "router": FusedOp(router.router, _same),
        "experts": FusedOp(experts.experts, experts.prepare),
        "situ_mlp": FusedOp(situ_mlp.situ_mlp, situ_mlp.prepare),
        "latent_tail": FusedOp(latent_tail.latent_tail, latent_tail.prepare),
        "mla_query": FusedOp(mla_query.mla_query, mla_query.prepare),
        "mla_attend": FusedOp(mla_attend.mla_attend, _same),
        "mla_value": FusedOp(mla_value.mla_value, mla_value.prepare),
    }


def _cute_ops(shapes: RankShapes, device: torch.device) -> OpTable:
    from k3_decode.cute import (
        attn_res,
        expert_layout,
        experts,
        kda_step,
        latent_tail,
        mla_attend,
        mla_query,
        mla_value,
        moe_front,
        narrow_mlp,
        prefetch,
        projection,
        ring,
        router,
        situ_mlp,
    )

    def workspace(size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=device)

    expert_space = workspace(experts.workspace_bytes(inter=shapes.expert_inter, top_k=shapes.model.top_k))
    widest = max(shapes.shared_inter, shapes.dense_inter)
    mlp_space = workspace(situ_mlp.workspace_bytes(inter=widest))

    def prepare_experts(**weights: torch.Tensor) -> Bound:
        cut = without_padding(weights, shapes.expert_width)
        return {"prepared": experts.prepare(**cut), "workspace": expert_space}

    def prepare_mlp(**weights: torch.Tensor) -> Bound:
        return {"prepared": situ_mlp.prepare(**weights), "workspace": mlp_space}

    narrow_space = workspace(narrow_mlp.workspace_bytes())
    model = shapes.model
    form = expert_layout.Form(model.latent, shapes.expert_inter, model.experts, model.top_k, 8)

    def spare() -> int:
        """Multiprocessors that the routed experts do not need."""
        return ring.multiprocessors(device.index) - form.owners

    def run_narrow(*, blocks: int, **arguments: Any) -> None:
        narrow_mlp.narrow_mlp(workspace=narrow_space, blocks=min(blocks, spare()), **arguments)

    def run_experts(*, spared: int = 0, **arguments: Any) -> None:
        experts.experts(spared=min(spared, spare()) if spared else 0, **arguments)

    def prepare_narrow(**weights: torch.Tensor) -> Bound:
        return {"prepared": situ_mlp.prepare(**weights)}

    is_narrow = shapes.shared_inter <= NARROW_INTER and narrow_mlp.serves(model.hidden, shapes.shared_inter)
    return {
        "attn_res": FusedOp(attn_res.attn_res, _same),
        "projection": FusedOp(projection.projection, _same),
        "kda_step": FusedOp(kda_step.kda_step, _same),
        "moe_front": FusedOp(moe_front.moe_front, moe_front.prepare),
        "router": FusedOp(router.router, _same, from_rows=2),
        "experts": FusedOp(run_experts, prepare_experts),
        "situ_mlp": FusedOp(situ_mlp.situ_mlp, prepare_mlp, MLP_LAUNCHES),
        **({"narrow_mlp": FusedOp(run_narrow, prepare_narrow)} if is_narrow else {}),
        "latent_tail": FusedOp(latent_tail.latent_tail, _same),
        "mla_query": FusedOp(mla_query.mla_query, _same),
        "mla_attend": FusedOp(mla_attend.mla_attend, _same, splits_of=mla_attend.splits_of),
        "mla_value": FusedOp(mla_value.mla_value, _same),
        "prefetch": FusedOp(prefetch.prefetch, _same),
    }
