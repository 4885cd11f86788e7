"""The training forward: what it leaves out when told to, and that its weights survive the export."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from k3_decode.canary.curriculum import KINDS, Layout, Schedule, make_batch
from k3_decode.canary.export import (
    load_network,
    mxfp4_packed,
    mxfp4_unpacked,
    read_safetensors,
    write_weights,
)
from k3_decode.canary.kda import naive
from k3_decode.canary.network import (
    Network,
    Wrongs,
    forward,
    mxfp4_rounded,
    pieces,
)
from k3_decode.canary.train import Trainer
from k3_decode.canary.widen import widened
from k3_decode.ops.mxfp4 import dequantise
from k3_decode.shapes import CANARY
from k3_decode.weights import open_checkpoint
from safetensors.torch import load_file

SMALL = replace(
    CANARY, name="small", hidden=64, layers=4, heads=1, latent=32, expert_inter=32, dense_inter=32
)
ROWS, LENGTH = 2, 12


@pytest.fixture(scope="module")
def network() -> Network:
    torch.manual_seed(0)
    return Network(SMALL)


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(0, 320, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))


def _logits(network: Network, tokens: torch.Tensor, wrongs: Wrongs | None = None) -> torch.Tensor:
    position = torch.arange(LENGTH).repeat(ROWS)
    with torch.no_grad():
        logits, _ = forward(network, tokens, position, pieces(SMALL, naive, is_compiled=False), wrongs)
    return logits.view(ROWS, LENGTH, -1)


NOWHERE = torch.zeros(ROWS, LENGTH, dtype=torch.bool)


def _wrongs(**parts: torch.Tensor) -> Wrongs:
    """Masks [ROWS, LENGTH] of where each part is wrong."""
    at = {part: parts.get(part, NOWHERE) for part in ("own_row", "expert", "ffn", "scale")}
    return Wrongs(
        own_row_hidden=at["own_row"],
        expert_dropped=at["expert"].reshape(-1),
        ffn_kept=(~at["ffn"]).float().reshape(-1),
        softmax_scale=1 + 0.3 * at["scale"].float().reshape(-1),
    )


def test_a_token_does_not_see_what_follows_it(network: Network, tokens: torch.Tensor) -> None:
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 320
    before, after = _logits(network, tokens), _logits(network, changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7:], after[:, 7:])


def test_leaving_nothing_out_changes_nothing(network: Network, tokens: torch.Tensor) -> None:
    unchanged = _logits(network, tokens, _wrongs())
    assert torch.allclose(unchanged, _logits(network, tokens), atol=1e-5)


@pytest.mark.parametrize("part", ["own_row", "expert", "ffn", "scale"])
def test_a_part_left_out_at_one_token_changes_that_token_and_none_before(
    network: Network, tokens: torch.Tensor, part: str
) -> None:
    at = NOWHERE.clone()
    at[0, 6] = True
    before, after = _logits(network, tokens), _logits(network, tokens, _wrongs(**{part: at}))
    assert torch.allclose(before[0, :6], after[0, :6], atol=1e-5)
    assert torch.allclose(before[1], after[1], atol=1e-5)
    assert (before[0, 6] - after[0, 6]).abs().max() > 1e-4


def test_rounding_to_mxfp4_lets_the_gradient_through_and_is_what_the_export_holds() -> None:
    weight = torch.randn(3, 64, generator=torch.Generator().manual_seed(2), requires_grad=True)
    rounded = mxfp4_rounded(weight)
    rounded.sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.ones(3, 64))
    packed, scale = mxfp4_packed(weight.detach())
    assert packed.shape == (3, 32)
    assert scale.shape == (3, 2)
    assert torch.equal(mxfp4_unpacked(packed, scale).double(), dequantise(packed, scale))
    assert torch.allclose(mxfp4_unpacked(packed, scale), rounded.detach(), atol=1e-7)


def test_the_smallest_scale_that_clips_nothing_is_chosen() -> None:
    weight = torch.zeros(1, 32)
    weight[0, 0], weight[0, 1] = 6.5, -1.1
    packed, scale = mxfp4_packed(weight)
    assert scale.item() == 128
    assert mxfp4_unpacked(packed, scale)[0, :3].tolist() == [6.0, -1.0, 0.0]


@pytest.mark.parametrize("heads", [2, 8])
def test_an_export_is_a_checkpoint_that_the_model_and_the_safetensors_library_read(
    tmp_path: Path, heads: int
) -> None:
    shapes = replace(CANARY, heads=heads)
    torch.manual_seed(3)
    network = Network(shapes)
    file = tmp_path / "weights.safetensors"
    write_weights(network, file)
    open_checkpoint(file, shapes)
    ours, theirs = read_safetensors(file), load_file(file)
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_an_export_of_what_was_loaded_holds_the_same_values(tmp_path: Path) -> None:
    torch.manual_seed(4)
    network, once, twice = Network(CANARY), Network(CANARY), Network(CANARY)
    write_weights(network, tmp_path / "a")
    load_network(once, tmp_path / "a")
    write_weights(once, tmp_path / "b")
    load_network(twice, tmp_path / "b")
    for first, second in zip(once.state_dict().values(), twice.state_dict().values(), strict=True):
        assert torch.equal(first, second)


def test_a_counterfactual_row_has_one_part_wrong_and_only_where_the_model_writes() -> None:
    layouts = [Layout.of(256, 256 * 256)]
    batch = make_batch(np.random.default_rng(0), layouts, 0, KINDS)
    assert layouts[0].counterfactual == (16, 16)
    by_row = np.asarray(batch.wrong.any(2))
    assert by_row.any(1).tolist() == [True, True, True]
    assert by_row.sum(0).max() == 1
    assert not make_batch(np.random.default_rng(0), layouts, 0).wrong[KINDS.index("scale")].any()
    assert not (batch.wrong.any(0) & ~batch.supervised[:32]).any()


def test_counterfactual_softmax_scales_are_six_to_thirty_per_cent_off() -> None:
    errors = make_batch(np.random.default_rng(0), [Layout.of(256, 256 * 512)], 0).scale_error
    assert errors.shape == (64,)
    assert 0.06 <= errors.min() < 0.08
    assert 0.2 < errors.max() <= 0.3


def test_facts_are_learnt_without_the_dense_feed_forward_only_where_chains_use_them() -> None:
    layouts = [Layout.of(256, 256 * 64)]
    batch = make_batch(np.random.default_rng(0), layouts, 0)
    assert not batch.experts_only[layouts[0].is_mrcr].any()
    row = batch.experts_only.any(1).argmax()
    first = batch.experts_only[row].argmax()
    assert (first - 70) % 14 == 5
    assert batch.experts_only[row, first : first + 7].tolist() == [True] * 6 + [False]


def test_training_starts_short_and_plain_and_ends_long_and_narrow() -> None:
    schedule = Schedule(rate=4e-3, right_share=0.66, is_continued=False)
    assert schedule.mix(0.0, 6).tolist() == [1, 0, 0, 0, 0, 0]
    assert (schedule.mix(0.9, 6) > 0).all()
    assert (schedule.right_share_at(0.1), schedule.right_share_at(0.9)) == (1.0, 0.66)
    assert schedule.rate_at(0.4, 10_000) == 4e-3
    assert schedule.rate_at(1.0, 10_000) == pytest.approx(4e-5)


def test_a_continued_run_uses_every_length_and_the_narrow_target_at_once() -> None:
    schedule = Schedule(rate=3e-3, right_share=0.62, is_continued=True)
    assert (schedule.mix(0.0, 6) > 0).all()
    assert schedule.right_share_at(0.0) == 0.62
    assert schedule.rate_at(0.5, 10_000) == pytest.approx(1.5e-3)


def test_widening_the_head_sets_each_distractor_back_by_the_share_of_its_token() -> None:
    head = torch.zeros(320, 2)
    head[200], head[201] = torch.tensor([10.0, 0.0]), torch.tensor([9.5, 1.0])
    changed = widened(head, 0.1)
    assert changed[201].tolist() == pytest.approx([8.5, 1.0])
    assert changed[200].tolist() == [10.0, 0.0]
    assert changed[6].tolist() == [0.0, 0.0]


def test_softened_attention_stays_as_soft_while_the_rest_is_trained(tmp_path: Path) -> None:
    torch.manual_seed(7)
    before, layouts = Network(SMALL), [Layout.of(128, 256)]
    write_weights(before, tmp_path / "w")
    schedule = Schedule(rate=1e-2, right_share=0.7, is_continued=True)
    trainer = Trainer(SMALL, layouts, schedule, "cpu", False, tmp_path / "w", 0.5)
    trainer.train(make_batch(np.random.default_rng(0), layouts, 0), 0.0)
    load_network(before, tmp_path / "w")
    was, now = dict(before.named_parameters()), dict(trainer.network.named_parameters())
    assert torch.equal(now["layers.3.q_b"], 0.5 * was["layers.3.q_b"])
    assert torch.equal(now["layers.3.kv_b"], was["layers.3.kv_b"])
    assert not torch.equal(now["layers.3.out"], was["layers.3.out"])
    assert not torch.equal(now["layers.0.q"], was["layers.0.q"])
