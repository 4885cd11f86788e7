"""Which compiled kernels the layers of some cells ask for, found without a GPU.

A layer of the right shapes but without values runs with recorders in place of launches.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch

from k3_decode.bound_layers import Layout
from k3_decode.kernel_objects import Form, recorded_forms
from k3_decode.op_table import load_ops
from k3_decode.overlap import aside_from
from k3_decode.peers.layer_arms import Case, OptimisedArm, draw_layer, make_memory

__all__ = ["forms_of"]

DRAWS = ("randn", "rand", "randint", "randperm")


@torch.no_grad()
def forms_of(cases: Sequence[Case], layouts: Sequence[Layout]) -> list[Form]:
    """Every form that the cases ask for in these layouts, with the shared expert aside or not."""
    with recorded_forms() as forms, _without_values() as generator:
        tables: dict[tuple[str, int], Any] = {}
        for case in cases:
            key = (case.kind, case.tp)
            if key not in tables:
                tables[key] = (
                    load_ops("cute", case.shapes, generator.device),
                    draw_layer(case.kind, case.shapes, generator),
                )
            table, layer = tables[key]
            pages = case.requests * (case.context // 64 + 1) + 2
            pool = torch.empty((pages, 64, 576), dtype=torch.bfloat16, device=generator.device)
            memory = make_memory(case, 1, pool, generator)
            for layout, schedule in product(layouts, (aside_from(1), aside_from(65))):
                OptimisedArm([layer], case, memory, table, layout=layout, schedule=schedule).step()
    return forms


class _NoGenerator:
    """Stands for a generator of the meta device, which has none."""

    device = torch.device("meta")


@contextmanager
def _without_values() -> Iterator[Any]:
    """Draws ignore their generator, and a tensor without values is false where one is asked for its truth."""
    namespace: Any = torch
    tensor: Any = torch.Tensor
    kept, truth = {name: getattr(torch, name) for name in DRAWS}, tensor.__bool__

    def without(draw: Any) -> Any:
        return lambda *sizes, generator=None, **options: draw(*sizes, **options)

    for name, draw in kept.items():
        setattr(namespace, name, without(draw))
    tensor.__bool__ = lambda _tensor: False
    try:
        yield _NoGenerator()
    finally:
        for name, draw in kept.items():
            setattr(namespace, name, draw)
        tensor.__bool__ = truth
