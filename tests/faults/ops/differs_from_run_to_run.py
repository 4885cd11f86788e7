"""One value's last bit differs in every other run on equal inputs, as where a copy races with a load."""

from itertools import count
from typing import Any

import torch

from tests.faults.planting import op_fault

RUNS = count()


def _race(sound: Any, **arguments: Any) -> None:
    sound(**arguments)
    arguments["out"].view(torch.int16)[0, 0] ^= next(RUNS) % 2


def _settled(sound: Any, **arguments: Any) -> None:
    sound(**arguments)
    arguments["out"].view(torch.int16)[0, 0] ^= next(RUNS) * 0


FAULT = op_fault(
    "differs_from_run_to_run",
    op="situ_mlp",
    title="One value's last bit differs in every other run on equal inputs.",
    report="lablup/mlxcel#923",
    fault=_race,
    repaired=_settled,
    more=(),
)
