"""The oracles themselves: against results worked out by hand and against other people's implementations."""

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from k3_decode.ops import OPS, attn_res, experts, kda_step, mla_attend, mla_query, mla_value, router
from k3_decode.ops.contract import Cell
from k3_decode.ops.log_base import LogBase
from k3_decode.shapes import NANO
from torch.nn import functional

CPU = torch.device("cpu")


def bf16(values: list[list[float]]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bfloat16)


def test_attn_res_of_two_equal_scores_is_the_norm_of_the_mean() -> None:
    blocks = bf16([[1.0, 0.0]]).unsqueeze(1)
    truth = attn_res.oracle(
        prefix=bf16([[0.0, 0.5]]),
        delta=bf16([[0.0, 0.5]]),
        blocks=blocks,
        blocks_read=1,
        write_index=-1,
        score_weight=torch.tensor([1.0, 1.0]),
        norm_weight=torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
        eps=0.0,
    )
    assert truth["prefix"].tolist() == [[0.0, 1.0]]
    torch.testing.assert_close(truth["out"], torch.tensor([[1.0, 2.0]], dtype=torch.float64))


def test_attn_res_without_blocks_is_rms_norm() -> None:
    args = OPS["attn_res"].make_args(
        Cell(NANO.rank(1), 4), "no_blocks", torch.Generator().manual_seed(1), CPU
    )
    truth = OPS["attn_res"].oracle(args)
    weight = args["norm_weight"]
    assert isinstance(weight, torch.Tensor)
    expected = functional.rms_norm(truth["prefix"].double(), (NANO.hidden,), weight.double(), NANO.norm_eps)
    torch.testing.assert_close(truth["out"], expected)


def test_router_takes_the_lower_id_of_a_tie_and_counts_nan_last() -> None:
    logits = torch.tensor(
        [[0.0, 2.0, 0.0, math.nan, -1.0], [math.nan] * 5, [0.0, math.nan, math.nan, 1.0, math.nan]]
    )
    truth = router.oracle(
        logits=logits, bias=torch.zeros(5), ids=torch.empty(3, 3, dtype=torch.int32), scale=2.0
    )
    assert truth["ids"].tolist() == [[1, 0, 2], [0, 1, 2], [3, 0, 1]]
    high = 1 / (1 + math.exp(-2))
    expected = [2 * high / (high + 1), 2 * 0.5 / (high + 1), 2 * 0.5 / (high + 1)]
    torch.testing.assert_close(truth["weights"][0], torch.tensor(expected, dtype=torch.float64))
    assert truth["weights"][1].tolist() == [0.0, 0.0, 0.0]


def test_router_bias_selects_but_does_not_weigh() -> None:
    truth = router.oracle(
        logits=torch.tensor([[0.0, 0.0, 0.0]]),
        bias=torch.tensor([0.0, -1.0, 1.0]),
        ids=torch.empty(1, 2, dtype=torch.int32),
        scale=1.0,
    )
    assert truth["ids"].tolist() == [[2, 0]]
    assert truth["weights"].tolist() == [[0.5, 0.5]]


def test_router_agrees_with_torch_topk_where_nothing_ties() -> None:
    args = OPS["router"].make_args(Cell(NANO.rank(1), 16), "gaussian", torch.Generator().manual_seed(5), CPU)
    logits, bias, ids = args["logits"], args["bias"], args["ids"]
    assert isinstance(logits, torch.Tensor)
    assert isinstance(bias, torch.Tensor)
    assert isinstance(ids, torch.Tensor)
    expected = torch.topk(torch.sigmoid(logits) + bias, ids.shape[1], dim=1).indices
    assert torch.equal(OPS["router"].oracle(args)["ids"].long(), expected)


def test_experts_of_one_hot_codes_give_situ_by_hand() -> None:
    one = 2  # E2M1 code of 1.0
    w13 = torch.zeros(1, 64, 16, dtype=torch.uint8)
    w13[0, 0, 0] = one  # gate 0 reads latent 0
    w13[0, 32, 0] = one << 4  # up 0 reads latent 1
    w2 = torch.zeros(1, 32, 16, dtype=torch.uint8)
    w2[0, 3, 0] = one  # output 3 reads hidden 0
    latent = torch.zeros(1, 32, dtype=torch.bfloat16)
    latent[0, 0], latent[0, 1] = 2.0, 3.0
    unit = torch.full((1, 64, 1), 127, dtype=torch.uint8)
    truth = experts.oracle(
        latent=latent,
        ids=torch.tensor([[0, -1]], dtype=torch.int32),
        weights=torch.tensor([[0.5, 9.0]]),
        w13=w13,
        w13_scale=unit,
        w2=w2,
        w2_scale=unit[:, :32],
    )
    situ = 4 * math.tanh(0.5) / (1 + math.exp(-2)) * 25 * math.tanh(3 / 25)
    expected = torch.zeros(1, 32, dtype=torch.float64)
    expected[0, 3] = 0.5 * situ
    torch.testing.assert_close(truth["out"], expected)


def test_attention_agrees_with_torch_over_gathered_rows() -> None:
    args = OPS["mla_attend"].make_args(
        Cell(NANO.rank(1), 2, rows=3, context=130), "gaussian", torch.Generator().manual_seed(2), CPU
    )
    truth = OPS["mla_attend"].oracle(args)
    query, cache, table = args["query"], args["cache"], args["block_table"]
    assert isinstance(query, torch.Tensor)
    assert isinstance(cache, torch.Tensor)
    assert isinstance(table, torch.Tensor)
    for request in range(2):
        keys = cache[table[request, :3].long()].flatten(0, 1)[:130].double()
        for t in range(3):
            q = query[request * 3 + t].double()
            seen = keys[: 128 + t].expand(NANO.heads, -1, -1)
            expected = functional.scaled_dot_product_attention(
                q.unsqueeze(1), seen, seen[..., : mla_query.KV_LORA], scale=192**-0.5
            )
            torch.testing.assert_close(truth["out"][request * 3 + t], expected[:, 0])


def test_attention_without_keys_is_zero_with_lse_minus_infinity() -> None:
    truth = mla_attend.oracle(
        query=torch.ones(1, 1, 576, dtype=torch.bfloat16),
        cache=torch.full((1, 64, 576), torch.nan, dtype=torch.bfloat16),
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        lengths=torch.zeros(1, dtype=torch.int32),
        rows=1,
        scale=1.0,
        kv_scale=1.0,
    )
    assert truth["lse"].tolist() == [[-math.inf]]
    assert not truth["out"].any()


def test_value_halves_when_its_gate_logit_is_zero() -> None:
    truth = mla_value.oracle(
        partial=torch.ones(1, 1, 1, 512, dtype=torch.bfloat16),
        partial_lse=torch.zeros(1, 1, 1),
        uv_weight=torch.full((1, 512, 128), 1 / 512, dtype=torch.bfloat16),
        gate=torch.zeros(1, 128, dtype=torch.bfloat16),
        lse_base=LogBase.E,
    )
    torch.testing.assert_close(truth["out"], torch.full((1, 128), 0.5, dtype=torch.float64))


def test_kda_writes_a_value_and_reads_it_back_with_its_key() -> None:
    """Beta near one and no old state: reading with the key just written gives the value, normed."""
    packed = torch.zeros(1, 4 * 128 + 128 + 16, dtype=torch.bfloat16)
    packed[0, 0], packed[0, 128], packed[0, 256 + 5] = 8.0, 8.0, 8.0  # q, k and v are one-hot
    packed[0, 512 + 128] = 30.0  # beta
    packed[0, 384:512] = 30.0  # the gate is open
    taps = torch.zeros(3, 4, 128)
    taps[:, 3] = 1.0
    truth = kda_step.oracle(
        packed=packed,
        conv_weight=taps,
        decay_weight=torch.zeros(128, 128, dtype=torch.bfloat16),
        a_log=torch.zeros(1),
        dt_bias=torch.zeros(128),
        norm_weight=torch.ones(128),
        conv_state=torch.zeros(2, 3, 384, dtype=torch.bfloat16),
        state=torch.zeros(2, 1, 128, 128),
        slots=torch.tensor([[1]], dtype=torch.int32),
        accepted=None,
        rows=1,
        lower_bound=-5.0,
        eps=0.0,
    )
    value = 8 / (1 + math.exp(-8))
    assert truth["state"][1, 0, 5, 0].item() == pytest.approx(value, rel=1e-6)
    assert truth["state"][1].count_nonzero().item() == 1
    expected = torch.zeros(128, dtype=torch.float64)
    expected[5] = math.sqrt(128)
    torch.testing.assert_close(truth["out"][0], expected, rtol=1e-6, atol=1e-9)
    assert truth["conv_state"][1, 2].tolist() == packed[0, :384].tolist()


def fla_naive() -> Any:
    """The naive KDA module of fla, from its file: the package wants triton. Skips where it is missing."""
    package = importlib.util.find_spec("fla")
    if package is None or importlib.util.find_spec("einops") is None:
        pytest.skip("fla-core and einops are not installed")
    assert package.submodule_search_locations is not None
    file = Path(package.submodule_search_locations[0]) / "ops" / "kda" / "naive.py"
    spec = importlib.util.spec_from_file_location("fla_naive_kda", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_kda_agrees_with_flas_naive_reference() -> None:
    """Their recurrence takes normalised q and k and log-decays: what the formulas make of our inputs."""
    naive = fla_naive()
    generator = torch.Generator().manual_seed(4)
    tokens, heads = 8, 2
    width = heads * 128
    packed = torch.randn(tokens, 4 * width + 128 + 16, generator=generator).to(torch.bfloat16)
    packed[:, 3 * width : 4 * width] = 40.0  # the gate is open
    taps = torch.zeros(3, 4, width)
    taps[:, 3] = 1.0  # the convolution passes its newest input
    a_log, dt_bias = torch.rand(heads, generator=generator), torch.rand(width, generator=generator) * 4 - 5
    decay_weight = (torch.randn(width, 128, generator=generator) * 0.1).to(torch.bfloat16)
    state = torch.randn(2, heads, 128, 128, generator=generator) * 0.1
    ours = kda_step.oracle(
        packed=packed,
        conv_weight=taps,
        decay_weight=decay_weight,
        a_log=a_log,
        dt_bias=dt_bias,
        norm_weight=torch.ones(128),
        conv_state=torch.zeros(tokens + 1, tokens + 2, 3 * width, dtype=torch.bfloat16),
        state=torch.cat((state, torch.zeros(tokens - 1, heads, 128, 128))),
        slots=torch.arange(1, tokens + 1, dtype=torch.int32).view(1, tokens),
        accepted=None,
        rows=tokens,
        lower_bound=-5.0,
        eps=0.0,
    )
    rows = packed.double()
    q, k, v = functional.silu(rows[:, : 3 * width]).view(tokens, 3, heads, 128).unbind(1)
    q, k = (x / torch.sqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    raw = rows[:, 4 * width : 4 * width + 128] @ decay_weight.double().T + dt_bias.double()
    g = -5.0 * torch.sigmoid(a_log.double().exp()[:, None] * raw.view(tokens, heads, 128))
    beta = torch.sigmoid(rows[:, 4 * width + 128 : 4 * width + 128 + heads])
    theirs, last = naive.naive_recurrent_kda(
        *(x.unsqueeze(0) for x in (q, k, v, g, beta)),
        initial_state=state[1].transpose(1, 2).unsqueeze(0),
        output_final_state=True,
    )
    torch.testing.assert_close(last[0].transpose(1, 2).double(), ours["state"][tokens], rtol=1e-4, atol=1e-5)
    read = theirs[0].double()
    normed = read / torch.sqrt(read.square().mean(-1, keepdim=True))
    torch.testing.assert_close(normed.flatten(1), ours["out"], rtol=1e-3, atol=1e-4)
