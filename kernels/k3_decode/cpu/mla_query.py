"""MLA's query and cache row on a CPU: one product from the query's low rank to the latent space.

Scope: models with a low-rank query. Layout: as `ops/mla_query.py`; `prepare` multiplies norm, q_b and W_UK
into one fp32 weight [576 H, q_lora], for models whose q_lora is small. Numerics: fp32; the query is rounded
once, the cache row to bf16 and, in an fp8 cache, from there to e4m3, saturating. Validation:
`tests/k3_decode/test_ops.py`.
"""

import torch

from k3_decode.cpu.launches import count_launch

__all__ = ["mla_query", "prepare"]

PAGE_SIZE = 64
KV_LORA = 512
QK_NOPE = 128
QK_ROPE = 64
FP8_MAX = 448.0


def prepare(
    *, q_norm: torch.Tensor, q_weight: torch.Tensor, uk_weight: torch.Tensor
) -> dict[str, torch.Tensor | None]:
    """`q_weight` [576 H, q_lora] from the root-normalised low rank to latent queries."""
    heads = uk_weight.shape[0]
    per_head = (q_weight.float() * q_norm.float()).view(heads, QK_NOPE + QK_ROPE, -1)
    latent = torch.bmm(uk_weight.float().transpose(1, 2), per_head[:, :QK_NOPE])
    absorbed = torch.cat((latent, per_head[:, QK_NOPE:]), dim=1)
    return {"q_norm": None, "q_weight": absorbed.flatten(0, 1), "uk_weight": None}


def mla_query(
    *,
    packed: torch.Tensor,
    q_norm: torch.Tensor | None,
    kv_norm: torch.Tensor,
    q_weight: torch.Tensor,
    uk_weight: torch.Tensor | None,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    query: torch.Tensor,
    kv_scale: float,
    eps: float,
    launches: torch.Tensor,
) -> None:
    """See `ops/mla_query.py`; weights as there, or from `prepare`."""
    count_launch(launches, "mla_query")
    q_lora = q_weight.shape[1]
    wide = packed[:, : q_lora + KV_LORA + QK_ROPE].float()
    low, latent = wide[:, :q_lora], wide[:, q_lora : q_lora + KV_LORA]
    roots = torch.stack((low.square().mean(1), latent.square().mean(1)), dim=1).add_(eps).rsqrt_()
    if uk_weight is None:
        query.copy_(torch.mm(low, q_weight.T).mul_(roots[:, :1]).view(query.shape))
    else:
        assert q_norm is not None
        _two_products(low * roots[:, :1] * q_norm.float(), q_weight, uk_weight, query)

    rows = torch.cat((latent * roots[:, 1:] * kv_norm.float(), wide[:, q_lora + KV_LORA :]), dim=1)
    kept = torch.nonzero(slot_mapping >= 0).squeeze(1)
    stored = rows[kept].to(torch.bfloat16)
    if cache.dtype != torch.bfloat16:
        stored = stored.float().div_(kv_scale).clamp_(-FP8_MAX, FP8_MAX).to(cache.dtype)
    flat = cache.view(-1, cache.shape[2])
    flat[slot_mapping[kept]] = stored


def _two_products(
    low: torch.Tensor, q_weight: torch.Tensor, uk_weight: torch.Tensor, query: torch.Tensor
) -> None:
    q = torch.mm(low, q_weight.float().T).view(query.shape[0], query.shape[1], -1).transpose(0, 1)
    query[..., :KV_LORA] = torch.bmm(q[..., :QK_NOPE], uk_weight.float()).transpose(0, 1)
    query[..., KV_LORA:] = q[..., QK_NOPE:].transpose(0, 1)
