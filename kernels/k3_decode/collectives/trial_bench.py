"""What trials share: kernels compiled before any rank waits for another, a group, inputs that are equal in
every process, counts of wrong words.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from k3_decode.collectives.groups import ExchangeGroup
from k3_decode.kernel_objects import Form, build_objects, use_objects

__all__ = ["TURNS", "Bench", "Case", "compiled_ahead", "write_lines"]

TURNS = 4
"""Times that each case runs, so that both epochs and a re-armed slot of each are used."""


class Bench:
    """A group and what its cases share."""

    def __init__(self, group: ExchangeGroup, seed: int, turns: int = TURNS) -> None:
        self.turns = turns
        self.group, self.device = group, group.mailboxes.device
        self.ranks, self.local = group.layout.ranks, group.local
        self.mine = slice(group.first_rank, group.first_rank + group.local)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.launches = torch.zeros(16, dtype=torch.int32, device=self.device)

    def bf16(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Random values, the same in every process."""
        values = torch.randn(shape, generator=self.generator, device=self.device) * scale
        return values.to(torch.bfloat16)

    def poisoned(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Where a result goes."""
        return torch.full(shape, -3.0, dtype=dtype, device=self.device)

    def differing(self, out: torch.Tensor, want: torch.Tensor) -> int:
        """Words that are not the same bits."""
        kind = torch.int16 if out.element_size() == 2 else torch.int32
        return int((out.contiguous().view(kind) != want.contiguous().view(kind)).sum())


Case = Callable[[Bench, int], int]


@contextmanager
def compiled_ahead(forms: Sequence[Form], process_group: Any) -> Iterator[None]:
    """Inside the block launches load what one rank has compiled, many at once, while the others waited: a
    rank that compiles for seconds between two exchanges is one that its peers give up.
    """
    is_first = process_group is None or distributed.get_rank(process_group) == 0
    with tempfile.TemporaryDirectory(prefix="trial-") as own:
        folder = [own]
        if is_first:
            build_objects(forms, Path(own), max(1, min(24, (os.cpu_count() or 1) // 2)))
        if process_group is not None:
            distributed.broadcast_object_list(folder, src=0, group=process_group)
        with use_objects(Path(folder[0])):
            yield
        if process_group is not None:
            distributed.barrier(process_group)


def write_lines(out: Path | None, lines: Sequence[str]) -> None:
    """A program's records, where a file was asked for; by the first rank alone."""
    if out is not None and int(os.environ.get("RANK", "0")) == 0:
        out.write_text("\n".join(lines) + "\n", encoding="utf-8")
