"""Checkpoints: one table of names, files that are checked before they are used, shards that are exact."""

import math
from pathlib import Path

import pytest
import torch
from k3_decode.ops.mxfp4 import dequantise
from k3_decode.random_weights import random_checkpoint
from k3_decode.rank_weights import MoeWeights, shard
from k3_decode.shapes import CANARY, CANARY_H8, K3, NANO, NANO_LINEAR
from k3_decode.weights import (
    Checkpoint,
    CheckpointError,
    checkpoint_table,
    open_checkpoint,
    write_checkpoint,
)

CPU = torch.device("cpu")


def tensors(shapes: object = NANO) -> dict[str, torch.Tensor]:
    checkpoint = random_checkpoint(shapes, 0)  # type: ignore[arg-type]
    return {name: checkpoint.read(name) for name in sorted(checkpoint.names())}


def test_k3s_table_adds_up_to_the_published_size() -> None:
    """2.78 T parameters, as released; MXFP4 bytes hold two."""
    total = sum(
        0 if name.endswith("_scale") else math.prod(spec.shape) * (2 if spec.dtype == torch.uint8 else 1)
        for name, spec in checkpoint_table(K3).items()
    )
    assert round(total / 1e12, 2) == 2.78


def test_the_kimi_linear_variant_has_its_own_mechanisms() -> None:
    names = set(checkpoint_table(NANO_LINEAR))
    assert "model.layers.0.self_attn.g_b_proj.weight" in names
    assert "model.layers.3.self_attn.q_proj.weight" in names
    assert not any("attn_res" in name or "latent" in name or "q_a_" in name for name in names)


def test_what_is_written_is_read_back_bit_for_bit_and_in_parts(tmp_path: Path) -> None:
    held = tensors()
    write_checkpoint(tmp_path / "nano.safetensors", held, NANO)
    stored = open_checkpoint(tmp_path / "nano.safetensors", NANO)
    assert stored.names() == frozenset(held)
    for name, tensor in held.items():
        assert torch.equal(stored.read(name), tensor)
    part = stored.read("lm_head.weight", slice(10, 20), slice(3, 4))
    assert torch.equal(part, held["lm_head.weight"][10:20, 3:4])


def test_a_folder_of_files_is_one_checkpoint(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    held = tensors()
    names = sorted(held)
    save_file({n: held[n] for n in names[:50]}, str(tmp_path / "a.safetensors"))
    save_file({n: held[n] for n in names[50:]}, str(tmp_path / "b.safetensors"))
    assert open_checkpoint(tmp_path, NANO).names() == frozenset(names)


def test_a_wrong_checkpoint_is_refused_with_every_finding(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    held = tensors()
    del held["model.norm.weight"]
    held["lm_head.weight"] = held["lm_head.weight"][:, :3].clone()
    held["model.layers.0.self_attn.A_log"] = held["model.layers.0.self_attn.A_log"].to(torch.uint8)
    held["extra"] = torch.zeros(1)
    save_file(held, str(tmp_path / "bad.safetensors"))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path / "bad.safetensors", NANO)
    message = str(caught.value)
    assert "model.norm.weight is missing" in message
    assert "lm_head.weight has shape [320, 3], not [320, 128]" in message
    assert "A_log is U8, not BF16 or F32" in message
    assert "extra is no tensor of the model" in message
    with pytest.raises(CheckpointError, match="extra is no tensor"):
        write_checkpoint(tmp_path / "never.safetensors", held, NANO)
    assert not (tmp_path / "never.safetensors").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\x10\x00\x00", "not a safetensors file"),
        (b"\xff\xff\xff\xff\xff\xff\xff\x7f{}", "its header would be"),
        (b"\x02\x00\x00\x00\x00\x00\x00\x00[[", "its header is no JSON"),
        (
            b'\x3e\x00\x00\x00\x00\x00\x00\x00{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
            + b" " * 7,
            "does not fit bytes",
        ),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "broken.safetensors"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(file, NANO)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no safetensors file there"):
        open_checkpoint(tmp_path / "none.safetensors", NANO)


@pytest.mark.parametrize(("shapes", "tp"), [(NANO, 2), (CANARY, 2), (CANARY_H8, 8)])
def test_experts_of_all_ranks_add_up_to_the_whole_expert(shapes: object, tp: int) -> None:
    """Also where a rank's share is part of an MXFP4 group (the canary at TP8: 8 columns, padded to 32)."""
    checkpoint = random_checkpoint(shapes, 0)  # type: ignore[arg-type]
    whole = expert(checkpoint, shapes, 1, 0)
    parts = [expert(checkpoint, shapes, tp, rank) for rank in range(tp)]
    width = whole[1].shape[1] // tp
    assert torch.equal(torch.cat([second[:, :width] for _, second in parts], 1), whole[1])
    half = whole[0].shape[0] // 2
    for rank, (first, second) in enumerate(parts):
        own = slice(rank * width, (rank + 1) * width)
        padded = first.shape[0] // 2
        assert torch.equal(first[:width], whole[0][:half][own])
        assert torch.equal(first[padded : padded + width], whole[0][half:][own])
        assert not first[width:padded].any()
        assert not second[:, width:].any()


def expert(checkpoint: Checkpoint, shapes: object, tp: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 w13 and w2 of layer 1's expert 3 on one rank."""
    ffn = shard(checkpoint, shapes.rank(tp), rank, CPU).layers[1].ffn  # type: ignore[attr-defined]
    assert isinstance(ffn, MoeWeights)
    return dequantise(ffn.w13[3], ffn.w13_scale[3]), dequantise(ffn.w2[3], ffn.w2_scale[3])


def test_the_padded_expert_width_of_k3_at_tp16_is_256() -> None:
    assert [K3.rank(tp).expert_inter for tp in (1, 8, 16)] == [3072, 384, 256]
    assert CANARY_H8.rank(8).expert_inter == 32


def test_a_tensor_parallel_size_that_does_not_divide_the_heads_is_refused() -> None:
    with pytest.raises(ValueError, match="tp 5 does not divide the 96 heads of k3"):
        K3.rank(5)


@pytest.mark.parametrize(
    ("tp", "kda_rows", "mla_rows"), [(8, 6288, 3648), (16, 3216, 2880), (4, 12448, 5184)]
)
def test_packed_projections_have_the_published_rows(tp: int, kda_rows: int, mla_rows: int) -> None:
    rank = K3.rank(tp)
    assert (rank.kda_in_rows, rank.mla_in_rows) == (kda_rows, mla_rows)
