"""What bounds the sizes that grids depend on, so that a launch can be checked at every cell of the envelope.

A place is a size of a kernel's tensor (`x.0`) or a number among its arguments (`a8`: argument 8); it is
bounded by what the claim says (`tokens`, `requests` and `rows` of a step, `ranks` of a group), by the shapes
of every rank of every preset, or by the device that a kernel fills. Invariant: a place that is not named
here has no bound, and the audit then says that it cannot tell. Figures of kernel modules are repeated here,
as those import the compiler; `tests/k3_decode/test_launch_sizes.py` holds them together.
"""

from collections.abc import Iterable, Mapping

from k3_decode.shapes import PRESETS, RankShapes

__all__ = ["launch_sizes"]

MULTIPROCESSORS: Mapping[str, int] = {"sm_90a": 144, "sm_100a": 160, "sm_103a": 160}
"""Of the whole chip, so at least of any part sold: GH100 (NVIDIA H100 white paper, "GH100 full GPU") and two
dies of 80 (NVIDIA, "Inside NVIDIA Blackwell Ultra"; the same dies in Blackwell). An H200 has 132.
"""
MOST_SPLITS = 128
"""Splits of one request's context (`cute/mla_partials.splits_of`)."""
MOST_EXCHANGE_BLOCKS = 4 * 132
"""Blocks of all ranks of one process (`cute/exchange.blocks_of`)."""
PREFETCHED_A_BLOCK = 32 * 4096
"""Bytes (`cute/prefetch.pieces_of`)."""


def launch_sizes(op: str, parameters: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Bounds of the places that an op's grids may depend on, for a kernel with these parameters."""
    ranks = _ranks()
    heads, rows = _up_to(r.heads for r in ranks), _up_to(_weight_rows(r) for r in ranks)
    names = [name for name, _ in parameters]
    fill = _up_to(MULTIPROCESSORS.values())
    asked = _up_to(-(-_weight_bytes(r) // PREFETCHED_A_BLOCK) for r in ranks)
    sent = ("part", "prefix", "latent", "x")
    known: dict[str, dict[str, str]] = {
        "attn_res": {"prefix.0": "tokens"},
        "router": {"logits.0": "tokens"},
        "projection": {"weight.0": rows},
        "situ_mlp": {"weight.0": rows},
        "latent_tail": {"up_weight.0": rows},
        "moe_front": {"router_weight.0": rows, "down_weight.0": rows, "gate_up_weight.0": rows},
        "kda_step": {"packed.0": "tokens", "a_log.0": heads},
        "mla_query": {"packed.0": "tokens", "uk_weight.0": heads},
        "mla_value": {"partial.1": "tokens", "uv_weight.0": heads},
        "mla_attend": {
            "query.1": heads, "partial.0": f"1..{MOST_SPLITS}", "partial.1": "tokens", "partial.2": heads,
            "lengths.0": "requests", f"a{len(names)}": "rows",
        },
        "experts": {f"a{len(names) + place}": fill for place in (0, 1)},
        "prefetch": {f"a{len(names) + 2}": asked},
        "exchange": {
            **{f"{name}.0": "ranks" for name in sent},
            **{f"{name}.1": "tokens" for name in sent},
            "weight.0": rows,
            # Attention over a context that ranks divide: partials go out, and meet their heads' weights.
            "partial.0": "ranks", "partial.2": "tokens", "partial.3": heads,
            "uv_weight.0": "ranks", "uv_weight.1": heads,
            f"a{len(names) + 2}": f"1..{MOST_EXCHANGE_BLOCKS}",
        },
    }  # fmt: skip
    return tuple(known.get(op, {}).items())


def _ranks() -> list[RankShapes]:
    """Every rank of every preset, whatever the number of ranks that the heads can be divided over."""
    return [p.rank(tp) for p in PRESETS.values() for tp in range(1, p.heads + 1) if p.heads % tp == 0]


def _up_to(values: Iterable[int]) -> str:
    return f"1..{max(values)}"


def _matrices(rank: RankShapes) -> tuple[tuple[int, int], ...]:
    """(rows, K) of every bf16 matrix that a rank multiplies by; the MoE front's three as one."""
    model = rank.model
    return (
        (rank.kda_in_rows, model.hidden),
        (rank.mla_in_rows, model.hidden),
        (model.hidden, rank.channels),
        (model.vocab, model.hidden),
        (2 * rank.dense_inter, model.hidden),
        (model.hidden, rank.dense_inter),
        (model.experts + model.latent + 2 * rank.shared_inter, model.hidden),
        (model.hidden, model.latent),
    )


def _weight_rows(rank: RankShapes) -> int:
    """Most rows of a matrix that a rank multiplies by."""
    return max(rows for rows, _ in _matrices(rank))


def _weight_bytes(rank: RankShapes) -> int:
    """Size of a rank's largest weight: a bf16 matrix, or gate and up of all experts at half a byte."""
    experts = rank.model.experts * rank.expert_inter * rank.model.latent
    return max(experts, *(2 * rows * k for rows, k in _matrices(rank)))
