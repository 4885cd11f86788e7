"""The decode inside vLLM over a stand-in of vLLM's backbone: the numbers of the pack's own step, whatever
slots and pages each group of layers has.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from k3_decode.decode import OptimisedStep
from k3_decode.dispatch import Decision, Reason, Site, load_guard
from k3_decode.in_vllm.backbone import rank_shapes, unsupported_model
from k3_decode.in_vllm.decode import Decode, Deployment
from k3_decode.op_table import load_ops, poisoned
from k3_decode.random_weights import random_checkpoint
from k3_decode.rank_weights import DenseWeights, KdaWeights, LayerWeights, MlaWeights, ModelWeights, shard
from k3_decode.shapes import NANO, RankShapes
from k3_decode.state import KdaState, RankCaches, StepInputs

CPU = torch.device("cpu")
ROWS = 2
FULL, PIECEWISE = SimpleNamespace(name="NONE"), SimpleNamespace(name="PIECEWISE")
"""Modes under which vLLM captures graphs: a full one under none of its own."""


def holder(tensor: torch.Tensor | None) -> SimpleNamespace:
    """A module with a weight."""
    return SimpleNamespace(weight=SimpleNamespace(data=tensor))


def residual(score: torch.Tensor | None) -> tuple[SimpleNamespace, SimpleNamespace]:
    """Norm and pseudo-query whose product is the score."""
    assert score is not None
    return holder(torch.ones_like(score)), holder(score[None])


def attention_of(weights: KdaWeights | MlaWeights, name: str) -> SimpleNamespace:
    if isinstance(weights, MlaWeights):
        return SimpleNamespace(
            layer_name=name, fused_qkv_a_g_proj=holder(weights.in_proj), q_a_layernorm=holder(weights.q_norm),
            q_b_proj=holder(weights.q_weight), kv_a_layernorm=holder(weights.kv_norm),
            W_UK_T=SimpleNamespace(data=weights.uk_weight), W_UV=SimpleNamespace(data=weights.uv_weight),
            o_proj=holder(weights.out_proj),
        )  # fmt: skip
    kinds, width, channels = weights.conv_weight.shape
    taps = weights.conv_weight.transpose(1, 2).reshape(kinds * channels, 1, width)
    return SimpleNamespace(
        prefix=name, in_proj_qkvgfab=holder(weights.in_proj), f_b_proj=holder(weights.decay_weight),
        conv1d=holder(taps), A_log=SimpleNamespace(data=weights.a_log),
        dt_bias=SimpleNamespace(data=weights.dt_bias),
        o_norm=holder(weights.norm_weight), o_proj=holder(weights.out_proj),
    )  # fmt: skip


def ffn_of(weights: Any) -> SimpleNamespace:
    if isinstance(weights, DenseWeights):
        return SimpleNamespace(gate_up_proj=holder(weights.gate_up), down_proj=holder(weights.down))
    raw = {
        "w13_weight": weights.w13, "w13_weight_scale": weights.w13_scale, "w2_weight": weights.w2,
        "w2_weight_scale": weights.w2_scale,
    }  # fmt: skip
    routed = SimpleNamespace(**{name: SimpleNamespace(data=tensor) for name, tensor in raw.items()})
    gate = holder(weights.router_weight)
    gate.e_score_correction_bias = SimpleNamespace(data=weights.router_bias)
    return SimpleNamespace(
        gate=gate, experts=SimpleNamespace(routed_experts=routed),
        routed_expert_down_proj=holder(weights.down_weight), routed_expert_norm=holder(weights.latent_norm),
        routed_expert_up_proj=holder(weights.up_weight),
        shared_experts=SimpleNamespace(
            gate_up_proj=holder(weights.shared_gate_up), down_proj=holder(weights.shared_down)
        ),
    )  # fmt: skip


def layer_of(index: int, weights: LayerWeights) -> SimpleNamespace:
    attention_norm, attention_query = residual(weights.attention_score)
    ffn_norm, ffn_query = residual(weights.ffn_score)
    return SimpleNamespace(
        layer_idx=index, is_moe_layer=index > 0, self_attn=attention_of(weights.attention, f"layers.{index}"),
        mlp=ffn_of(weights.ffn), input_layernorm=holder(weights.attention_norm),
        post_attention_layernorm=holder(weights.ffn_norm), self_attention_res_norm=attention_norm,
        self_attention_res_proj=attention_query, mlp_res_norm=ffn_norm, mlp_res_proj=ffn_query,
    )  # fmt: skip


class Norm(SimpleNamespace):
    def __call__(self, hidden: torch.Tensor, _residual: None) -> torch.Tensor:
        return hidden + 1


def backbone_of(weights: ModelWeights) -> SimpleNamespace:
    norm, query = residual(weights.final_score)
    layers = [layer_of(index, layer) for index, layer in enumerate(weights.layers)]
    return SimpleNamespace(
        layers=layers, start_layer=0, end_layer=len(layers), embed_tokens=holder(weights.embedding),
        output_attn_res_norm=norm, output_attn_res_proj=query, aux_hidden_state_layers=(),
        norm=Norm(weight=SimpleNamespace(data=weights.final_norm)),
    )  # fmt: skip


@pytest.fixture(scope="module")
def weights() -> ModelWeights:
    return shard(random_checkpoint(NANO, 3), RankShapes(NANO, 1), 0, CPU)


class Served:
    """A decode with caches whose layers have slots and pages of their own, as vLLM's groups have."""

    def __init__(self, weights: ModelWeights, poison: str | None = None) -> None:
        shapes = weights.shapes
        table = load_ops("cpu", shapes, CPU)
        if poison is not None:
            table = poisoned(table, poison, 2.0)
        self.backbone, self.decisions = backbone_of(weights), list[Decision]()
        self.declines: list[tuple[int, str]] = []
        names = ("w13", "w13_scale", "w2", "w2_scale")
        experts = [
            table["experts"].prepare(**{name: getattr(layer.ffn, name) for name in names})
            for layer in weights.layers[1:]
        ]
        site = Site(
            arch="cpu", tp=1, dcp=1, kv_dtype="bf16", layers=shapes.model.layers, is_supported_model=True
        )
        deployment = Deployment(shapes, load_guard(), site, (1, ROWS), 256, None)
        self.caches = RankCaches.zeros(shapes, 9, 9, 0, "bf16", CPU)
        for index, layer in enumerate(self.backbone.layers):
            kda = self.caches.kda.get(index)
            layer.self_attn.kv_cache = self.caches.mla[index] if kda is None else (kda.conv, kda.recurrent)
        self.context: Any = None
        self.decode = Decode(
            self.backbone, deployment, table, experts, lambda: self.context, self.decisions.append,
            lambda rows, why: self.declines.append((rows, why)),
        )  # fmt: skip
        self.decode._is_capturing = lambda: True  # type: ignore[method-assign]  # a CPU captures nothing
        self.decode.prepare_kv()

    def set_step(self, mode: object, *, slots: dict[int, list[int]], pages: list[int], length: int) -> None:
        """The forward context of a plain decode step."""
        metadata, mapping = {}, {}
        for index, layer in enumerate(self.backbone.layers):
            name = f"layers.{index}"
            if hasattr(layer.self_attn, "layer_name"):
                decode = SimpleNamespace(
                    block_table=torch.tensor([[page] for page in pages], dtype=torch.int32),
                    seq_lens=torch.full((ROWS,), length, dtype=torch.int32),
                )
                metadata[name] = SimpleNamespace(num_prefills=0, num_decode_tokens=ROWS, decode=decode)
            else:
                indices = torch.tensor(slots[index], dtype=torch.int32)
                metadata[name] = SimpleNamespace(
                    num_prefills=0, num_spec_decodes=0, non_spec_state_indices_tensor=indices
                )
            mapping[name] = torch.tensor([page * 64 + length - 1 for page in pages])
        self.context = SimpleNamespace(
            attn_metadata=metadata, slot_mapping=mapping, cudagraph_runtime_mode=mode
        )

    def hidden(self, tokens: list[int]) -> torch.Tensor:
        step = self.decode.plan(torch.zeros(len(tokens)), None)
        assert step is not None
        found: torch.Tensor = self.decode.run(step, torch.tensor(tokens), None)
        return found


def everywhere(slots: list[int]) -> dict[int, list[int]]:
    """The same slots in every layer."""
    return dict.fromkeys(range(NANO.layers), slots)


def own_slots(index: int) -> list[int]:
    """Other slots for other layers."""
    return [1 + index, 8 - index] if index < 4 else [2, 5]


def own_steps(weights: ModelWeights, tokens: list[list[int]]) -> list[torch.Tensor]:
    """Logits of the pack's own step over caches of its own, all layers on slots 1 and 2."""
    caches = RankCaches.zeros(weights.shapes, 3, 3, 0, "bf16", CPU)
    step = OptimisedStep(weights, caches, load_ops("cpu", weights.shapes, CPU), ROWS)
    found = []
    for place, row in enumerate(tokens):
        inputs = StepInputs(
            requests=ROWS, rows=1, slots=torch.tensor([[1], [2]], dtype=torch.int32), accepted=None,
            slot_mapping=torch.tensor([64 + place, 128 + place]),
            block_table=torch.tensor([[1], [2]], dtype=torch.int32),
            lengths=torch.full((ROWS,), place + 1, dtype=torch.int32), context_min=1, context_max=256,
        )  # fmt: skip
        exchange = step.forward(torch.tensor(row), inputs)
        with pytest.raises(StopIteration) as end:
            next(exchange)
        found.append(end.value.value.clone())
    return found


TOKENS = [[5, 9], [17, 200], [3, 44]]


def run_all(served: Served) -> list[torch.Tensor]:
    found = []
    for place, row in enumerate(TOKENS):
        slots = {index: own_slots(index) for index in range(NANO.layers)}
        served.set_step(FULL, slots=slots, pages=[4, 7], length=place + 1)
        found.append(served.hidden(row))
    return found


def test_logits_are_those_of_the_packs_own_step_to_the_bit(weights: ModelWeights) -> None:
    table = load_ops("cpu", weights.shapes, CPU)
    head = table["projection"].prepare(weight=weights.head)
    launches = torch.zeros(16, dtype=torch.int32)
    for hidden, expected in zip(run_all(Served(weights)), own_steps(weights, TOKENS), strict=True):
        logits = torch.zeros_like(expected)
        table["projection"].run(x=hidden, out=logits, launches=launches, **head)
        assert torch.equal(logits, expected)


def test_a_poisoned_op_changes_what_comes_out(weights: ModelWeights) -> None:
    sound, wrong = run_all(Served(weights)), run_all(Served(weights, "experts"))
    assert not torch.equal(sound[0], wrong[0])


def test_a_null_slot_of_a_padded_graph_leaves_every_state_untouched(weights: ModelWeights) -> None:
    served = Served(weights)
    before = {name: tensor.clone() for name, tensor in served.caches.named().items()}
    served.set_step(FULL, slots=everywhere([0, 0]), pages=[1, 1], length=1)
    for mapping in served.context.slot_mapping.values():
        mapping.fill_(-1)
    served.hidden([1, 2])
    assert all(torch.equal(tensor, before[name]) for name, tensor in served.caches.named().items())


def test_a_planned_step_is_told_with_its_reason(weights: ModelWeights) -> None:
    served = Served(weights)
    run_all(served)
    assert [(d.path, d.reason, d.requests, d.layer_paths) for d in served.decisions[:1]] == [
        ("optimised", Reason.TAKEN, ROWS, "oooooo")
    ]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("piecewise", "a piecewise graph"),
        ("prefill", "prompts or drafts in layers.0"),
        ("drafts", "prompts or drafts in layers.1"),
        ("rows", "a batch that is not prepared"),
        ("stage", "input of a pipeline stage"),
        ("no context", "no forward context"),
        ("aux", "auxiliary hidden states are asked for"),
    ],
)
def test_a_step_that_is_no_plain_decode_under_a_full_graph_is_left_to_stock_and_says_why(
    weights: ModelWeights, change: str, why: str
) -> None:
    served = Served(weights)
    mode = PIECEWISE if change == "piecewise" else FULL
    served.set_step(mode, slots=everywhere([1, 2]), pages=[1, 2], length=1)
    if change == "prefill":
        served.context.attn_metadata["layers.0"].num_prefills = 1
    if change == "drafts":
        served.context.attn_metadata["layers.1"].num_spec_decodes = 1
    if change == "no context":
        served.context = None
    if change == "aux":
        served.backbone.aux_hidden_state_layers = (1,)
    rows = 3 if change == "rows" else ROWS
    assert served.decode.plan(torch.zeros(rows), object() if change == "stage" else None) is None
    assert served.declines == [(rows, why)]


def test_outside_of_a_capture_the_stock_forward_runs(weights: ModelWeights) -> None:
    served = Served(weights)
    served.set_step(FULL, slots=everywhere([1, 2]), pages=[1, 2], length=1)
    served.decode._is_capturing = lambda: False  # type: ignore[method-assign]
    assert served.decode.plan(torch.zeros(ROWS), None) is None


def test_a_stock_steps_output_gets_the_final_norm_in_pieces_of_255_rows(weights: ModelWeights) -> None:
    served = Served(weights)
    assert torch.equal(served.decode.normalize(torch.zeros(300, 4)), torch.ones(300, 4))


def config(**changes: object) -> SimpleNamespace:
    """What vLLM reads from the text model's configuration."""
    linear = {
        "kda_layers": [1, 2, 3, 5, 6, 7], "head_dim": 128, "short_conv_kernel_size": 4,
        "use_full_rank_gate": True, "gate_lower_bound": -5.0,
    }  # fmt: skip
    fields: dict[str, object] = {
        "hidden_size": 7168, "num_hidden_layers": 8, "num_attention_heads": 12, "num_experts": 896,
        "num_experts_per_token": 16, "routed_expert_hidden_size": 3584, "moe_intermediate_size": 384,
        "num_shared_experts": 2, "intermediate_size": 4224, "vocab_size": 20480, "q_lora_rank": 1536,
        "attn_res_block_size": 4, "mla_use_output_gate": True, "hidden_act": "situ",
        "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0, "routed_scaling_factor": 1.0,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "latent_moe_use_norm": True,
        "num_expert_group": 1, "topk_group": 1, "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True, "kv_lora_rank": 512, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "linear_attn_config": linear,
    }  # fmt: skip
    return SimpleNamespace(**(fields | changes))


def test_sizes_of_one_tp8_rank_are_read_from_the_configuration() -> None:
    shapes = rank_shapes(config(), 1)
    assert (shapes.heads, shapes.expert_inter, shapes.shared_inter, shapes.dense_inter) == (
        12,
        384,
        768,
        4224,
    )
    assert (shapes.kda_in_rows, shapes.mla_in_rows, shapes.model.mla_layers) == (6288, 3648, (3, 7))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"attn_res_block_size": None}, "a model without attention residuals"),
        ({"hidden_act": "silu"}, "an activation other than SiTU 4/25"),
        ({"num_expert_group": 8}, "grouped experts"),
        ({"q_lora_rank": None}, "a query of full rank"),
    ],
)
def test_a_model_that_the_ops_do_not_cover_is_named(change: dict[str, object], words: str | None) -> None:
    assert unsupported_model(config(**change)) == words


def test_states_are_taken_as_vllm_lays_them_out(weights: ModelWeights) -> None:
    served = Served(weights)
    assert isinstance(served.decode._caches.kda[0], KdaState)
    assert served.decode._caches.kda[0].recurrent.data_ptr() == served.caches.kda[0].recurrent.data_ptr()
