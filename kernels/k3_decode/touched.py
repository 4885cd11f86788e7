"""Which elements of a state argument a call may change, from the arguments alone.

What is outside these masks must stay bit for bit; the kernel tests check it, and the claim's list of state
rests on it.
"""

from collections.abc import Mapping
from typing import Any

import torch

from k3_decode.ops.mla_query import PAGE_SIZE

__all__ = ["touched"]


def touched(op: str, args: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """A boolean mask for each `state` argument of an op; empty for ops without state."""
    if op == "attn_res":
        return _attn_res(args)
    if op == "kda_step":
        return _kda_step(args)
    if op == "mla_query":
        return _mla_query(args)
    return {}


def _attn_res(args: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    blocks = torch.zeros(args["blocks"].shape, dtype=torch.bool, device=args["blocks"].device)
    if args["write_index"] >= 0:
        blocks[:, args["write_index"]] = True
    changes_prefix = args["delta"] is not None
    prefix = torch.full(args["prefix"].shape, changes_prefix, dtype=torch.bool, device=blocks.device)
    return {"prefix": prefix, "blocks": blocks}


def _kda_step(args: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """A request's conv window is in its first slot; row t writes the state in slot t.

    Null slots write nothing.
    """
    conv = torch.zeros(args["conv_state"].shape, dtype=torch.bool, device=args["conv_state"].device)
    state = torch.zeros(args["state"].shape, dtype=torch.bool, device=conv.device)
    slots = args["slots"]
    homes = slots[:, 0]
    conv[homes[homes > 0].long()] = True
    for row in range(slots.shape[1]):
        column = slots[:, row]
        state[column[column > 0].long()] = True
    return {"conv_state": conv, "state": state}


def _mla_query(args: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    mask = torch.zeros(args["cache"].shape, dtype=torch.bool, device=args["cache"].device)
    cells = args["slot_mapping"]
    cells = cells[cells >= 0]
    mask[cells // PAGE_SIZE, cells % PAGE_SIZE] = True
    return {"cache": mask}
