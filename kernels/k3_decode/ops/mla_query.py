"""MLA's query in the latent space, and this step's rows into the paged cache.

query = [ (RMSNorm(q_a) @ q_weight.T)[nope 128] @ uk_weight | rope 64, never rotated ] per head; cache row =
[RMSNorm(latent) 512 | k_pe 64], shared by all heads. In an fp8 cache a value is stored as e4m3(value /
kv_scale), saturating at 448. A slot is page * page size + offset; a slot below 0 stores nothing, its query is
computed all the same.
"""

from collections.abc import Mapping

import torch

from k3_decode.ops.contract import Args, Cell, OpSpec, Param, Role, from_args
from k3_decode.ops.inputs import (
    BASE_REGIMES,
    NEAR_OVERFLOW_OF_SQUARES,
    activation,
    poisoned,
    require_regime,
    weight,
    with_row_gap,
    with_special_rows,
)
from k3_decode.ops.norms import rms_norm
from k3_decode.ops.products import batched, linear

__all__ = [
    "FP8_MAX",
    "KV_LORA",
    "PAGE_SIZE",
    "QK_NOPE",
    "QK_ROPE",
    "SPEC",
    "absorb",
    "cache_dtype",
    "oracle",
    "stock",
    "store_rows",
    "to_cache",
]

REGIMES = (*BASE_REGIMES, "skipped_slots", "strided_rows", "saturating", "near_overflow", "special_rows")
PAGE_SIZE = 64
KV_LORA = 512
QK_NOPE = 128
QK_ROPE = 64
FP8_MAX = 448.0
FP8_KV_SCALE = 0.0173
"""Not a power of two, so that a kernel that ignores it cannot agree."""


def cache_dtype(kv_dtype: str) -> torch.dtype:
    """The cache's element type; raises `ValueError` for a name other than bf16 and fp8."""
    if kv_dtype not in ("bf16", "fp8"):
        raise ValueError(f"kv_dtype is {kv_dtype!r}; it must be bf16 or fp8")
    return torch.float8_e4m3fn if kv_dtype == "fp8" else torch.bfloat16


def to_cache(rows: torch.Tensor, kv_scale: float, dtype: torch.dtype) -> torch.Tensor:
    """bf16 rows as the cache holds them."""
    if dtype == torch.bfloat16:
        return rows
    return (rows.float() / kv_scale).clamp(-FP8_MAX, FP8_MAX).to(dtype)


def stock(
    *,
    packed: torch.Tensor,
    q_norm: torch.Tensor,
    kv_norm: torch.Tensor,
    q_weight: torch.Tensor,
    uk_weight: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    query: torch.Tensor,
    kv_scale: float,
    eps: float,
) -> None:
    """Norms, both products and the cache row are each rounded to bf16."""
    q_lora, heads = q_norm.shape[0], uk_weight.shape[0]
    q_c = rms_norm(packed[:, :q_lora], q_norm, eps)
    q = linear(q_c, q_weight).view(-1, heads, QK_NOPE + QK_ROPE)
    absorb(q, uk_weight, query)
    store_rows(packed[:, q_lora : q_lora + KV_LORA + QK_ROPE], kv_norm, cache, slot_mapping, kv_scale, eps)


def absorb(q: torch.Tensor, uk_weight: torch.Tensor, query: torch.Tensor) -> None:
    """bf16 latent queries [B,H,576] of per-head queries [B,H,192]."""
    query[..., :KV_LORA] = batched(q[..., :QK_NOPE].transpose(0, 1), uk_weight).transpose(0, 1)
    query[..., KV_LORA:] = q[..., QK_NOPE:]


def store_rows(
    latent_and_rope: torch.Tensor,
    kv_norm: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_scale: float,
    eps: float,
) -> None:
    """Norms the latents of [B,576], and stores the rows whose slot is not negative."""
    latent = rms_norm(latent_and_rope[:, :KV_LORA], kv_norm, eps)
    rows = torch.cat((latent, latent_and_rope[:, KV_LORA:]), dim=1)
    kept = slot_mapping >= 0
    target = slot_mapping[kept]
    cache[target // PAGE_SIZE, target % PAGE_SIZE] = to_cache(rows[kept], kv_scale, cache.dtype)


def oracle(
    *,
    packed: torch.Tensor,
    q_norm: torch.Tensor,
    kv_norm: torch.Tensor,
    q_weight: torch.Tensor,
    uk_weight: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_scale: float,
    eps: float,
    **_: object,
) -> Mapping[str, torch.Tensor]:
    """Float64; the cache in its own units (value / kv_scale), unrounded where this call writes."""
    q_lora, heads = q_norm.shape[0], uk_weight.shape[0]
    rows = packed.double()
    q = _norm(rows[:, :q_lora], q_norm, eps) @ q_weight.double().T
    query = torch.empty(packed.shape[0], heads, KV_LORA + QK_ROPE, dtype=torch.float64, device=packed.device)
    for h in range(heads):
        own = q[:, h * (QK_NOPE + QK_ROPE) : (h + 1) * (QK_NOPE + QK_ROPE)]
        query[:, h, :KV_LORA] = own[:, :QK_NOPE] @ uk_weight[h].double()
        query[:, h, KV_LORA:] = own[:, QK_NOPE:]
    new_cache = cache.double()
    latent = _norm(rows[:, q_lora : q_lora + KV_LORA], kv_norm, eps)
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        k_pe = rows[token, q_lora + KV_LORA : q_lora + KV_LORA + QK_ROPE]
        row = torch.cat((latent[token], k_pe))
        if cache.dtype == torch.float8_e4m3fn:
            row = (row / kv_scale).clamp(-FP8_MAX, FP8_MAX)
        new_cache[slot // PAGE_SIZE, slot % PAGE_SIZE] = row
    return {"cache": new_cache, "query": query}


def _norm(x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(dim=1, keepdim=True) + eps) * scale.double()


def touched(*, cache: torch.Tensor, slot_mapping: torch.Tensor, **_: object) -> Mapping[str, torch.Tensor]:
    """The cache rows of the step's tokens."""
    mask = torch.zeros(cache.shape, dtype=torch.bool, device=cache.device)
    for slot in slot_mapping.tolist():
        if slot >= 0:
            mask[slot // PAGE_SIZE, slot % PAGE_SIZE] = True
    return {"cache": mask}


def make_args(cell: Cell, regime: str, generator: torch.Generator, device: torch.device) -> Args:
    """Arguments over a small pool of pages, written at scattered slots; `ValueError` for a model without
    q-LoRA.
    """
    require_regime("mla_query", REGIMES, regime)
    shapes, model = cell.shapes, cell.shapes.model
    if model.q_lora is None:
        raise ValueError(f"mla_query needs a low-rank query; {model.name} has none")
    heads, is_fp8 = shapes.heads, cell.kv_dtype == "fp8"
    pages = cell.tokens // PAGE_SIZE + 3
    packed = activation(
        regime, (cell.tokens, shapes.mla_in_rows), generator, device, source="mla_query.packed"
    )
    if regime == "saturating":
        packed[:, model.q_lora + KV_LORA : model.q_lora + KV_LORA + QK_ROPE] *= 30.0
    if regime == "near_overflow":
        packed = (packed.float() * NEAR_OVERFLOW_OF_SQUARES).to(packed.dtype)
    if regime == "special_rows":
        packed = with_special_rows(packed)
    slot_mapping = torch.randperm(pages * PAGE_SIZE, generator=generator)[: cell.tokens]
    if regime == "skipped_slots":
        slot_mapping[::3] = -1
    old = activation("gaussian", (pages, PAGE_SIZE, KV_LORA + QK_ROPE), generator, device)
    kv_scale = FP8_KV_SCALE if is_fp8 else 1.0
    return {
        "packed": with_row_gap(packed) if regime == "strided_rows" else packed,
        "q_norm": weight((model.q_lora,), generator, device, scale=0.2) + 1.0,
        "kv_norm": weight((KV_LORA,), generator, device, scale=0.2) + 1.0,
        "q_weight": weight((heads * (QK_NOPE + QK_ROPE), model.q_lora), generator, device),
        "uk_weight": weight((heads, QK_NOPE, KV_LORA), generator, device, scale=QK_NOPE**-0.5),
        "cache": to_cache(old, kv_scale, cache_dtype(cell.kv_dtype)),
        "slot_mapping": slot_mapping.to(device),
        "query": poisoned((cell.tokens, heads, KV_LORA + QK_ROPE), device),
        "kv_scale": kv_scale,
        "eps": model.norm_eps,
    }


SPEC = OpSpec(
    name="mla_query",
    params=(
        Param("packed", Role.ACTIVATION),
        Param("q_norm", Role.WEIGHT),
        Param("kv_norm", Role.WEIGHT),
        Param("q_weight", Role.WEIGHT),
        Param("uk_weight", Role.WEIGHT),
        Param("cache", Role.STATE, token_axis=None),
        Param("slot_mapping", Role.INDEX),
        Param("query", Role.OUTPUT),
        Param("kv_scale", Role.SCALAR),
        Param("eps", Role.SCALAR),
    ),
    regimes=REGIMES,
    make_args=make_args,
    oracle=from_args(oracle),
    stock=stock,
    touched=from_args(touched),
)
