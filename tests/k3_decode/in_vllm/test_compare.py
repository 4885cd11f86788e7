"""What measurements of two engines amount to, from events and log-probabilities written by hand."""

from typing import Any

import pytest
from k3_decode.in_vllm.compare import Span, agreement, layer_spans, render_table, summarise

STOCK_MIX, OUR_MIX = "void _attn_res_kernel", "kernel_cutlass__mix_rows_tensor"


def step(start: float, mix: str, layer_us: float, layers: int = 2) -> list[tuple[float, float, int, str]]:
    """A step of layers that are mix, product, mix, product, and a last mix of 3 us."""
    events: list[tuple[float, float, int, str]] = []
    for layer in range(layers):
        begin = start + layer * layer_us
        for part, name in enumerate((mix, "product", mix, "product")):
            events.append((begin + part * layer_us / 4, 1.0, 7, name))
    return [
        *events,
        (start + layers * layer_us, 3.0, 7, mix),
        (start + layers * layer_us + 4, 1.0, 7, "head"),
    ]


def steps(mix: str, layer_us: float, layers: int = 2) -> list[Any]:
    return [event for n in range(4) for event in step(n * 10_000.0, mix, layer_us, layers)]


@pytest.mark.parametrize("mix", [STOCK_MIX, OUR_MIX])
def test_layers_are_cut_where_the_residuals_are_mixed(mix: str) -> None:
    found = layer_spans(steps(mix, 80.0), layers=2)
    assert found == {"layer 0": Span(4, 80.0), "layer 1": Span(4, 80.0), "model": Span(9, 163.0)}


def test_steps_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(ValueError, match="19 AttnRes kernels are no whole steps of 5"):
        layer_spans(steps(STOCK_MIX, 80.0)[1:], layers=2)
    with pytest.raises(ValueError, match="too few steps"):
        layer_spans(step(0.0, STOCK_MIX, 80.0), layers=2)


def forced(shift: float, ids: int = 3, **changed: Any) -> dict[str, Any]:
    """Two places: the prompt's, and one decode step in which three tokens are likely."""
    place = {"1": -1.0, "2": -2.0 + shift, "3": -3.0}
    told = {
        "is_forced": True,
        "ids": [[ids, ids]],
        "top": [[{"1": -1.0, "2": -2.0}, place]],
        "launches": [5, 6],
    }
    return told | changed


def test_arms_agree_by_the_tokens_that_both_name() -> None:
    found = agreement(forced(0.0), forced(1.5))
    assert (found.prompt_max, found.mean, found.largest, found.shared) == (0.0, 0.5, 1.5, 3.0)
    assert (found.positions, found.same_first) == (1, 0)


@pytest.mark.parametrize("other", [forced(0.0, ids=4), forced(0.0, is_forced=False)])
def test_arms_along_other_tokens_are_not_compared(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not forced along one text"):
        agreement(forced(0.0), other)


def arm(mix: str, layer_us: float, graph_us: float, shift: float) -> dict[str, Any]:
    return {
        "kernels": {"1": {"events": steps(mix, layer_us, layers=8)}}, "steps": {"1": {"us": 3000.4}},
        "replays": {"1": {"us": graph_us}}, "forced": {"1": forced(shift)},
        "structured": {"texts": [['{"unit":"us","name":"abc","is_fast":true}', "stop"], ["{", "length"]]},
    }  # fmt: skip


def test_a_folder_of_arms_is_one_table_with_gains() -> None:
    deep = {"replays": {"1": {"us": 1600.0}}}
    arms = {
        "stock": arm(STOCK_MIX, 130.0, 1080.0, 0.0), "optimised": arm(OUR_MIX, 91.0, 720.0, 0.5),
        "stock12": deep, "optimised12": {"replays": {"1": {"us": 1060.0}}},
        "poison": {"forced": {"1": {"failed": "out of memory"}}},
    }  # fmt: skip
    found = summarise(arms)
    assert found["layers"]["optimised"]["1"]["kda_moe"] == {"kernels": 4, "us": 91.0}
    assert found["kda_layer_us"] == {"stock": {"1": 130.0}, "optimised": {"1": 85.0}}
    assert found["launches"]["optimised"] == {"1": 11}
    assert found["other"]["optimised"]["answers_under_schema"] == "1 of 2"
    assert found["agreement"]["poison"]["1"].startswith("not comparable")
    lines = render_table(found).splitlines()
    assert "| 1 | 1080.0 / 720.0 us | 1.50x | 130.0 / 85.0 us | 1.53x |" in lines
    assert "| optimised | stock | 1 | 0.1667 | 0.500 | 0.500 | 3.0 | 1 of 1 | 0.000 |" in lines
