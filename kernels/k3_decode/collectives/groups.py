"""Mailboxes of a group of ranks: set up once, good for every exchange of the group, until closed.

A process plays one rank of real GPUs (`symmetric`: torch symmetric memory, which maps every peer's mailbox
into this process) or all ranks of a group on one device (`played`: local slots stand for the ranks, so that
the same kernels can be tried and sanitised on one GPU; such a run says nothing of links). Addresses never
change, so launches can be captured. A group is for one stream of exchanges in one order on all ranks; what
runs beside it on another stream needs a group of its own.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from k3_decode.ops.mailbox import CONTROL_WORDS, EXCHANGES, SENTINEL, MailboxLayout

__all__ = ["LOOKS", "ExchangeError", "ExchangeGroup", "played", "symmetric"]

LOOKS = 20_000_000
"""Looks at a word before a rank gives up: some four seconds, as 300,000 took 63 ms on an H200."""
MARK = SENTINEL - (1 << 32)


class ExchangeError(RuntimeError):
    """A peer's words did not arrive within the bound."""


@dataclass(slots=True)
class ExchangeGroup:
    """What the kernels take of a group, and what the host does with it."""

    layout: MailboxLayout
    first_rank: int
    """Rank of the first local mailbox."""
    mailboxes: torch.Tensor
    """int32 [local ranks, words]."""
    reach: torch.Tensor
    """int64 [local ranks, R]: bytes from each local mailbox to every rank's."""
    control: torch.Tensor
    """int32 [local ranks, 8]."""
    process_group: Any = None
    """Of real ranks; None where this process plays them all."""
    handle: Any = None
    limit: int = LOOKS

    @property
    def local(self) -> int:
        """Ranks that this process plays."""
        return len(self.mailboxes)

    def of_rank(self, index: int) -> dict[str, Any]:
        """Arguments of a launch for one local rank, or by `arguments` for all of them."""
        return {
            "mailbox": self.mailboxes[index], "reach": self.reach[index],
            "control": self.control[index : index + 1], "layout": self.layout,
            "first_rank": self.first_rank + index, "limit": self.limit,
        }  # fmt: skip

    def arguments(self) -> dict[str, Any]:
        """Arguments of a launch for all local ranks."""
        return self.of_rank(0) | {"control": self.control}

    def epochs(self) -> list[int]:
        """Exchanges that each local rank has entered since the last reset."""
        found: list[int] = self.control[:, 0].tolist()
        return found

    def require_sound(self) -> None:
        """Waits for the device; raises `ExchangeError` naming each local rank's first fault."""
        rows = self.control.tolist()
        found = [
            f"rank {self.first_rank + index}, exchange {EXCHANGES[row[2] - 1]}, epoch {row[3]}: nothing from "
            f"rank {row[4]} at word {4 * row[5]} of its part within {self.limit} looks"
            for index, row in enumerate(rows)
            if row[2]
        ]
        if found:
            raise ExchangeError(
                "; ".join(found) + "; see whether that rank lives and runs the same exchanges, then reset "
                "the group on all ranks"
            )

    def reset(self) -> None:
        """Begin anew: all ranks stop, each clears what it owns, all go on. Every rank must call it."""
        torch.cuda.synchronize(self.mailboxes.device)
        self._meet()
        self.mailboxes.fill_(MARK)
        self.control.zero_()
        torch.cuda.synchronize(self.mailboxes.device)
        self._meet()

    def close(self) -> None:
        """Free the mailboxes, after the last exchange of every rank."""
        torch.cuda.synchronize(self.mailboxes.device)
        self._meet()
        self.mailboxes = self.mailboxes.new_empty((0, 0))
        self.handle = None

    def _meet(self) -> None:
        if self.process_group is not None:
            distributed.barrier(self.process_group)


def played(ranks: int, part_bytes: int, device: torch.device) -> ExchangeGroup:
    """A group whose ranks are all played by local slots on one device."""
    layout = MailboxLayout(ranks, part_bytes)
    mailboxes = torch.full((ranks, layout.size // 4), MARK, dtype=torch.int32, device=device)
    places = torch.arange(ranks, dtype=torch.int64, device=device) * layout.size
    return ExchangeGroup(
        layout, 0, mailboxes, places[None, :] - places[:, None],
        torch.zeros((ranks, CONTROL_WORDS), dtype=torch.int32, device=device),
    )  # fmt: skip


def symmetric(process_group: Any, part_bytes: int, device: torch.device) -> ExchangeGroup:
    """This process's rank of a group of GPUs that can map each other's memory; all ranks call it together."""
    import torch.distributed._symmetric_memory as symmetric_memory

    ranks, rank = distributed.get_world_size(process_group), distributed.get_rank(process_group)
    layout = MailboxLayout(ranks, part_bytes)
    memory = symmetric_memory.empty(layout.size // 4, dtype=torch.int32, device=device)
    handle = symmetric_memory.rendezvous(memory, process_group)
    places = [int(pointer) for pointer in handle.buffer_ptrs]
    reach = torch.tensor([[place - places[rank] for place in places]], dtype=torch.int64, device=device)
    control = torch.zeros((1, CONTROL_WORDS), dtype=torch.int32, device=device)
    group = ExchangeGroup(layout, rank, memory[None], reach, control, process_group, handle)
    group.reset()
    return group
