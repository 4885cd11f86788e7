"""Checkpoints of the K3 family: the name, shape and dtype of every tensor, safetensors
in and out.

Names follow the released checkpoints and vLLM; routed experts are stored as vLLM holds them at run time. D
hidden, C = 128 heads, H heads, E experts, I expert width, L latent width (D without latent MoE), S shared
width, F dense width, Q rank of the query, V vocabulary; `{i}` the 0-based layer. bf16 unless said; where fp32
is said bf16 is read too.

    model.embed_tokens.weight [V,D]           lm_head.weight [V,D]           model.norm.weight [D]
    model.output_attn_res_norm.weight [D] ; model.output_attn_res_proj.weight fp32 [1,D] (AttnRes)
  model.layers.{i}.
    input_layernorm.weight [D]                post_attention_layernorm.weight [D]
    self_attention_res_norm.weight [D] ; self_attention_res_proj.weight fp32 [1,D] (AttnRes)
    mlp_res_norm.weight [D] ; mlp_res_proj.weight fp32 [1,D] (AttnRes)
  KDA layers, model.layers.{i}.self_attn.
    q_proj.weight, k_proj.weight, v_proj.weight [C,D] ; q_conv1d.weight, k_conv1d..., v_conv1d... fp32 [C,1,4]
    f_a_proj.weight [128,D]                   f_b_proj.weight [C,128]        b_proj.weight [H,D]
    g_proj.weight [C,D] ; (full-rank gate), or g_a_proj.weight [128,D], g_b_proj.weight [C,128]
    A_log fp32 [H] ; dt_bias fp32 [C] ; o_norm.weight fp32 [128]
    o_proj.weight [D,C]
  MLA layers, model.layers.{i}.self_attn.
    q_a_proj.weight [Q,D] ; q_a_layernorm.weight [Q] ; q_b_proj.weight [192H,Q]
    q_proj.weight [192H,D]                    (instead of those three where the query has full rank)
    kv_a_proj_with_mqa.weight [576,D] ; kv_a_layernorm.weight [512] ; kv_b_proj.weight [256H,512]
    g_proj.weight [C,D] (gated MLA)           o_proj.weight [D,C]
  layer 0, model.layers.0.mlp.
    gate_proj.weight, up_proj.weight [F,D]    down_proj.weight [D,F]
  MoE layers, model.layers.{i}.block_sparse_moe.
    gate.weight [E,D]                         gate.e_score_correction_bias fp32 [E]
    latent_down_proj.weight [L,D] ; latent_up_proj.weight [D,L] ; routed_expert_norm.weight [L] (latent MoE)
    experts.w13_weight uint8 [E,2I,L/2]       experts.w13_weight_scale uint8 [E,2I,L/32]
    experts.w2_weight uint8 [E,L,I/2]         experts.w2_weight_scale uint8 [E,L,I/32]
    shared_experts.gate_proj.weight, shared_experts.up_proj.weight [S,D]
    shared_experts.down_proj.weight [D,S]

Meanings where names leave room. Packed rows are head-major: row 128h + d of q, k, v, g, f_b and dt_bias is
channel d of head h; kv_b rows of a head are 128 of k_nope, then 128 of v; q_b rows 128 of nope, then 64 of
rope. Convolution taps run from the oldest input to the newest. An AttnRes score is the dot product of the
source with norm * proj (elementwise), so a model that was trained with one vector stores it as proj beside a
norm of ones. Rows 0..I-1 of w13 are the gate (w1), I..2I-1 the up-projection (w3); MXFP4 as in
`ops/mxfp4.py`. Kimi-Linear's experts, released in bf16, are stored as MXFP4 too.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from k3_decode.shapes import MXFP4_GROUP, K3Shapes

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "StoredTensor",
    "TensorSpec",
    "checkpoint_table",
    "open_checkpoint",
    "write_checkpoint",
]

LAYER = "model.layers.{}."
LOGIT_SPREAD = 3.0
"""Standard deviation of a random model's logits, so that its answers are not near ties."""
OUTPUT_GAIN = 0.5
"""Size of a random model's sublayer outputs beside its embeddings."""
QUERY_GAIN = 3.0
"""Sharpens a random model's attention; at 1 it would average over all tokens, whichever they are."""


class CheckpointError(ValueError):
    """A checkpoint that does not hold what its model needs; the message lists every finding."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a checkpoint, and how a random model draws it."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    scale: float = 1.0
    """Standard deviation; of a norm, of what is added to one."""
    draw: str = "normal"
    """`normal`, `norm` (one plus normal), `uniform` (`low`..`high`), `experts` and `scales` (MXFP4)."""
    low: float = 0.0
    high: float = 0.0


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies in a safetensors file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    """First byte, from the start of the file."""
    end: int

    def read(self, index: tuple[slice, ...]) -> torch.Tensor:
        """A copy of the part `index`; only its pages are read from disk."""
        size = self.file.stat().st_size
        raw = torch.from_file(str(self.file), shared=False, size=size, dtype=torch.uint8)[
            self.start : self.end
        ]
        dtype = _DTYPES[self.dtype]
        aligned = raw if self.start % dtype.itemsize == 0 else raw.clone()
        return aligned.view(dtype).view(self.shape)[index].clone()


class Checkpoint:
    """Tensors by name that can be read in part, from memory or from safetensors files."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], stored: Mapping[str, StoredTensor]) -> None:
        self._tensors = tensors
        self._stored = stored

    def names(self) -> frozenset[str]:
        """Every tensor's name."""
        return frozenset(self._tensors) | frozenset(self._stored)

    def read(self, name: str, *index: slice) -> torch.Tensor:
        """A tensor, or the part `index` of it (one slice an axis)."""
        if name in self._tensors:
            return self._tensors[name][index]
        if name not in self._stored:
            raise CheckpointError(f"the checkpoint has no tensor {name!r}")
        return self._stored[name].read(index)


def open_checkpoint(path: Path, shapes: K3Shapes) -> Checkpoint:
    """A safetensors file, or a folder of them, checked against the table of `shapes`.

    Raises `CheckpointError` that lists every tensor that is missing or has another shape or dtype.
    """
    paths = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not paths or not paths[0].is_file():
        raise CheckpointError(f"{path}: no safetensors file there; give a file or a folder that holds some")
    stored: dict[str, StoredTensor] = {}
    for one in paths:
        stored |= _read_header(one)
    held = {name: (tensor.shape, tensor.dtype) for name, tensor in stored.items()}
    faults = list(_check_tensors(held, checkpoint_table(shapes)))
    if faults:
        raise CheckpointError(f"{path} is no checkpoint of {shapes.name}: " + "; ".join(faults))
    return Checkpoint({}, stored)


def write_checkpoint(path: Path, tensors: Mapping[str, torch.Tensor], shapes: K3Shapes) -> None:
    """Writes a whole model's tensors to one safetensors file; `CheckpointError` if they are not its."""
    held = {name: (tuple(t.shape), _DTYPE_NAMES.get(t.dtype, str(t.dtype))) for name, t in tensors.items()}
    faults = list(_check_tensors(held, checkpoint_table(shapes)))
    if faults:
        raise CheckpointError(f"these are no tensors of {shapes.name}: " + "; ".join(faults))
    from safetensors.torch import save_file  # here, so that machines that only read need torch alone

    ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(ready, str(path), metadata={"model": shapes.name})


def checkpoint_table(shapes: K3Shapes) -> dict[str, TensorSpec]:
    """Every tensor of a model by name, in layer order."""
    hidden, vocab = shapes.hidden, shapes.vocab
    table = {"model.embed_tokens.weight": TensorSpec((vocab, hidden))}
    for layer in range(shapes.layers):
        prefix = LAYER.format(layer)
        table[f"{prefix}input_layernorm.weight"] = _norm(hidden)
        table[f"{prefix}post_attention_layernorm.weight"] = _norm(hidden)
        if shapes.attn_res_block:
            table |= _residual(f"{prefix}self_attention_res", hidden) | _residual(f"{prefix}mlp_res", hidden)
        attention = _mla(shapes) if shapes.is_mla(layer) else _kda(shapes)
        table |= {f"{prefix}self_attn.{name}": spec for name, spec in attention.items()}
        if layer == 0:
            table |= {f"{prefix}mlp.{name}": spec for name, spec in _mlp(hidden, shapes.dense_inter).items()}
        else:
            table |= {f"{prefix}block_sparse_moe.{name}": spec for name, spec in _moe(shapes).items()}
    if shapes.attn_res_block:
        table |= _residual("model.output_attn_res", hidden)
    table["model.norm.weight"] = _norm(hidden)
    table["lm_head.weight"] = TensorSpec((vocab, hidden), scale=LOGIT_SPREAD * hidden**-0.5)
    return table


def _linear(rows: int, width: int, gain: float = 1.0) -> TensorSpec:
    return TensorSpec((rows, width), scale=gain * width**-0.5)


def _norm(width: int, dtype: torch.dtype = torch.bfloat16) -> TensorSpec:
    return TensorSpec((width,), dtype, scale=0.1, draw="norm")


def _residual(prefix: str, hidden: int) -> dict[str, TensorSpec]:
    query = TensorSpec((1, hidden), torch.float32, scale=0.5 * hidden**-0.5)
    return {f"{prefix}_norm.weight": _norm(hidden), f"{prefix}_proj.weight": query}


def _mlp(hidden: int, inter: int, prefix: str = "") -> dict[str, TensorSpec]:
    return {
        f"{prefix}gate_proj.weight": _linear(inter, hidden),
        f"{prefix}up_proj.weight": _linear(inter, hidden),
        f"{prefix}down_proj.weight": _linear(hidden, inter, OUTPUT_GAIN),
    }


def _kda(shapes: K3Shapes) -> dict[str, TensorSpec]:
    hidden, heads, width = shapes.hidden, shapes.heads, shapes.heads * shapes.head_dim
    table = {f"{part}_proj.weight": _linear(width, hidden) for part in "qkv"}
    for part in "qkv":
        table[f"{part}_conv1d.weight"] = TensorSpec((width, 1, shapes.conv_width), torch.float32, scale=0.5)
    table |= {
        "f_a_proj.weight": _linear(shapes.head_dim, hidden),
        "f_b_proj.weight": _linear(width, shapes.head_dim),
        "b_proj.weight": _linear(heads, hidden),
        "A_log": TensorSpec((heads,), torch.float32, draw="uniform", low=-0.5, high=0.5),
        "dt_bias": TensorSpec((width,), torch.float32, draw="uniform", low=-9.0, high=-2.0),
        "o_norm.weight": _norm(shapes.head_dim, torch.float32),
        "o_proj.weight": _linear(hidden, width, OUTPUT_GAIN),
    }
    if shapes.has_full_rank_gate:
        return table | {"g_proj.weight": _linear(width, hidden)}
    gate = {"g_a_proj.weight": (shapes.head_dim, hidden), "g_b_proj.weight": (width, shapes.head_dim)}
    return table | {name: _linear(*shape) for name, shape in gate.items()}


def _mla(shapes: K3Shapes) -> dict[str, TensorSpec]:
    hidden, heads, width = shapes.hidden, shapes.heads, shapes.heads * shapes.v_dim
    query = heads * (shapes.qk_nope + shapes.qk_rope)
    table = {
        "kv_a_proj_with_mqa.weight": _linear(shapes.kv_lora + shapes.qk_rope, hidden),
        "kv_a_layernorm.weight": _norm(shapes.kv_lora),
        "kv_b_proj.weight": _linear(heads * (shapes.qk_nope + shapes.v_dim), shapes.kv_lora),
        "o_proj.weight": _linear(hidden, width, OUTPUT_GAIN),
    }
    if shapes.q_lora is None:
        table["q_proj.weight"] = _linear(query, hidden, QUERY_GAIN)
    else:
        table["q_a_proj.weight"] = _linear(shapes.q_lora, hidden)
        table["q_a_layernorm.weight"] = _norm(shapes.q_lora)
        table["q_b_proj.weight"] = _linear(query, shapes.q_lora, QUERY_GAIN)
    if shapes.has_mla_gate:
        table["g_proj.weight"] = _linear(width, hidden)
    return table


def _moe(shapes: K3Shapes) -> dict[str, TensorSpec]:
    hidden, latent, experts, inter = shapes.hidden, shapes.latent, shapes.experts, shapes.expert_inter
    byte, group = torch.uint8, MXFP4_GROUP
    table = {
        "gate.weight": TensorSpec((experts, hidden), scale=hidden**-0.5),
        "gate.e_score_correction_bias": TensorSpec(
            (experts,), torch.float32, draw="uniform", low=-0.005, high=0.005
        ),
        "experts.w13_weight": TensorSpec((experts, 2 * inter, latent // 2), byte, latent**-0.5, "experts"),
        "experts.w13_weight_scale": TensorSpec(
            (experts, 2 * inter, latent // group), byte, latent**-0.5, "scales"
        ),
        "experts.w2_weight": TensorSpec((experts, latent, inter // 2), byte, inter**-0.5, "experts"),
        "experts.w2_weight_scale": TensorSpec((experts, latent, inter // group), byte, inter**-0.5, "scales"),
    }
    if shapes.has_latent_moe:
        table["latent_down_proj.weight"] = _linear(latent, hidden)
        table["latent_up_proj.weight"] = _linear(hidden, latent, OUTPUT_GAIN)
        table["routed_expert_norm.weight"] = _norm(latent)
    return table | _mlp(hidden, shapes.shared_inter, "shared_experts.")


_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
MAX_HEADER_BYTES = 100 << 20


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of a safetensors file, from its header alone; `CheckpointError` where that is broken."""
    total = path.stat().st_size
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 2 <= size <= min(MAX_HEADER_BYTES, total - 8):
            raise CheckpointError(f"{path}: not a safetensors file, its header would be {size} bytes long")
        try:
            header = json.loads(file.read(size))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise CheckpointError(
                f"{path}: not a safetensors file, its header is no JSON ({error})"
            ) from error
    found: dict[str, StoredTensor] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = (8 + size + offset for offset in entry["data_offsets"])
        dtype, shape = str(entry["dtype"]), tuple(entry["shape"])
        expected = math.prod(shape) * _DTYPES[dtype].itemsize if dtype in _DTYPES else -1
        if not 8 + size <= start <= end <= total or end - start != expected:
            raise CheckpointError(
                f"{path}: tensor {name} ({dtype} {list(shape)}) does not fit bytes {start}..{end} of "
                f"{total}; the file is cut short, or holds a dtype other than BF16, F32 and U8"
            )
        found[name] = StoredTensor(path, dtype, shape, start, end)
    return found


def _check_tensors(
    found: Mapping[str, tuple[tuple[int, ...], str]], table: Mapping[str, TensorSpec]
) -> Iterator[str]:
    """What is missing, unknown, or of another shape or dtype; bf16 may stand for fp32."""
    for name, spec in table.items():
        if name not in found:
            yield f"{name} is missing"
            continue
        shape, dtype = found[name]
        if shape != spec.shape:
            yield f"{name} has shape {list(shape)}, not {list(spec.shape)}"
        allowed = {_DTYPE_NAMES[spec.dtype]} | ({"BF16"} if spec.dtype == torch.float32 else set())
        if dtype not in allowed:
            yield f"{name} is {dtype}, not {' or '.join(sorted(allowed))}"
    for name in sorted(set(found) - set(table)):
        yield f"{name} is no tensor of the model"
