"""The fused ops by name: `OPS["kda_step"]` is an `OpSpec`.

Importing this package loads nothing; the first use of `OPS` loads torch and every op.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from k3_decode.ops.contract import OpSpec

    OPS: Mapping[str, OpSpec]
    """Every op's dossier, in the order of `contract.OP_NAMES`."""

__all__ = ["OPS"]


def __getattr__(name: str) -> "Mapping[str, OpSpec]":
    if name != "OPS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from k3_decode.ops import (
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

    specs = (
        attn_res.SPEC,
        projection.SPEC,
        kda_step.SPEC,
        moe_front.SPEC,
        router.SPEC,
        experts.SPEC,
        situ_mlp.SPEC,
        latent_tail.SPEC,
        mla_query.SPEC,
        mla_attend.SPEC,
        mla_value.SPEC,
    )
    ops = {spec.name: spec for spec in specs}
    globals()["OPS"] = ops
    return ops
