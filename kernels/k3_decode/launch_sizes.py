"""What bounds the sizes that grids depend on, so that a launch can be checked at every cell of the envelope.

A place is a size of a kernel's tensor (`x.0`) or a number among its arguments (`a8`: argument 8); it is
bounded by the step's `tokens` or `requests`, which the claim says, or by a range over every preset and
tensor-parallel width of the family. Invariant: a place that is not named here has no bound, and the audit
then says that it cannot tell.
"""

from collections.abc import Iterable

from k3_decode.shapes import PRESETS, RankShapes

__all__ = ["launch_sizes"]

TENSOR_PARALLEL = (1, 2, 4, 8, 16)
MOST_LOCAL_RANKS = 16
"""Ranks of one process: 1 where each has its own GPU, all of them where one GPU stands for the group."""
MOST_MULTIPROCESSORS = 160
"""No GPU of these architectures has more: what a grid that fills the device is bounded by."""
MOST_SPLITS = 512
"""Splits of one request's context, which fill the device as well (`cute/mla_partials.py`)."""
MOST_ROWS = 8
"""Rows of a request: 7 drafts and one more."""
MOST_PREFETCH_BLOCKS = 65536
"""Blocks of 32 threads that each ask for 4 KiB: 8 GiB, more than any rank's weight of one layer."""


def launch_sizes(op: str, parameters: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Bounds of the places that an op's grids may depend on, for a kernel with these parameters."""
    heads, rows = _range(r.heads for r in _ranks()), f"1..{max(_weight_rows(r) for r in _ranks())}"
    names = [name for name, _ in parameters]
    fill = f"1..{MOST_MULTIPROCESSORS}"
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
            "lengths.0": "requests", f"a{len(names)}": f"1..{MOST_ROWS}",
        },
        "experts": {f"a{len(names) + place}": fill for place in (0, 1)},
        "prefetch": {f"a{len(names) + 2}": f"1..{MOST_PREFETCH_BLOCKS}"},
        "exchange": {
            **{f"{name}.0": f"1..{MOST_LOCAL_RANKS}" for name in ("part", "prefix", "latent", "x")},
            **{f"{name}.1": "tokens" for name in ("part", "prefix", "latent", "x")},
            "weight.0": rows,
            f"a{len(names) + 2}": "1..1024",
        },
    }  # fmt: skip
    return tuple(known.get(op, {}).items())


def _ranks() -> list[RankShapes]:
    """Every rank of every preset."""
    return [p.rank(tp) for p in PRESETS.values() for tp in TENSOR_PARALLEL if p.heads % tp == 0]


def _range(values: Iterable[int]) -> str:
    found = sorted(values)
    return f"{found[0]}..{found[-1]}"


def _weight_rows(rank: RankShapes) -> int:
    """Most rows of a matrix that a rank multiplies by."""
    model = rank.model
    return max(
        model.hidden,
        model.vocab,
        rank.kda_in_rows,
        rank.mla_in_rows,
        2 * rank.dense_inter,
        model.experts + model.latent + 2 * rank.shared_inter,
    )
