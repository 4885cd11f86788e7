"""Ranks that meet: the same sum everywhere, in rank order, and mistakes that do not hang."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from k3_decode.collectives import Exchange, gather, reduce, run_ranks


def rank(part: torch.Tensor, tp: int) -> Exchange:
    total = yield from reduce(part, tp)
    return (yield from gather(total[:1] + 0, tp))


def test_every_rank_gets_the_sum_rounded_once() -> None:
    """256 + 1 + 1 is 258 in fp32; rounding after each addition would lose both ones."""
    parts = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    results = run_ranks([rank(part, 3) for part in parts])
    assert [result.tolist() for result in results] == [[258.0] * 3] * 3


def test_one_rank_alone_meets_nobody() -> None:
    part = torch.tensor([2.0])
    assert run_ranks([rank(part, 1)])[0].tolist() == [2.0]


def test_a_slice_of_one_rank_keeps_its_own_part() -> None:
    assert run_ranks([rank(torch.tensor([2.0]), 8)])[0].tolist() == [2.0]


def test_ranks_that_do_not_meet_are_an_error_and_no_hang() -> None:
    with pytest.raises(RuntimeError, match="ranks do not meet"):
        run_ranks([rank(torch.ones(1), 2), rank(torch.ones(1), 1)])


def only_gather(part: torch.Tensor) -> Exchange:
    return (yield from gather(part, 2))


def test_ranks_that_ask_for_unlike_collectives_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="unlike collectives"):
        run_ranks([rank(torch.ones(1), 2), only_gather(torch.ones(1))])


RANK_PROGRAM = """
import sys
import torch
from torch import distributed
from k3_decode.collectives import Collective, run_distributed

rank, store = int(sys.argv[1]), sys.argv[2]
distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

def forward():
    total = yield Collective("reduce", torch.tensor([256.0 if rank == 0 else 1.0], dtype=torch.bfloat16))
    both = yield Collective("gather", torch.tensor([float(rank)]))
    return torch.cat((total.float(), both))

print(run_distributed(forward()).tolist())
distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_meet_through_torch_distributed(tmp_path: Path) -> None:
    """256 + 1 in bf16, rounded once to even; then both ranks' parts side by side."""
    command = [sys.executable, "-c", RANK_PROGRAM]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    answers = [process.communicate(timeout=120)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0]
    assert answers == ["[256.0, 0.0, 1.0]\n"] * 2
