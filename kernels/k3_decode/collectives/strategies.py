"""How the ranks of a served model meet, as the claim and the ledger name it.

`none`: one rank. `in_process`: all ranks in this process, in lock step. `processes`: a rank a process, over
torch.distributed (gloo on a CPU). `exchange`: a rank a GPU, over exchange kernels; `exchange_played`: the
same kernels over the slots of one GPU. A strategy drives every forward of a step, stock's too, so that the
two arms of a comparison never meet differently.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import distributed

from k3_decode.collectives.groups import ExchangeGroup, played, symmetric
from k3_decode.collectives.meetings import Exchange, meet_distributed, run_distributed, run_ranks
from k3_decode.shapes import K3Shapes

__all__ = ["NAMES", "Strategy", "StrategyName", "in_process", "open_strategy"]

StrategyName = Literal["none", "in_process", "processes", "exchange", "exchange_played"]
NAMES: tuple[StrategyName, ...] = ("none", "in_process", "processes", "exchange", "exchange_played")
MOST_ROWS = 64
"""Rows of a step that mailboxes have room for."""


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to meet, open for use."""

    name: StrategyName
    drive: Callable[[Sequence[Exchange]], list[torch.Tensor]]
    """Runs the forwards of the ranks that live in this process, and gives each one's result."""
    group: ExchangeGroup | None = None
    """Of real ranks' exchanges, where the attention's end is fused with them; None: it is not."""
    require_sound: Callable[[], None] = _nothing
    """Waits for the device; raises `ExchangeError` where a peer was not heard."""
    close: Callable[[], None] = _nothing


def in_process(ranks: int) -> Strategy:
    """All ranks here; `none` where there is one."""
    return Strategy("in_process" if ranks > 1 else "none", run_ranks)


def open_strategy(
    name: StrategyName, model: K3Shapes, ranks: int, device: torch.device, process_group: Any = None
) -> Strategy:
    """A strategy by name; of several processes all of them call it together, over an open process group.

    Raises `ValueError` where the name and what is here do not go together.
    """
    if name not in NAMES:
        raise ValueError(f"no strategy {name!r}; there are {', '.join(NAMES)}")
    if name in ("none", "in_process"):
        if (name == "none") != (ranks == 1):
            raise ValueError(f"{name!r} is no way for {ranks} ranks to meet")
        return in_process(ranks)
    if name != "exchange_played" and not distributed.is_initialized():
        raise ValueError(f"{name!r} needs an open process group of {ranks} processes")
    if name == "processes":
        return Strategy(name, lambda forwards: [run_distributed(_one(forwards))])
    if device.type != "cuda":
        raise ValueError(f"{name!r} needs a GPU for its mailboxes; a {device.type} has none")
    from k3_decode.collectives.exchanged import Exchanged, PlayedExchange
    from k3_decode.cute.attn_res_allreduce import serves

    room = -(-MOST_ROWS * (model.hidden + model.latent) * 2 // 16) * 16
    launches = torch.zeros(16, dtype=torch.int32, device=device)
    if name == "exchange_played":
        slots = played(ranks, room, device)
        return Strategy(name, PlayedExchange(slots, launches).run, None, slots.require_sound, slots.close)
    group = symmetric(process_group or distributed.group.WORLD, room, device)
    driver = Exchanged(group, launches, meet_distributed)
    fused = group if serves(model.hidden) else None
    return Strategy(
        name, lambda forwards: [driver.run(_one(forwards))], fused, group.require_sound, group.close
    )


def _one(forwards: Sequence[Exchange]) -> Exchange:
    if len(forwards) != 1:
        raise ValueError(f"a process plays one rank here, not {len(forwards)}")
    return forwards[0]
