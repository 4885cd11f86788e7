"""FA3's MLA decode core, which vLLM 0.33.0 chooses by itself on SM90 (`FLASH_ATTN_MLA`), as a call.

The kernel takes the 64 dimensions of k_pe as its keys and the 512 of the latent as values, which also score
against the absorbed part of the query (`q_v`). bf16 KV only. Its schedule is made once a step outside the
graph, as vLLM does.
"""

from typing import Any, NamedTuple

import torch

__all__ = ["MAX_SPLITS", "Schedule", "fa3_mla", "make_schedule"]

MAX_SPLITS = 32
"""vLLM's bound on splits inside CUDA graphs (`flash_attn_max_num_splits_for_cuda_graph`)."""
LATENT, ROPE, PAGE = 512, 64, 64


class Schedule(NamedTuple):
    """What one step shares over its layers."""

    metadata: torch.Tensor
    starts: torch.Tensor
    """int32 [R + 1]: first query row of each request."""
    lengths: torch.Tensor
    """int32 [R]: tokens in the cache, this step's rows included."""
    rows: int
    longest: int


def make_schedule(lengths: torch.Tensor, longest: int, heads: int, rows: int = 1) -> Schedule:
    """The kernel's plan for requests of `lengths` tokens (int32 on the GPU), `rows` query rows each."""
    requests = lengths.shape[0]
    starts = torch.arange(0, (requests + 1) * rows, rows, dtype=torch.int32, device=lengths.device)
    arguments: list[Any] = [requests, rows, longest, heads, 1, ROPE, LATENT, torch.bfloat16, lengths, starts]
    arguments += [None, None, None, None, PAGE, 0, True, -1, -1, False, MAX_SPLITS, None, 0]
    metadata = torch.ops._vllm_fa3_C.get_scheduler_metadata(*arguments)
    return Schedule(metadata, starts, lengths, rows, longest)


def fa3_mla(
    query: torch.Tensor, cache: torch.Tensor, block_table: torch.Tensor, schedule: Schedule, scale: float
) -> torch.Tensor:
    """query [B, H, 576] over paged KV [pages, 64, 576] -> [B, H, 512]; block_table int32 [R, pages]."""
    q_latent, q_rope = query[..., :LATENT], query[..., LATENT:]
    keys, values = cache[..., LATENT:].unsqueeze(-2), cache[..., :LATENT].unsqueeze(-2)
    arguments: list[Any] = [
        q_rope,
        keys,
        values,
        None,
        None,
        q_latent,
        None,
        schedule.starts,
        None,
        None,
        None,
    ]
    arguments += [
        schedule.lengths,
        schedule.rows,
        schedule.longest,
        block_table,
        None,
        None,
        None,
        None,
        None,
    ]
    arguments += [
        None,
        None,
        None,
        scale,
        True,
        -1,
        -1,
        0.0,
        True,
        schedule.metadata,
        MAX_SPLITS,
        None,
        0,
        None,
    ]
    arguments += [1, 0, None]
    out: torch.Tensor = torch.ops._vllm_fa3_C.fwd(*arguments)[0]
    return out
