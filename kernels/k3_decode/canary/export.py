"""Weight files of the canary: safetensors, routed experts as MXFP4, everything else bf16 or fp32.

Writes and reads the format itself (an 8-byte length, a JSON header, the data), because training machines
may lack the library.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from k3_decode.canary.network import Layer, Network
from k3_decode.shapes import MXFP4_GROUP

__all__ = [
    "load_network",
    "mxfp4_packed",
    "mxfp4_unpacked",
    "read_safetensors",
    "tensors_of",
    "write_safetensors",
    "write_weights",
]

_DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.uint8: "U8"}
_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""E2M1 magnitudes by code; bit 3 is the sign."""
_LAYER_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "f_a": "self_attn.f_a_proj.weight",
    "f_b": "self_attn.f_b_proj.weight",
    "beta": "self_attn.b_proj.weight",
    "gate": "self_attn.g_proj.weight",
    "out": "self_attn.o_proj.weight",
    "a_log": "self_attn.A_log",
    "dt_bias": "self_attn.dt_bias",
    "out_norm": "self_attn.o_norm.weight",
    "q_a": "self_attn.q_a_proj.weight",
    "q_b": "self_attn.q_b_proj.weight",
    "q_norm": "self_attn.q_a_layernorm.weight",
    "kv_a": "self_attn.kv_a_proj_with_mqa.weight",
    "kv_b": "self_attn.kv_b_proj.weight",
    "kv_norm": "self_attn.kv_a_layernorm.weight",
    "router": "block_sparse_moe.gate.weight",
    "router_bias": "block_sparse_moe.gate.e_score_correction_bias",
    "latent_down": "block_sparse_moe.latent_down_proj.weight",
    "latent_up": "block_sparse_moe.latent_up_proj.weight",
    "latent_norm": "block_sparse_moe.routed_expert_norm.weight",
}
"""Training name to checkpoint name (`weights.py`) of what is stored as it is."""
_FP32 = ("a_log", "dt_bias", "out_norm", "router_bias")
_FFN_NAMES = {"ffn_gate": "gate_proj.weight", "ffn_up": "up_proj.weight", "ffn_down": "down_proj.weight"}
_CONVS = ("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight")
_BIAS = 127
"""E8M0: scale = 2^(byte - 127)."""


def mxfp4_packed(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(packed uint8 [..., K/2], low nibble first; scale bytes uint8 [..., K/32]) of an fp32 weight [..., K].

    The same grid as `network.mxfp4_rounded`: the scale is the smallest power of two that clips nothing.
    """
    grouped = weight.float().reshape(*weight.shape[:-1], -1, MXFP4_GROUP)
    peak = grouped.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    exponent = torch.ceil(torch.log2(peak / 6.0))
    x = (grouped / torch.exp2(exponent)).clamp(-6.0, 6.0)
    size = x.abs()
    step = torch.where(size < 2.0, 0.5, torch.where(size < 4.0, 1.0, 2.0))
    levels = torch.tensor(_LEVELS, device=weight.device)
    code = torch.bucketize(torch.round(size / step) * step, levels)
    code = (code + 8 * torch.signbit(x)).to(torch.uint8).reshape(weight.shape)
    packed = code[..., 0::2] | (code[..., 1::2] << 4)
    return packed.contiguous(), (exponent[..., 0] + _BIAS).to(torch.uint8)


def mxfp4_unpacked(packed: Tensor, scale: Tensor) -> Tensor:
    """fp32 weight of `mxfp4_packed`'s result."""
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
    levels = torch.tensor([*_LEVELS, *(-x for x in _LEVELS)], device=packed.device)
    values = torch.unflatten(levels[codes], -1, (-1, MXFP4_GROUP))
    return (values * torch.exp2(scale.float() - _BIAS)[..., None]).flatten(-2)


def tensors_of(network: Network) -> dict[str, Tensor]:
    """The network under the checkpoint's names and dtypes."""
    plain: dict[str, Tensor] = {
        "model.embed_tokens.weight": network.embedding, "lm_head.weight": network.head,
        "model.norm.weight": network.final_norm,
    }  # fmt: skip
    stored = {name: t.detach().to(torch.bfloat16) for name, t in plain.items()}
    stored |= _residual("model.output_attn_res", network.final_query)
    for i, layer in enumerate(network.each_layer()):
        stored |= {f"model.layers.{i}.{name}": t for name, t in _layer_tensors(layer).items()}
    return {name: t.detach().cpu().contiguous() for name, t in stored.items()}


def write_weights(network: Network, path: Path) -> None:
    """The export of a network."""
    write_safetensors(path, tensors_of(network))


@torch.no_grad()
def load_network(network: Network, path: Path) -> None:
    """Fills `network` from an export; expert weights become their MXFP4 values exactly."""
    stored = read_safetensors(path)
    network.embedding.copy_(stored["model.embed_tokens.weight"])
    network.head.copy_(stored["lm_head.weight"])
    network.final_norm.copy_(stored["model.norm.weight"])
    network.final_query.copy_(stored["model.output_attn_res_proj.weight"][0])
    for i, layer in enumerate(network.each_layer()):
        prefix = f"model.layers.{i}."
        _fill_layer(layer, {n.removeprefix(prefix): t for n, t in stored.items() if n.startswith(prefix)})


def _layer_tensors(layer: Layer) -> dict[str, Tensor]:
    stored = {}
    for name, value in layer.state_dict().items():
        if name in _LAYER_NAMES:
            stored[_LAYER_NAMES[name]] = value.float() if name in _FP32 else value.to(torch.bfloat16)
        elif name in _FFN_NAMES:
            stored[_ffn_prefix(layer) + _FFN_NAMES[name]] = value.to(torch.bfloat16)
    if not layer.is_mla:
        for name, part in zip(_CONVS, layer.conv.chunk(3), strict=True):
            stored[f"self_attn.{name}"] = part.float()[:, None]
    stored |= _residual("self_attention_res", layer.attn_query) | _residual("mlp_res", layer.mlp_query)
    if not layer.is_dense:
        w13 = torch.cat([layer.expert_gate, layer.expert_up], 1)
        for name, weight in (("w13", w13), ("w2", layer.expert_down)):
            packed, scale = mxfp4_packed(weight.detach())
            stored[f"block_sparse_moe.experts.{name}_weight"] = packed
            stored[f"block_sparse_moe.experts.{name}_weight_scale"] = scale
    return stored


def _fill_layer(layer: Layer, stored: Mapping[str, Tensor]) -> None:
    for name, value in layer.state_dict().items():  # these share storage with the parameters
        if name in _LAYER_NAMES:
            value.copy_(stored[_LAYER_NAMES[name]])
        elif name in _FFN_NAMES:
            value.copy_(stored[_ffn_prefix(layer) + _FFN_NAMES[name]])
    layer.attn_query.copy_(stored["self_attention_res_proj.weight"][0])
    layer.mlp_query.copy_(stored["mlp_res_proj.weight"][0])
    if not layer.is_mla:
        layer.conv.copy_(torch.cat([stored[f"self_attn.{name}"][:, 0] for name in _CONVS]))
    if not layer.is_dense:
        w13, w2 = (
            mxfp4_unpacked(
                *(stored[f"block_sparse_moe.experts.{name}_weight{end}"] for end in ("", "_scale"))
            )
            for name in ("w13", "w2")
        )
        gate, up = w13.chunk(2, 1)
        layer.expert_gate.copy_(gate)
        layer.expert_up.copy_(up)
        layer.expert_down.copy_(w2)


def _ffn_prefix(layer: Layer) -> str:
    return "mlp." if layer.is_dense else "block_sparse_moe.shared_experts."


def _residual(prefix: str, query: Tensor) -> dict[str, Tensor]:
    """A score vector trained as one is stored beside a norm of ones."""
    ones = torch.ones(query.shape[0], dtype=torch.bfloat16)
    return {f"{prefix}_norm.weight": ones, f"{prefix}_proj.weight": query.detach().float()[None]}


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes contiguous tensors in name order."""
    header: dict[str, object] = {}
    blobs, offset = [], 0
    for name in sorted(tensors):
        t = tensors[name].detach().cpu().contiguous()
        blob = t.reshape(-1).view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": _DTYPES[t.dtype],
            "shape": list(t.shape),
            "data_offsets": [offset, offset + len(blob)],
        }
        blobs.append(blob)
        offset += len(blob)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for blob in blobs:
            file.write(blob)


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a file that `write_safetensors` or the library wrote, if its dtypes are ours."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    body = np.frombuffer(data, np.uint8, offset=8 + size)
    dtypes = {name: dtype for dtype, name in _DTYPES.items()}
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        raw = torch.from_numpy(body[start:end].copy())
        found[name] = raw.view(dtypes[entry["dtype"]]).reshape(entry["shape"])
    return found
