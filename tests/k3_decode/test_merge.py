"""Merging attention over shards of the context equals attention over all of it, however it is cut."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from k3_decode.ops import OPS
from k3_decode.ops.log_base import LogBase
from k3_decode.ops.mla_value import merge

from tests.k3_decode.op_errors import LAUNCH_SLOTS, cpu_op, deviation

HEADS, TOKENS, CONTEXT = 2, 3, 40


def attention(scores: torch.Tensor, values: torch.Tensor, base: LogBase) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 softmax mix [B,H,C] and its lse to `base`; NaN latents and lse -inf for no keys."""
    if scores.shape[-1] == 0:
        nothing = torch.full((TOKENS, HEADS, 512), math.nan, dtype=torch.float64)
        return nothing, torch.full((TOKENS, HEADS), -math.inf, dtype=torch.float64)
    return torch.softmax(scores, -1) @ values, torch.logsumexp(scores, -1) / math.log(base)


@st.composite
def cuts(draw: st.DrawFn) -> list[int]:
    """Sizes of 1 to 6 shards that add up to the context; some are empty."""
    count = draw(st.integers(1, 6))
    edges = sorted(draw(st.lists(st.integers(0, CONTEXT), min_size=count - 1, max_size=count - 1)))
    return [high - low for low, high in zip([0, *edges], [*edges, CONTEXT], strict=True)]


@settings(max_examples=40, deadline=None)
@given(cuts(), st.integers(0, 2**32 - 1), st.sampled_from([LogBase.E, LogBase.TWO]), st.floats(0, 30))
def test_any_uneven_split_merges_to_the_unsplit_result(
    sizes: list[int], seed: int, base: LogBase, spread: float
) -> None:
    """Shards of unlike key scale, so that a wrong base or weight cannot hide."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(TOKENS, HEADS, CONTEXT, generator=generator).double()
    scores = scores + torch.linspace(-spread, spread, CONTEXT)
    values = torch.randn(CONTEXT, 512, generator=generator).double()
    parts, start = [], 0
    for size in sizes:
        parts.append(attention(scores[..., start : start + size], values[start : start + size], base))
        start += size
    merged = merge(torch.stack([p for p, _ in parts]), torch.stack([lse for _, lse in parts]), base)
    torch.testing.assert_close(merged, attention(scores, values, base)[0])


@settings(max_examples=10, deadline=None)
@given(
    sizes=cuts().filter(lambda sizes: len(sizes) > 1),
    seed=st.integers(0, 2**32 - 1),
    base=st.sampled_from(LogBase),
)
def test_stock_and_cpu_merge_as_the_oracle_does(sizes: list[int], seed: int, base: LogBase) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(TOKENS, HEADS, CONTEXT, generator=generator).double() * 3
    values = torch.randn(CONTEXT, 512, generator=generator).double()
    parts, start = [], 0
    for size in sizes:
        parts.append(attention(scores[..., start : start + size], values[start : start + size], base))
        start += size
    args = {
        "partial": torch.stack([p for p, _ in parts]).to(torch.bfloat16),
        "partial_lse": torch.stack([lse for _, lse in parts]).float(),
        "uv_weight": (torch.randn(HEADS, 512, 128, generator=generator) * 512**-0.5).to(torch.bfloat16),
        "gate": torch.randn(TOKENS, HEADS * 128, generator=generator).to(torch.bfloat16),
        "lse_base": base,
        "out": torch.empty(TOKENS, HEADS * 128, dtype=torch.bfloat16),
    }
    truth = OPS["mla_value"].oracle(dict(args))["out"]
    OPS["mla_value"].stock(**args)
    assert deviation(args["out"], truth) < 0.01
    cpu_op("mla_value")(**args, launches=torch.zeros(LAUNCH_SLOTS, dtype=torch.int32))
    assert deviation(args["out"], truth) < 0.01


def test_the_wrong_base_would_be_noticed() -> None:
    """The control: base-e sums merged as if they were base 2."""
    scores = torch.linspace(-6, 6, CONTEXT).double().expand(TOKENS, HEADS, CONTEXT)
    values = torch.randn(CONTEXT, 512, generator=torch.Generator().manual_seed(0)).double()
    few, rest = slice(0, 10), slice(10, CONTEXT)
    halves = [attention(scores[..., part], values[part], LogBase.E) for part in (few, rest)]
    partial, lse = torch.stack([p for p, _ in halves]), torch.stack([s for _, s in halves])
    whole = attention(scores, values, LogBase.E)[0]
    assert deviation(merge(partial, lse, LogBase.E), whole) < 1e-12
    assert deviation(merge(partial, lse, LogBase.TWO), whole) > 1e-3


def test_shards_without_keys_give_zeros_and_never_nan() -> None:
    empty = torch.full((3, 1, 1, 512), math.nan)
    lse = torch.tensor([-math.inf, math.nan, math.inf]).view(3, 1, 1)
    assert not merge(empty, lse, LogBase.E).any()
