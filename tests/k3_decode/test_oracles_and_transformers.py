"""The oracles against transformers' Kimi-Linear, which shares K3's KDA, MLA, router and norm: code by others.

Theirs computes in fp32, so agreement is to fp32's rounding. Skips where transformers is missing or too old
to have the model.
"""

from types import ModuleType
from typing import Any

import pytest
import torch
from k3_decode.ops import attn_res, kda_step, mla_attend, mla_query, mla_value, router
from k3_decode.ops.mxfp4 import dequantise
from k3_decode.shapes import NANO, PRESETS, K3Shapes

from tests.k3_decode.models import TEXT, checkpoint, oracle_logprobs

OPEN = 40.0
"""A gate's logit that leaves values as they are: their model has no such gate."""


@pytest.fixture(scope="module")
def theirs() -> ModuleType:
    return pytest.importorskip(
        "transformers.models.kimi_linear.modeling_kimi_linear",
        reason="transformers with Kimi-Linear (5.24 has it) is not installed",
        exc_type=ImportError,
    )


def _config(shapes: K3Shapes) -> Any:
    module = pytest.importorskip("transformers.models.kimi_linear", exc_type=ImportError)
    mla = [i + 1 for i in range(shapes.layers) if shapes.is_mla(i)]
    return module.KimiLinearConfig(
        vocab_size=shapes.vocab,
        hidden_size=shapes.hidden,
        intermediate_size=shapes.dense_inter,
        moe_intermediate_size=shapes.expert_inter,
        num_hidden_layers=shapes.layers,
        num_attention_heads=shapes.heads,
        num_key_value_heads=shapes.heads,
        n_shared_experts=shapes.shared_inter // shapes.expert_inter,
        routed_scaling_factor=shapes.routed_scale,
        q_lora_rank=shapes.q_lora,
        num_local_experts=shapes.experts,
        num_experts_per_tok=shapes.top_k,
        rms_norm_eps=shapes.norm_eps,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",
        linear_attn_config={
            "head_dim": shapes.head_dim,
            "num_heads": shapes.heads,
            "short_conv_kernel_size": shapes.conv_width,
            "full_attn_layers": mla,
            "kda_layers": [i + 1 for i in range(shapes.layers) if i + 1 not in mla],
        },
    )


def _their_name(name: str) -> str:
    """A tensor's name in their model; theirs has one convolution, which the caller joins."""
    name = name.replace("block_sparse_moe", "mlp").replace("experts.w13_weight", "experts.gate_up_proj")
    name = name.replace("experts.w2_weight", "experts.down_proj")
    for part in ("f_a_proj.weight", "f_b_proj.weight", "dt_bias", "A_log"):
        name = name.replace(f"self_attn.{part}", f"self_attn.forget_gate.{part}")
    return name


def _their_tensors(model: str) -> dict[str, torch.Tensor]:
    source = checkpoint(model)
    found = {}
    for name in sorted(source.names()):
        if name.endswith("_weight_scale") or "conv1d" in name:
            continue
        tensor = source.read(name)
        if name.endswith("_weight"):
            tensor = dequantise(tensor, source.read(f"{name}_scale"))
        if name.endswith("A_log"):
            tensor = tensor.view(1, 1, -1, 1)
            prefix = name.removesuffix("A_log")
            taps = [source.read(f"{prefix}{part}_conv1d.weight") for part in "qkv"]
            found[f"{prefix}conv1d.weight"] = torch.cat(taps).float()
        found[_their_name(name)] = tensor.float()
    return found


def test_the_whole_models_oracle_answers_as_transformers_kimi_linear(theirs: ModuleType) -> None:
    shapes = PRESETS["nano_linear"]
    model = theirs.KimiLinearForCausalLM(_config(shapes)).eval()
    model.load_state_dict(_their_tensors("nano_linear"), strict=True)
    for layer in model.model.layers:
        norm = getattr(layer.self_attn, "kv_a_layernorm", None)
        if norm is not None:
            norm.variance_epsilon = (
                shapes.norm_eps
            )  # theirs says 1e-6 whatever the config; serving engines 1e-5
    with torch.no_grad():
        logits = model(torch.tensor([TEXT]), use_cache=False).logits[0]
    found = torch.log_softmax(logits.double(), -1)
    torch.testing.assert_close(found, oracle_logprobs("nano_linear"), rtol=0, atol=2e-4)


def test_router_chooses_and_weighs_as_theirs(theirs: ModuleType) -> None:
    generator = torch.Generator().manual_seed(3)
    gate = theirs.KimiLinearTopkRouter(_config(PRESETS["nano_linear"]))
    x = torch.randn(32, 128, generator=generator)
    gate.weight.data = torch.randn(8, 128, generator=generator) * 0.1
    gate.e_score_correction_bias.data = torch.randn(8, generator=generator) * 0.2
    with torch.no_grad():
        logits, weights, ids = gate(x)
    ours = router.oracle(
        logits=logits,
        bias=gate.e_score_correction_bias,
        ids=torch.empty(32, 2, dtype=torch.int32),
        scale=2.446,
    )
    ids, order = ids.sort(1)
    own_ids, own_order = ours["ids"].long().sort(1)
    assert torch.equal(own_ids, ids)
    torch.testing.assert_close(
        ours["weights"].gather(1, own_order), weights.gather(1, order).double(), rtol=1e-6, atol=0
    )


def test_attn_res_without_blocks_is_their_rms_norm(theirs: ModuleType) -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(5, 128, generator=generator).bfloat16()
    norm = theirs.KimiLinearRMSNorm(128, eps=1e-5)
    norm.weight.data = torch.randn(128, generator=generator).bfloat16().float()
    ours = attn_res.oracle(
        prefix=x,
        delta=torch.zeros_like(x),
        blocks=torch.empty(0, 5, 128, dtype=torch.bfloat16),
        blocks_read=0,
        write_index=-1,
        score_weight=torch.ones(128),
        norm_weight=norm.weight.data.bfloat16(),
        eps=1e-5,
    )
    with torch.no_grad():
        torch.testing.assert_close(ours["out"], norm(x.float()).double(), rtol=1e-5, atol=1e-6)


def test_mla_through_three_oracles_is_their_attention(theirs: ModuleType) -> None:
    """Query and cache row, attention over the paged cache, value and gate, against per-head keys."""
    generator = torch.Generator().manual_seed(5)
    tokens, heads, q_lora = 70, NANO.heads, 64
    attention = theirs.KimiLinearAttention(_config(NANO), layer_idx=3)
    attention.q_a_layernorm.variance_epsilon = attention.kv_a_layernorm.variance_epsilon = NANO.norm_eps
    for name, parameter in attention.named_parameters():
        shift = 1.0 if "layernorm" in name else 0.0
        draw = torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
        parameter.data = (draw + shift).bfloat16().float()
    attention.o_proj.weight.data = torch.eye(heads * 128, NANO.hidden).T.contiguous()
    x = torch.randn(1, tokens, NANO.hidden, generator=generator).bfloat16().float()
    mask = torch.full((tokens, tokens), -torch.inf).triu(1)[None, None]
    with torch.no_grad():
        wanted = attention(x, mask)[0][0]
        packed = torch.cat((attention.q_a_proj(x), attention.kv_a_proj_with_mqa(x)), -1)[0]
    up = attention.kv_b_proj.weight.data.view(heads, 128 + 128, 512)
    ours = mla_query.oracle(
        packed=packed,
        q_norm=attention.q_a_layernorm.weight.data,
        kv_norm=attention.kv_a_layernorm.weight.data,
        q_weight=attention.q_b_proj.weight.data,
        uk_weight=up[:, :128],
        cache=torch.zeros(3, 64, 576),
        slot_mapping=torch.arange(64, 64 + tokens),
        kv_scale=1.0,
        eps=NANO.norm_eps,
    )
    latent = mla_attend.oracle(
        query=ours["query"],
        cache=ours["cache"],
        block_table=torch.tensor([[1, 2]], dtype=torch.int32),
        lengths=torch.tensor([tokens], dtype=torch.int32),
        rows=tokens,
        scale=192**-0.5,
        kv_scale=1.0,
    )
    value = mla_value.oracle(
        partial=latent["out"][None],
        partial_lse=latent["lse"][None],
        uv_weight=up[:, 128:].transpose(1, 2),
        gate=torch.full((tokens, heads * 128), OPEN),
        lse_base=mla_attend.LSE_BASE,
    )
    assert q_lora == NANO.q_lora
    torch.testing.assert_close(value["out"][:, : NANO.hidden], wanted.double(), rtol=1e-4, atol=1e-5)


def test_kda_recurrence_is_theirs(theirs: ModuleType) -> None:
    """Unbounded decay, as Kimi-Linear has it: gate, normalised keys, delta rule and the state after them."""
    generator = torch.Generator().manual_seed(6)
    tokens, heads = 9, 2
    width = heads * 128
    packed = torch.randn(tokens, 4 * width + 128 + 16, generator=generator).bfloat16()
    packed[:, 3 * width : 4 * width] = OPEN
    taps = torch.zeros(3, 4, width)
    taps[:, 3] = 1.0
    gate = theirs.KimiLinearForgetGate(_config(PRESETS["nano_linear"]))
    gate.f_a_proj.weight.data = torch.eye(128)
    gate.f_b_proj.weight.data = (torch.randn(width, 128, generator=generator) * 0.1).bfloat16().float()
    gate.dt_bias.data = torch.rand(width, generator=generator) * 4 - 5
    gate.A_log.data = torch.rand(1, 1, heads, 1, generator=generator)
    state = torch.randn(heads, 128, 128, generator=generator) * 0.1
    ours = kda_step.oracle(
        packed=packed,
        conv_weight=taps,
        decay_weight=gate.f_b_proj.weight.data.bfloat16(),
        a_log=gate.A_log.data.flatten(),
        dt_bias=gate.dt_bias.data,
        norm_weight=torch.ones(128),
        conv_state=torch.zeros(tokens + 1, tokens + 2, 3 * width, dtype=torch.bfloat16),
        state=torch.cat(
            (torch.zeros(1, heads, 128, 128), state[None], torch.zeros(tokens - 1, heads, 128, 128))
        ),
        slots=torch.arange(1, tokens + 1, dtype=torch.int32).view(1, tokens),
        accepted=None,
        rows=tokens,
        lower_bound=None,
        eps=0.0,
    )
    rows = packed.float()
    q, k, v = torch.nn.functional.silu(rows[:, : 3 * width]).view(1, tokens, 3, heads, 128).unbind(2)
    beta = torch.sigmoid(rows[None, :, 4 * width + 128 : 4 * width + 128 + heads])
    with torch.no_grad():
        decay = gate(rows[None, :, 4 * width : 4 * width + 128])
    initial = state.transpose(1, 2)[None].contiguous()
    for form in (theirs.recurrent_kimi_delta_attention, theirs.chunk_kimi_delta_attention):
        read, last = form(
            q,
            k,
            v,
            g=decay,
            beta=beta,
            initial_state=initial,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        torch.testing.assert_close(
            last[0].transpose(1, 2).double(), ours["state"][tokens], rtol=1e-4, atol=1e-5
        )
        normed = read[0].double() / read[0].double().square().mean(-1, keepdim=True).sqrt()
        torch.testing.assert_close(normed.flatten(1), ours["out"], rtol=1e-3, atol=1e-4)
