"""Bytes that one call must move and operations that it must do, from the shapes alone.

Each input is counted once and each output once; a multiply and an add are two operations. Bytes over measured
bandwidth is the floor of a decode op, as the batches here never make arithmetic the larger term.
"""

from k3_decode.ops.contract import Cell
from k3_decode.shapes import MXFP4_GROUP

__all__ = ["expected_experts", "traffic"]

BF16, FP32 = 2, 4


def expected_experts(experts: int, top_k: int, tokens: int) -> float:
    """Distinct experts that `tokens` rows touch when each draws `top_k` of `experts` evenly."""
    return experts * (1.0 - (1.0 - top_k / experts) ** tokens)


def traffic(op: str, cell: Cell, experts_touched: int | None = None) -> tuple[int, int]:
    """(bytes, operations) of one call; raises `KeyError` for an op that does not exist.

    `projection` is the KDA input projection, `moe_front` and `latent_tail` are whole (not sharded). Without
    `experts_touched` the even draw's expectation is taken.
    """
    s, m, rows = cell.shapes, cell.shapes.model, cell.tokens
    heads, channels = s.heads, s.channels
    touched = experts_touched or round(expected_experts(m.experts, m.top_k, rows))
    expert_bytes = 3 * s.expert_inter * m.latent // 2 + 3 * s.expert_inter * m.latent // MXFP4_GROUP
    kv_row = (m.kv_lora + m.qk_rope) * (1 if cell.kv_dtype == "fp8" else BF16)
    lora, state = m.q_lora or 0, heads * m.head_dim * m.head_dim
    blocks = m.attn_res_blocks
    rows_of: dict[str, tuple[int, int]] = {
        "attn_res": (rows * m.hidden * BF16 * (blocks + 4), rows * m.hidden * (6 * blocks + 8)),
        "projection": _matmul(rows, s.kda_in_rows, m.hidden),
        "kda_step": (
            rows * (2 * state * FP32 + (s.kda_in_rows + channels) * BF16 + 18 * channels * BF16)
            + channels * m.head_dim * BF16,
            rows * (7 * state + 2 * channels * m.head_dim),
        ),
        "moe_front": _matmul(rows, m.experts + m.latent + 2 * s.shared_inter, m.hidden),
        "router": (rows * (m.experts + 2 * m.top_k) * FP32, rows * m.experts * 4),
        "experts": (
            touched * expert_bytes + 2 * rows * m.latent * BF16,
            6 * rows * m.top_k * s.expert_inter * m.latent,
        ),
        "situ_mlp": _sum(
            _matmul(rows, 2 * s.shared_inter, m.hidden), _matmul(rows, m.hidden, s.shared_inter)
        ),
        "latent_tail": _matmul(rows, m.hidden, m.latent),
        "mla_query": _sum(
            _matmul(rows, heads * (m.qk_nope + m.qk_rope), lora),
            (heads * m.qk_nope * m.kv_lora * BF16, 2 * rows * heads * m.qk_nope * m.kv_lora),
        ),
        "mla_attend": (
            cell.requests * cell.context * kv_row + 2 * rows * heads * (m.kv_lora + m.qk_rope) * BF16,
            2 * rows * heads * cell.context * (2 * m.kv_lora + m.qk_rope),
        ),
        "mla_value": (
            heads * m.kv_lora * m.v_dim * BF16 + rows * heads * (m.kv_lora + 2 * m.v_dim) * BF16,
            2 * rows * heads * m.kv_lora * m.v_dim,
        ),
    }
    return rows_of[op]


def _matmul(rows: int, outputs: int, inputs: int) -> tuple[int, int]:
    return (outputs * inputs + rows * (inputs + outputs)) * BF16, 2 * rows * outputs * inputs


def _sum(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return a[0] + b[0], a[1] + b[1]
