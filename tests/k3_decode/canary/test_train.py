"""The training script's steps, on a CPU at a tiny batch."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from k3_decode.canary.curriculum import Batch, Layout, Schedule, make_batch
from k3_decode.canary.export import write_weights
from k3_decode.canary.train import Trainer
from k3_decode.rank_weights import shard
from k3_decode.shapes import CANARY, CANARY_H8, K3Shapes
from k3_decode.weights import open_checkpoint

LAYOUT = Layout.of(128, 256)
SMALL = replace(CANARY, hidden=64, layers=4, heads=1, experts=4, top_k=2, latent=32, q_lora=32)


def _trainer(shapes: K3Shapes) -> Trainer:
    torch.manual_seed(3)
    return Trainer(shapes, [LAYOUT], Schedule(4e-3, 0.66, False), "cpu", is_compiled=False)


def _batch(seed: int) -> Batch:
    return make_batch(np.random.default_rng(seed), [LAYOUT], 0)


def test_a_resumed_run_takes_the_step_that_an_unbroken_one_takes(tmp_path: Path) -> None:
    whole, cut = _trainer(SMALL), _trainer(SMALL)
    for trainer in (whole, cut):
        trainer.train(_batch(1), 0.5)
    torch.save(cut.state(), tmp_path / "checkpoint.pt")
    resumed = _trainer(SMALL)
    resumed.restore(torch.load(tmp_path / "checkpoint.pt"))
    for trainer in (whole, resumed):
        trainer.train(_batch(2), 0.6)
    assert resumed.step == whole.step == 2
    for mine, theirs in zip(resumed.network.parameters(), whole.network.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_variant_of_eight_heads_takes_a_training_step_and_its_export_serves_eight_ranks(
    tmp_path: Path,
) -> None:
    trainer = _trainer(CANARY_H8)
    before = [p.detach().clone() for p in trainer.network.parameters()]
    trainer.train(_batch(1), 0.5)
    assert torch.isfinite(trainer.metrics).all()
    moved = [not torch.equal(p, q) for p, q in zip(trainer.network.parameters(), before, strict=True)]
    assert sum(moved) > 0.9 * len(moved)
    write_weights(trainer.network, tmp_path / "weights.safetensors")
    source = open_checkpoint(tmp_path / "weights.safetensors", CANARY_H8)
    ranks = [shard(source, CANARY_H8.rank(8), rank, torch.device("cpu")) for rank in range(8)]
    queries = [rank.layers[3].attention.out_proj for rank in ranks]
    assert [tuple(q.shape) for q in queries] == [(192, 128)] * 8  # one head of 128 a rank
    assert torch.equal(torch.cat(queries, 1), source.read("model.layers.3.self_attn.o_proj.weight"))
