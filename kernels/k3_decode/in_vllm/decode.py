"""The fused decode of one rank over vLLM's backbone, in the place of vLLM's own specialised decode.

vLLM's model asks `plan` at every forward and runs `run` where it gives a step, else its stock forward, whose
output `normalize` brings to the same form. As there, a step is planned while a FULL CUDA graph is captured
and not otherwise, so prefills, mixed batches, piecewise graphs and warm-ups stay stock, and the graph that
vLLM replays for a decode batch is what selects the path step by step. The backbone is read and never
changed; its KDA states and KV cache are the ones that stock uses, so a request may change paths between
two steps.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from k3_decode.bound_layers import BoundLayer, ChainOptions
from k3_decode.collectives import run_alone
from k3_decode.collectives.meetings import Meetings
from k3_decode.dispatch import Decision, Dispatcher, Guard, Site, StepFacts
from k3_decode.in_vllm.backbone import layer_weights, score_of
from k3_decode.layers import LayerChain
from k3_decode.op_table import Bound, OpTable
from k3_decode.residuals import before_head
from k3_decode.shapes import RankShapes
from k3_decode.state import KdaState, RankCaches, StepInputs
from k3_decode.step_buffers import Buffers

__all__ = ["Decode", "Deployment", "LayerSteps"]

NORM_ROWS = 255
"""Rows that stock's norm takes at once, so that it adds in the order that it has for sampled rows."""
NULL_PAGES = 4
"""Width of the block table in warm-ups, whose requests are all null."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """What does not change while a model is served."""

    shapes: RankShapes
    guard: Guard
    site: Site
    batches: tuple[int, ...]
    """Rows for which graphs are captured."""
    max_context: int
    objects: Path | None
    """Folder of compiled kernels; None: compile in this process."""


@dataclass(frozen=True, slots=True)
class LayerSteps:
    """A step's inputs by layer: vLLM gives each group of layers slots, pages and lengths of its own."""

    steps: tuple[StepInputs, ...]


class _Nothing(NamedTuple):
    """Inputs of a step whose requests are all null."""

    slots: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    lengths: torch.Tensor


class _Chain(LayerChain):
    """Layers that each have a step of their own."""

    def _attend(self, use: Buffers, index: int, layer: BoundLayer, step: Any) -> Meetings:
        yield from super()._attend(use, index, layer, step.steps[index])


class Decode:
    """See the module. `experts` are the routed experts' arguments by MoE layer, laid out while the weights
    were loaded; `context` gives vLLM's forward context, or None outside of one.
    """

    def __init__(
        self,
        backbone: Any,
        deployment: Deployment,
        table: OpTable,
        experts: Sequence[Bound],
        context: Callable[[], Any],
        observer: Callable[[Decision], None],
        decline: Callable[[int, str], None] = lambda rows, why: None,
    ) -> None:
        self._backbone, self._deployment, self._context = backbone, deployment, context
        shapes, model = deployment.shapes, deployment.shapes.model
        laid_out = iter(experts)
        given = {**table, "experts": replace(table["experts"], prepare=lambda **_: dict(next(laid_out)))}
        self._modules = tuple(backbone.layers[backbone.start_layer : backbone.end_layer])
        weights = [layer_weights(layer, shapes) for layer in self._modules]
        self._caches = RankCaches({}, {})
        self._objects = ExitStack()
        self._has_objects = False
        options = ChainOptions(max_rows=max(deployment.batches))
        self._chain = _Chain(weights, shapes, self._caches, given, options)
        self._final: Bound = {
            "score_weight": score_of(backbone.output_attn_res_norm, backbone.output_attn_res_proj),
            "norm_weight": backbone.norm.weight.data,
        }
        self._head_mix = before_head(model.layers, model.attn_res_block or 0)
        self._dispatcher = Dispatcher(deployment.guard, deployment.site, observer)
        self._dispatcher.is_on = True
        self._decline = decline
        self._planned = 0
        self._nothing: dict[int, _Nothing] = {}

    @property
    def launches(self) -> torch.Tensor:
        """Kernel launches by op since the start, counted by the kernels themselves, replays included."""
        return self._chain.launches

    def embed_input_ids(self, ids: torch.Tensor) -> Any:
        """As stock embeds."""
        return self._backbone.embed_input_ids(ids)

    def prepare_kv(self) -> None:
        """Takes the caches that vLLM has bound, and runs every batch once on null requests: kernels are
        loaded and every workspace allocated before a graph is captured.
        """
        for index, layer in enumerate(self._modules):
            cache = layer.self_attn.kv_cache
            if self._deployment.shapes.model.is_mla(index):
                self._caches.mla[index] = _one(cache)
            else:
                conv, recurrent = cache[:2]
                self._caches.kda[index] = KdaState(conv, recurrent)
        if self._device.type == "meta":
            return
        self._load_objects()
        self._run_null_steps()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._chain.launches.zero_()

    def _run_null_steps(self) -> None:
        for rows in self._deployment.batches:
            tokens = torch.zeros(rows, dtype=torch.int64, device=self._device)
            self._forward(self._null_step(rows), tokens, None)

    def _load_objects(self) -> None:
        """Kernels from the folder of objects for the rest of the process; what it lacks is compiled first, by
        several processes at once.
        """
        folder = self._deployment.objects
        if folder is None or self._has_objects:
            return
        from k3_decode.kernel_objects import build_objects, recorded_forms, use_objects

        with recorded_forms() as forms:
            self._run_null_steps()
        build_objects(forms, folder, os.cpu_count() or 1)
        self._objects.enter_context(use_objects(folder))
        self._has_objects = True

    def plan(self, positions: torch.Tensor, intermediate_tensors: Any) -> LayerSteps | None:
        """This step's inputs, or None for the stock forward."""
        if not self._is_capturing():
            return None
        rows = positions.shape[0]
        found = self._planned_step(rows, intermediate_tensors)
        if isinstance(found, str):
            self._decline(rows, found)
            return None
        facts = StepFacts(
            step=self._planned, phase="decode", rows_by_request=(1,) * rows, is_graph=True,
            context_min=1, context_max=self._deployment.max_context,
        )  # fmt: skip
        self._planned += 1
        return found if self._dispatcher.decide(facts).path == "optimised" else None

    def _planned_step(self, rows: int, intermediate_tensors: Any) -> LayerSteps | str:
        """A capture's step, or why it is stock's. vLLM captures a FULL graph under the mode NONE, and those
        that it keys by tokens alone under PIECEWISE.
        """
        if intermediate_tensors is not None:
            return "input of a pipeline stage"
        if rows not in self._deployment.batches:
            return "a batch that is not prepared"
        context = self._context()
        if context is None:
            return "no forward context"
        if getattr(context.cudagraph_runtime_mode, "name", "") == "PIECEWISE":
            return "a piecewise graph"
        if self._backbone.aux_hidden_state_layers:
            return "auxiliary hidden states are asked for"
        return self._metadata(context, rows)

    def run(
        self, step: LayerSteps, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None
    ) -> Any:
        """Normed hidden states [B, hidden] of a planned step."""
        return self._forward(step, input_ids, inputs_embeds)

    def normalize(self, output: torch.Tensor) -> torch.Tensor:
        """A stock step's output with the final norm applied, as `run` gives it."""
        parts = [self._backbone.norm(part, None) for part in torch.split(output, NORM_ROWS)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @property
    def _device(self) -> torch.device:
        return self._chain.launches.device

    def _is_capturing(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _metadata(self, context: Any, rows: int) -> LayerSteps | str:
        """Every layer's inputs, or why a layer has other than plain decode rows in this step."""
        by_layer, slots = context.attn_metadata, context.slot_mapping
        if not isinstance(by_layer, Mapping) or not isinstance(slots, Mapping):
            return "no metadata by layer"
        steps = []
        for index, layer in enumerate(self._modules):
            name = _name(layer.self_attn)
            metadata = by_layer.get(name)
            if metadata is None:
                return f"no metadata of {name}"
            if metadata.num_prefills or getattr(metadata, "num_spec_decodes", 0):
                return f"prompts or drafts in {name}"
            if self._deployment.shapes.model.is_mla(index):
                if metadata.num_decode_tokens != rows or metadata.decode is None:
                    return f"{metadata.num_decode_tokens} decode rows in {name}, not {rows}"
                steps.append(self._mla_step(metadata.decode, slots[name], rows))
            else:
                steps.append(self._kda_step(metadata.non_spec_state_indices_tensor, rows))
        return LayerSteps(tuple(steps))

    def _kda_step(self, slots: torch.Tensor, rows: int) -> StepInputs:
        none = self._none(rows)
        return self._step(slots[:rows].unsqueeze(1), none.slot_mapping, none.block_table, none.lengths)

    def _mla_step(self, decode: Any, slot_mapping: torch.Tensor, rows: int) -> StepInputs:
        table, lengths = decode.block_table[:rows], decode.seq_lens[:rows]
        return self._step(self._none(rows).slots, slot_mapping[:rows], table, lengths)

    def _null_step(self, rows: int) -> LayerSteps:
        return LayerSteps((self._step(*self._none(rows)),) * len(self._modules))

    def _none(self, rows: int) -> "_Nothing":
        """Inputs of requests that are not there; allocated once, as a capture would record their filling."""
        if rows not in self._nothing:
            device = self._device
            self._nothing[rows] = _Nothing(
                slots=torch.zeros((rows, 1), dtype=torch.int32, device=device),
                slot_mapping=torch.full((rows,), -1, dtype=torch.int64, device=device),
                block_table=torch.zeros((rows, NULL_PAGES), dtype=torch.int32, device=device),
                lengths=torch.zeros(rows, dtype=torch.int32, device=device),
            )
        return self._nothing[rows]

    def _step(
        self, slots: torch.Tensor, slot_mapping: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor
    ) -> StepInputs:
        return StepInputs(
            requests=len(slots),
            rows=1,
            slots=slots,
            accepted=None,
            slot_mapping=slot_mapping,
            block_table=table,
            lengths=lengths,
            context_min=1,
            context_max=self._deployment.max_context,
        )

    def _forward(
        self, step: LayerSteps, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None
    ) -> torch.Tensor:
        chain = self._chain
        use = chain.views(step.steps[0].requests)
        prefix, spare = use["prefix_a"], use["prefix_b"]
        if inputs_embeds is not None:
            prefix.copy_(inputs_embeds)
        elif input_ids is not None:
            torch.index_select(self._backbone.embed_tokens.weight.data, 0, input_ids, out=prefix)
        else:
            raise ValueError("a decode step has neither token ids nor embeddings")
        delta = run_alone(chain.forward(use, prefix, spare, None, step))  # type: ignore[arg-type]
        if chain.restarts() % 2:
            prefix = spare
        out = torch.empty_like(prefix)
        chain.mix({**use, "x": out}, self._head_mix, prefix, delta, self._final)
        return out


def _name(attention: Any) -> str:
    """The layer's key in vLLM's metadata."""
    return str(getattr(attention, "prefix", None) or attention.layer_name)


def _one(cache: Any) -> torch.Tensor:
    """The tensor of a cache that has one."""
    found: torch.Tensor = cache if isinstance(cache, torch.Tensor) else cache[0]
    return found
