"""The whole model against its float64 oracle: both paths, at the first token, the last and every seam."""

import random
from dataclasses import replace

import pytest
import torch
from k3_decode.dispatch import load_guard
from k3_decode.engine import Engine, EngineOptions
from k3_decode.oracle import MEAN_KL_BOUND, TOKEN_KL_BOUND
from k3_decode.random_weights import random_checkpoint, synthetic_slice
from k3_decode.rank_weights import MoeWeights, shard
from k3_decode.shapes import K3, NANO

from tests.k3_decode.models import CPU, TEXT, divergence, engine, oracle_logprobs, ranks

SEAM = 17
ROWS = 8


def run_text(model: str, *, tp: int = 1, is_on: bool, kv_dtype: str = "bf16") -> torch.Tensor:
    """Log-probabilities after every token: prefill in chunks of `SEAM`, then decode, then a verify step."""
    options = EngineOptions(
        max_requests=1,
        max_context=64,
        drafts=ROWS - 1,
        kv_dtype=kv_dtype,
        is_on=is_on,
        prefill_chunk=SEAM,
    )
    served = engine(options, model=model, tp=tp)
    ids, first = served.prefill([TEXT[:1]])
    parts = [first, served.extend(ids[0], TEXT[1:40])]
    parts += [served.decode(ids, [token]) for token in TEXT[40:-ROWS]]
    parts.append(served.verify(ids, [TEXT[-ROWS:]], [ROWS]))
    served.close()
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("model", "tp", "kv_dtype", "is_on"),
    [
        ("nano", 1, "bf16", False),
        ("nano", 1, "bf16", True),
        ("nano", 1, "fp8", False),
        ("nano", 1, "fp8", True),
        ("nano", 2, "bf16", False),
        ("nano", 2, "bf16", True),
        ("nano_linear", 1, "bf16", False),
    ],
)
def test_every_token_agrees_with_the_oracle(model: str, tp: int, kv_dtype: str, is_on: bool) -> None:
    """First token, every token after a prefill seam, every decode and verify row, the last token."""
    drift = divergence(oracle_logprobs(model), run_text(model, tp=tp, is_on=is_on, kv_dtype=kv_dtype))
    assert drift.shape == (len(TEXT),)
    assert float(drift.max()) < TOKEN_KL_BOUND
    assert float(drift.mean()) < MEAN_KL_BOUND


def test_a_state_that_is_lost_at_a_seam_breaks_the_bound() -> None:
    """The control: the KDA state of one layer is cleared between two chunks."""
    served = engine(EngineOptions(max_requests=1, max_context=64))
    ids, _ = served.prefill([TEXT[:SEAM]])
    served.watched()["rank0.layers.1.recurrent_state"].zero_()
    drift = divergence(oracle_logprobs()[SEAM:40], served.extend(ids[0], TEXT[SEAM:40]))
    assert float(drift[0]) > TOKEN_KL_BOUND


def test_prefill_gives_the_same_wherever_its_chunks_end() -> None:
    whole = engine(EngineOptions(max_requests=1, max_context=64))
    ids, first = whole.prefill([TEXT[:1]])
    reference = torch.cat((first, whole.extend(ids[0], TEXT[1:])))
    for chunk in (5, 33):
        cut = engine(EngineOptions(max_requests=1, max_context=64, prefill_chunk=chunk))
        ids, first = cut.prefill([TEXT[:1]])
        assert (
            float(divergence(reference, torch.cat((first, cut.extend(ids[0], TEXT[1:])))).max())
            < TOKEN_KL_BOUND
        )


def test_a_batch_answers_as_each_request_alone() -> None:
    source = random.Random(2)
    prompts = [[source.randrange(320) for _ in range(length)] for length in (3, 40, 17)]
    for is_on in (False, True):
        together = engine(EngineOptions(max_requests=3, max_context=64, is_on=is_on))
        ids, _ = together.prefill(prompts)
        batch = [together.decode(ids, [5, 6, 7]), together.decode(ids, [8, 9, 10])]
        for i, prompt in enumerate(prompts):
            alone = engine(EngineOptions(max_requests=1, max_context=64, is_on=is_on))
            own, _ = alone.prefill([prompt])
            for step, token in enumerate(((5, 6, 7)[i], (8, 9, 10)[i])):
                drift = divergence(alone.decode(own, [token])[0], batch[step][i])
                assert float(drift) < TOKEN_KL_BOUND


def test_full_width_slices_spread_their_tokens_over_the_experts() -> None:
    """One rank of 8 at K3's widths would not fit here: widths shrink, and the 896 experts stay."""
    widths = {"hidden": 256, "latent": 64, "shared_inter": 256, "dense_inter": 256, "q_lora": 64}
    small = replace(K3, heads=8, expert_inter=2048, **widths)
    rank = synthetic_slice(small, layers=3, tp=8, seed=0, device=CPU, vocab=256)
    moe = rank.layers[2].ffn
    x = rank.embedding.float()
    x = x * torch.rsqrt(x.square().mean(1, keepdim=True))
    assert isinstance(moe, MoeWeights)
    keys = torch.sigmoid(x @ moe.router_weight.float().T) + moe.router_bias
    chosen = torch.topk(keys, small.top_k, dim=1).indices
    drawn_evenly = small.experts * (1 - (1 - small.top_k / small.experts) ** 256)
    assert len(chosen.unique()) > 0.9 * drawn_evenly


def test_a_slice_steps_on_both_paths_without_peers() -> None:
    rank = synthetic_slice(NANO, layers=4, tp=2, seed=0, device=CPU, vocab=96)
    logits = []
    for is_on in (False, True):
        served = Engine([rank], load_guard(), EngineOptions(max_requests=2, max_context=64, is_on=is_on))
        assert served.vocab_size == 96
        ids, _ = served.prefill([[token % 96 for token in TEXT[:9]], [3, 4]])
        logits.append(served.decode(ids, [1, 2]))
    assert float(divergence(*logits).max()) < 0.05


def test_ranks_hold_the_whole_model_between_them() -> None:
    whole = ranks("nano", 1)[0]
    halves = ranks("nano", 2)
    assert torch.equal(torch.cat([half.head for half in halves]), whole.head)
    for layer, parts in zip(whole.layers, zip(*(half.layers for half in halves), strict=True), strict=True):
        out = torch.cat([part.attention.out_proj for part in parts], dim=1)
        assert torch.equal(out, layer.attention.out_proj)


def test_a_rank_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 2 is not one of 2"):
        shard(random_checkpoint(NANO, 0), NANO.rank(2), 2, CPU)
