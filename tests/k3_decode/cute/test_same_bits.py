"""A layer gives the same bits in every run, at the corners of what is claimed: on a GPU.

Ops run one behind another, as in a step: an op that never differs alone may where the next one's weights
are on their way.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from k3_decode.op_table import OpTable, load_ops
from k3_decode.peers.layer_arms import Case, OptimisedArm, draw_layer, make_memory
from k3_decode.shapes import CANARY

RUNS = 12
CONTEXT = 1000
PAGES = 64 * 16 + 2
CORNERS = [(tp, rows) for tp in (1, 2, 8, 16) for rows in (1, 17, 33, 48, 64)]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def differing_buffers(case: Case, table: OpTable, device: torch.device) -> set[str]:
    """Runs one layer again and again from equal states; names what is not the same in all runs."""
    generator = torch.Generator(device).manual_seed(7)
    layer = draw_layer(case.kind, case.shapes, generator)
    pool = None
    if case.kind == "mla":
        pool = torch.randn((PAGES, 64, 576), generator=generator, device=device).to(torch.bfloat16)
    memory = make_memory(case, 1, pool, generator)
    kda = {
        name: getattr(state, name) for state in memory.caches.kda.values() for name in ("conv", "recurrent")
    }
    states = {**kda, **{f"cache{place}": cache for place, cache in memory.caches.mla.items()}}
    before = {name: state.clone() for name, state in states.items()}
    first: dict[str, torch.Tensor] = {}
    found: set[str] = set()
    for _ in range(RUNS):
        for name, state in states.items():
            state.copy_(before[name])
        arm = OptimisedArm([layer], case, memory, table, layout="whole")
        arm.step()
        for name, tensor in {**arm.chain.buffers, **states}.items():
            if not torch.equal(_bits(tensor), _bits(first.setdefault(name, tensor.clone()))):
                found.add(name)
    return found


def test_an_op_that_errs_in_one_run_of_many_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Case, "shapes", property(lambda case: CANARY.rank(case.tp)))
    table = dict(load_ops("stock", CANARY.rank(2), torch.device("cpu")))
    sound, calls = table["kda_step"], iter(range(RUNS))

    def err_once(**arguments: Any) -> None:
        sound.run(**arguments)
        if next(calls) == RUNS // 2:
            arguments["out"].view(-1)[0] += 1

    case, device = Case("kda", 2, 3), torch.device("cpu")
    assert differing_buffers(case, table, device) == set()
    calls = iter(range(RUNS))
    table["kda_step"] = replace(sound, run=err_once)
    found = differing_buffers(case, table, device)
    assert {"core", "ffn"} <= found
    assert not {"kda_packed", "recurrent"} & found


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["kda", "mla"])
@pytest.mark.parametrize(("tp", "rows"), CORNERS)
def test_a_layer_gives_the_same_bits_again(kind: str, tp: int, rows: int, gpu: Any) -> None:
    case = Case(kind, tp, rows, CONTEXT if kind == "mla" else 0)
    assert differing_buffers(case, load_ops("cute", case.shapes, gpu), gpu) == set()
