"""Every op of a layer gives the same bits in every run, at the corners of what is claimed: on a GPU."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from k3_decode.op_table import FusedOp, OpTable, load_ops
from k3_decode.ops import OPS
from k3_decode.ops.contract import Role
from k3_decode.peers.layer_arms import Case, OptimisedArm, draw_layer, make_memory
from k3_decode.shapes import CANARY

RUNS = 20
CONTEXT = 1000
PAGES = 64 * 16 + 2
CORNERS = [(tp, rows) for tp in (1, 2, 8, 16) for rows in (1, 17, 33, 64)]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def repeating(table: OpTable, runs: int, differing: dict[tuple[str, str], int]) -> OpTable:
    """The table whose ops run so often on equal inputs; counts by op and output the bytes that differ from
    the first run's.
    """

    def run(name: str, op: FusedOp, **arguments: Any) -> None:
        written = [p for p in OPS[name].params if p.role in (Role.STATE, Role.OUTPUT)]
        kept = {p.name: arguments[p.name] for p in written if isinstance(arguments.get(p.name), torch.Tensor)}
        before = {p.name: kept[p.name].clone() for p in written if p.role is Role.STATE and p.name in kept}
        first: dict[str, torch.Tensor] = {}
        for _ in range(runs):
            for state, value in before.items():
                kept[state].copy_(value)
            op.run(**arguments)
            for output, value in kept.items():
                first.setdefault(output, value.clone())
                count = int((_bits(value) != _bits(first[output])).sum())
                differing[name, output] = differing.get((name, output), 0) + count

    return {
        name: replace(op, run=partial(run, name, op)) if name in OPS else op for name, op in table.items()
    }


def _differing(kind: str, case: Case, table: OpTable, device: torch.device) -> dict[tuple[str, str], int]:
    """Runs one layer whose every op repeats."""
    found: dict[tuple[str, str], int] = {}
    generator = torch.Generator(device).manual_seed(7)
    layer = draw_layer(kind, case.shapes, generator)
    pool = None
    if kind == "mla":
        pool = torch.randn((PAGES, 64, 576), generator=generator, device=device).to(torch.bfloat16)
    memory = make_memory(case, 1, pool, generator)
    OptimisedArm([layer], case, memory, repeating(table, RUNS, found), layout="whole").step()
    return found


def test_an_op_that_errs_in_one_run_of_many_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Case, "shapes", property(lambda case: CANARY.rank(case.tp)))
    table = dict(load_ops("stock", CANARY.rank(2), torch.device("cpu")))
    sound, calls = table["kda_step"], iter(range(RUNS))

    def err_once(**arguments: Any) -> None:
        sound.run(**arguments)
        if next(calls) == RUNS // 2:
            arguments["out"].view(-1)[0] += 1

    table["kda_step"] = replace(sound, run=err_once)
    found = _differing("kda", Case("kda", 2, 3), table, torch.device("cpu"))
    assert len(found) == 14
    assert {key for key, count in found.items() if count} == {("kda_step", "out")}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["kda", "mla"])
@pytest.mark.parametrize(("tp", "rows"), CORNERS)
def test_every_op_of_a_layer_gives_the_same_bits_again(kind: str, tp: int, rows: int, gpu: Any) -> None:
    case = Case(kind, tp, rows, CONTEXT if kind == "mla" else 0)
    found = _differing(kind, case, load_ops("cute", case.shapes, gpu), gpu)
    assert {key for key, count in found.items() if count} == set()
