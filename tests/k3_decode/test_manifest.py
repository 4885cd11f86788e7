"""The kernels that a step is declared to run: by kind of layer, from the model's shape alone."""

import ast
from pathlib import Path

import k3_decode
import pytest
import torch
from k3_decode.manifest import (
    CUTE_FUNCTIONS,
    NARROW_MLP,
    SELECTING_EXPERTS,
    kinds_of_layers,
    meetings_of_a_step,
    pass_manifest,
    uses_of,
)
from k3_decode.op_table import load_ops
from k3_decode.ops.contract import OP_NAMES
from k3_decode.pack import PLAYED_RANKS
from k3_decode.session import SessionSpec, kernels_of_a_step, launches_of_a_step
from k3_decode.shapes import NANO, NANO_H16, PRESETS

CUTE = Path(k3_decode.__file__).parent / "cute"
CPU, META = torch.device("cpu"), torch.device("meta")


def totals(kind: str, rows: int) -> dict[str, int]:
    table = load_ops("cpu", NANO.rank(1), CPU)
    return {use.op: use.count for use in pass_manifest(table, "cpu", rows, kind, NANO.shared_inter)}


def test_a_models_layers_are_counted_by_kind() -> None:
    assert kinds_of_layers(NANO) == {"kda_dense": 1, "kda_moe": 3, "mla_moe": 2}


def test_a_layer_declares_its_attention_and_its_ffn() -> None:
    assert totals("kda_dense", 1) == {"attn_res": 2, "projection": 2, "kda_step": 1, "situ_mlp": 1}
    assert totals("mla_moe", 1) == {
        "attn_res": 2, "projection": 3, "mla_query": 1, "mla_attend": 1, "mla_value": 1, "moe_front": 1,
        "router": 1, "experts": 1, "latent_tail": 1,
    }  # fmt: skip


@pytest.mark.parametrize("tp", [1, 2])
def test_manifest_and_launch_counts_of_a_step_are_the_same(tp: int) -> None:
    spec = SessionSpec("nano", "cpu", True, tp, 2, 64, 0, "bf16", 0)
    uses, layers = kernels_of_a_step(spec, 2)
    found: dict[str, int] = {}
    for use in uses:
        if use.is_fused:
            found[use.op] = found.get(use.op, 0) + use.count * layers[use.layer]
    assert found == launches_of_a_step(spec, 2)


def test_ranks_meet_after_each_attention_and_ffn_twice_in_a_moe_and_at_the_head() -> None:
    assert meetings_of_a_step(NANO) == {"sum": 6 + 6 + 5, "gather": 1}
    uses = uses_of(NANO, load_ops("cpu", NANO.rank(2), CPU), "cpu", 1, 2)
    assert [use.layer for use in uses if use.op == "collective"] == ["sum", "gather"]


@pytest.mark.parametrize(("ranks", "name"), sorted(PLAYED_RANKS.items()))
def test_ranks_that_share_a_small_model_have_what_kernels_take_at_least(ranks: int, name: str) -> None:
    rank = PRESETS[name].rank(ranks)
    assert PRESETS[name].vocab % (8 * ranks) == 0  # columns of the head, in vectors of 16 bytes
    assert {rank.shared_inter % 32, rank.dense_inter % 32, rank.expert_inter % 32} == {0}


def test_four_ranks_on_a_gpu_cast_their_parts_add_them_in_turn_and_round_once() -> None:
    uses = uses_of(NANO_H16, load_ops("cute", NANO_H16.rank(4), META), "cute", 1, 4)
    found = [(use.patterns[0], use.layer, use.count) for use in uses if use.op == "collective"]
    assert found == [
        ("*copy_kernel*", "sum", 4 + 1),
        ("*CUDAFunctor_add*", "sum", 3),
        ("*CatArray*", "gather", 1),
    ]


@pytest.mark.parametrize("op", [*OP_NAMES, "narrow_mlp"])
def test_a_declared_kernel_is_the_name_of_a_kernel_in_its_module(op: str) -> None:
    tree = ast.parse((CUTE / f"{op}.py").read_text(encoding="utf-8"))
    kernels = {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(d).endswith("cute.kernel") for d in node.decorator_list)
    }
    declared = {NARROW_MLP} if op == "narrow_mlp" else {CUTE_FUNCTIONS[op]}
    if op == "experts":
        declared.add(SELECTING_EXPERTS)
    assert declared <= kernels
    assert kernels - declared <= {"_merge"}, "a kernel that no manifest declares"
