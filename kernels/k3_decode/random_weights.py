"""Models without training: drawn whole from a seed, or a few full-width layers of one rank's shard.

Scales keep every activation near one and the logits far from flat, and routers spread tokens over all
experts, so that timings and errors are those of a working model. Draws depend on the seed and the tensor's
name alone (and, for a slice, on the device's generator).
"""

import zlib
from collections.abc import Mapping
from dataclasses import replace

import torch

from k3_decode.ops.mxfp4 import SCALE_BIAS, quantise
from k3_decode.rank_weights import ModelWeights, shard
from k3_decode.shapes import K3Shapes, RankShapes
from k3_decode.weights import Checkpoint, TensorSpec, checkpoint_table

__all__ = ["DrawnCheckpoint", "random_checkpoint", "slice_shapes", "synthetic_slice"]

CODE_SCALE = 0.342
"""1 over the root mean square of an evenly drawn E2M1 value."""
ROUTE_SIZE = 6.0
"""Along a chosen expert's direction."""
ROUTE_SIZE_BESIDE_EXPERTS = 16.0
"""Where experts write to the residual stream themselves, in MXFP4 and along every direction."""
ROUTER_GAIN = 0.5
"""Puts the chosen experts' scores near 0.9 and the others' near 0.5."""
WRITERS = ("o_proj.weight", "down_proj.weight", "latent_up_proj.weight")
"""Ends of the names of what writes to the residual stream; the latent down-projection is the exception."""


def random_checkpoint(shapes: K3Shapes, seed: int) -> Checkpoint:
    """A whole model drawn from `seed`, in memory: for nano and the canary's sizes."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, spec in checkpoint_table(shapes).items():
        if spec.draw == "experts":
            full = torch.randn(*spec.shape[:-1], 2 * spec.shape[-1], generator=generator) * spec.scale
            tensors[name], tensors[f"{name}_scale"] = quantise(full)
        elif spec.draw != "scales":
            tensors[name] = _drawn(spec, generator)
    _plant_routes(tensors, shapes, generator)
    return Checkpoint(tensors, {})


class DrawnCheckpoint:
    """Tensors of a table that are drawn on a device when they are read, so that nothing is held twice."""

    def __init__(self, table: Mapping[str, TensorSpec], seed: int, device: torch.device) -> None:
        self._table, self._seed, self._device = table, seed, device

    def read(self, name: str, *index: slice) -> torch.Tensor:
        """The tensor, or the part `index` of it."""
        spec = self._table[name]
        generator = torch.Generator(self._device).manual_seed(self._seed * 2**32 + zlib.crc32(name.encode()))
        if spec.draw == "experts":
            drawn = torch.randint(
                0, 256, spec.shape, generator=generator, dtype=torch.uint8, device=self._device
            )
        elif spec.draw == "scales":
            middle = SCALE_BIAS + round(float(torch.tensor(spec.scale * CODE_SCALE).log2()))
            low, high = middle - 1, middle + 2
            drawn = torch.randint(
                low, high, spec.shape, generator=generator, dtype=torch.uint8, device=self._device
            )
        else:
            drawn = _drawn(spec, generator)
        return drawn[index]


def slice_shapes(shapes: K3Shapes, layers: int) -> K3Shapes:
    """The model's first `layers` layers, at full width."""
    kept = tuple(layer for layer in range(layers) if shapes.is_mla(layer))
    return replace(shapes, name=f"{shapes.name}_slice", layers=layers, mla_layers=kept)


def synthetic_slice(
    shapes: K3Shapes, layers: int, tp: int, seed: int, device: torch.device, vocab: int = 4096
) -> ModelWeights:
    """One rank's share of the first `layers` layers, with `vocab` rows of embedding and head.

    Collectives have no peers in it: each reduction gives the rank's own part.
    """
    cut = replace(slice_shapes(shapes, layers), vocab=vocab)
    rank = RankShapes(cut, tp)
    local = replace(
        cut,
        heads=rank.heads,
        expert_inter=rank.expert_inter,
        shared_inter=rank.shared_inter,
        dense_inter=rank.dense_inter,
    )
    drawn = DrawnCheckpoint(checkpoint_table(local), seed, device)
    return replace(shard(drawn, RankShapes(local, 1), 0, device), shapes=rank)


def _plant_routes(tensors: dict[str, torch.Tensor], shapes: K3Shapes, generator: torch.Generator) -> None:
    """Gives each token its experts, another set in each layer, far from ties.

    A drawn router has near ties, where the rounding of bf16 picks another expert and two right
    implementations part by whole units of logit. Here embeddings carry `ROUTE_SIZE` along the orthogonal
    directions of `top_k` of the experts and nothing along the others', no sublayer writes along any of
    them, and each layer's router reads them in an order of its own.
    """
    experts, vocab = shapes.experts, shapes.vocab
    directions = torch.linalg.qr(torch.randn(shapes.hidden, experts, generator=generator)).Q.T
    chosen = torch.rand(vocab, experts, generator=generator).argsort(1)[:, : shapes.top_k]
    peak = ROUTE_SIZE if shapes.has_latent_moe else ROUTE_SIZE_BESIDE_EXPERTS
    size = peak * (0.9 + 0.2 * torch.rand(vocab, shapes.top_k, generator=generator))
    embedding = tensors["model.embed_tokens.weight"].float()
    embedding = embedding - embedding @ directions.T @ directions
    embedding += torch.zeros(vocab, experts).scatter_(1, chosen, size) @ directions
    tensors["model.embed_tokens.weight"] = embedding.to(torch.bfloat16)
    for layer in range(1, shapes.layers):
        order = torch.randperm(experts, generator=generator)
        name = f"model.layers.{layer}.block_sparse_moe.gate.weight"
        tensors[name] = (ROUTER_GAIN * directions[order]).to(torch.bfloat16)
    for name in tensors:
        if name.endswith(WRITERS) and "latent_down" not in name:
            written = tensors[name].float()
            tensors[name] = (written - directions.T @ (directions @ written)).to(torch.bfloat16)


def _drawn(spec: TensorSpec, generator: torch.Generator) -> torch.Tensor:
    device = generator.device
    if spec.draw == "uniform":
        values = (
            torch.rand(spec.shape, generator=generator, device=device) * (spec.high - spec.low) + spec.low
        )
    else:
        values = torch.randn(spec.shape, generator=generator, device=device) * spec.scale
    return (values + 1.0 if spec.draw == "norm" else values).to(spec.dtype)
