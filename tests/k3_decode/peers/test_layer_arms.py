"""The layer benchmark without a GPU: equal arms, and an oracle that notices faults."""

from dataclasses import replace

import pytest
import torch
from k3_decode.bound_layers import Layout
from k3_decode.op_table import OpTable, load_ops
from k3_decode.peers import layer_arms
from k3_decode.peers.layer_arms import FIRST_LAYER, Case, OptimisedArm, draw_layer, make_memory
from k3_decode.peers.layer_oracle import row_errors, truth_before_experts
from k3_decode.rank_weights import LayerWeights
from k3_decode.residuals import before_attention, before_ffn
from k3_decode.shapes import CANARY

CPU = torch.device("cpu")
SMALL = replace(CANARY, name="small", layers=93, heads=8, attn_res_block=12)
"""K3's schedule at the canary's widths."""


@pytest.fixture(autouse=True)
def small_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_arms.Case, "shapes", property(lambda case: SMALL.rank(case.tp)))


def layer_of(kind: str) -> LayerWeights:
    return draw_layer(kind, SMALL.rank(2), torch.Generator().manual_seed(3))


def memory_of(case: Case) -> layer_arms.Memory:
    generator = torch.Generator().manual_seed(4)
    pool = torch.randn(40, 64, 576, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    return make_memory(case, 1, pool if case.kind == "mla" else None, generator)


def arm_of(layer: LayerWeights, case: Case, table: OpTable, layout: Layout = "whole") -> OptimisedArm:
    return OptimisedArm([layer], case, memory_of(case), table, layout=layout)


def errors_of(layer: LayerWeights, case: Case, arm: OptimisedArm) -> torch.Tensor:
    fresh = memory_of(case)
    truth = truth_before_experts(layer, 0, case, fresh, fresh.embedding, fresh.delta)
    out = arm.step()
    return row_errors(out, truth.after(arm.buffer("ids")))


def test_the_layers_timed_read_four_blocks_and_begin_none() -> None:
    for layer in range(FIRST_LAYER, FIRST_LAYER + 8):
        assert before_attention(layer, 12) == (4, -1, False)
        assert before_ffn(layer, 12) == (4, -1, False)


@pytest.mark.parametrize("case", [Case("kda", 2, 3), Case("mla", 2, 3, 130)], ids=["kda", "mla"])
def test_a_layer_of_fused_ops_is_as_near_the_oracle_as_bf16_allows(case: Case) -> None:
    """Two dozen roundings of 2^-9 each leave less than 1 %."""
    layer = layer_of(case.kind)
    errors = errors_of(layer, case, arm_of(layer, case, load_ops("cpu", case.shapes, CPU)))
    assert 1e-4 < errors.max() < 1e-2


@pytest.mark.parametrize("op", ["experts", "latent_tail", "kda_step", "attn_res"])
def test_an_op_that_is_off_by_half_shows_in_every_token(op: str) -> None:
    case, layer = Case("kda", 2, 3), layer_of("kda")
    table = load_ops("cpu", case.shapes, CPU)
    sound = table[op]

    def run(**arguments: object) -> None:
        sound.run(**arguments)
        out = arguments["out"]
        assert isinstance(out, torch.Tensor)
        out[..., ::2] *= 1.5

    wrong = {**table, op: replace(sound, run=run)}
    assert errors_of(layer, case, arm_of(layer, case, wrong)).min() > 1e-2


def test_a_sharded_layer_with_its_peers_columns_filled_in_is_the_whole_layer() -> None:
    case, layer = Case("kda", 2, 3), layer_of("kda")
    table = load_ops("cpu", case.shapes, CPU)
    whole, sharded = arm_of(layer, case, table), arm_of(layer, case, table, "sharded")
    expected = whole.step().clone()
    sharded.fill_peers(whole)
    assert row_errors(sharded.step(), expected.double()).max() < 1e-2


def test_regret_is_zero_for_the_best_experts_and_positive_for_others() -> None:
    case, layer = Case("kda", 2, 2), layer_of("kda")
    fresh = memory_of(case)
    truth = truth_before_experts(layer, 0, case, fresh, fresh.embedding, fresh.delta)
    order = truth.scores.argsort(1, descending=True).to(torch.int32)
    assert truth.regret(order[:, : SMALL.top_k]) == 0.0
    assert truth.regret(order[:, 1 : SMALL.top_k + 1]) > 0.0
