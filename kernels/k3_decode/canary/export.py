"""Weight files of the canary: safetensors, routed experts as MXFP4, everything else bf16 or fp32.

Writes and reads the format itself (an 8-byte length, a JSON header, the data), because training machines may lack the
library.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from k3_decode.canary.network import Network
from k3_decode.shapes import MXFP4_GROUP

__all__ = ["load_network", "mxfp4_packed", "mxfp4_unpacked", "parameters_of", "read_safetensors", "tensors_of", "write_safetensors", "write_weights"]  # fmt: skip

_DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.uint8: "U8"}
_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""E2M1 magnitudes by code; bit 3 is the sign."""
_FP32 = ("conv", "a_log", "dt_bias", "out_norm", "router_bias", "attn_query", "mlp_query", "final_query")
_EXPERTS = ("expert_gate", "expert_up", "expert_down")
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
    code = (code + 8 * (x < 0)).to(torch.uint8).reshape(weight.shape)
    packed = code[..., 0::2] | (code[..., 1::2] << 4)
    return packed.contiguous(), (exponent[..., 0] + _BIAS).to(torch.uint8)


def mxfp4_unpacked(packed: Tensor, scale: Tensor) -> Tensor:
    """fp32 weight of `mxfp4_packed`'s result."""
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
    levels = torch.tensor([*_LEVELS, *(-x for x in _LEVELS)], device=packed.device)
    values = levels[codes].unflatten(-1, (-1, MXFP4_GROUP))
    return (values * torch.exp2(scale.float() - _BIAS)[..., None]).flatten(-2)


def parameters_of(network: Network) -> dict[str, Tensor]:
    """Training names to tensors as they are stored; an expert weight `x` becomes `x.packed` and `x.scale`."""
    stored: dict[str, Tensor] = {}
    for name, value in network.state_dict().items():
        kind = name.rsplit(".", 1)[-1]
        value = value.detach().cpu()
        if kind in _EXPERTS:
            stored[f"{name}.packed"], stored[f"{name}.scale"] = mxfp4_packed(value)
        else:
            stored[name] = value.float() if kind in _FP32 else value.to(torch.bfloat16)
    return stored


def write_weights(network: Network, path: Path) -> None:
    """The export of a network."""
    write_safetensors(path, parameters_of(network))


def load_network(network: Network, path: Path) -> None:
    """Fills `network` from an export; expert weights become their MXFP4 values exactly."""
    stored = read_safetensors(path)
    state = {}
    for name, value in network.state_dict().items():
        if f"{name}.packed" in stored:
            loaded = mxfp4_unpacked(stored[f"{name}.packed"], stored[f"{name}.scale"])
        else:
            loaded = stored[name].float()
        state[name] = loaded.to(value.device)
    network.load_state_dict(state)


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes contiguous tensors in name order."""
    header: dict[str, object] = {}
    blobs, offset = [], 0
    for name in sorted(tensors):
        t = tensors[name].detach().cpu().contiguous()
        blob = t.reshape(-1).view(torch.uint8).numpy().tobytes()
        header[name] = {"dtype": _DTYPES[t.dtype], "shape": list(t.shape), "data_offsets": [offset, offset + len(blob)]}
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
