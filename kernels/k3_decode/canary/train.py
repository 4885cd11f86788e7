"""Trains the canary on one GPU in minutes: `python -m k3_decode.canary.train --out DIR --minutes 5.5`.

Writes into DIR: `log.jsonl`, `checkpoint.pt` (everything needed to go on: `--resume`),
`weights.safetensors` (the export), all renewed while it runs. `--piece-minutes` ends the process early with
a checkpoint, so that training fits into pieces of any length; the clock that drives the curriculum counts
training time over all pieces. `--cpu` is a dry run of every code path with a naive recurrence and a tiny
batch.

A whole step (forward, backward, Muon, AdamW) is one CUDA graph per length. Data come from forked numpy
workers. Needs fla-core 0.6.0 on a GPU (its chunked KDA, in training only).
"""

import argparse
import json
import math
import multiprocessing as mp
import time
from dataclasses import dataclass
from multiprocessing.sharedctypes import SynchronizedArray
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as nnf

from k3_decode.canary import vocabulary
from k3_decode.canary.curriculum import KINDS, USUAL_ALARMS, Batch, Layout, Schedule, make_batch
from k3_decode.canary.export import load_network, write_weights
from k3_decode.canary.kda import check_chunked, chunked, naive
from k3_decode.canary.network import Network, Wrongs, forward, pieces
from k3_decode.canary.optimiser import Muon
from k3_decode.canary.progress import evaluate
from k3_decode.shapes import CANARY, CANARY_H8, K3Shapes

__all__ = ["main"]

LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
TOKENS = 65_536
_SAVE_EVERY_S = 45
_METRICS = (
    "mrcr_excess", "chain_excess", "mrcr_error", "chain_error",
    *(f"{task}_{kind}" for kind in KINDS for task in ("mrcr", "chain")),
)  # fmt: skip
"""Running means: excess of the loss over the target's entropy, share of wrong tokens, and the same share
for each counterfactual (alarms, near 1 when the canary notices)."""


class Trainer:
    """Owns parameters, optimisers, static buffers and graphs of one training run."""

    def __init__(
        self,
        shapes: K3Shapes,
        layouts: list[Layout],
        schedule: Schedule,
        device: str,
        is_compiled: bool,
        init: Path | None = None,
        soften: float | None = None,
    ) -> None:
        self.shapes, self.layouts, self.schedule, self.device = shapes, layouts, schedule, device
        self.network = Network(shapes).to(device)
        if init is not None:
            load_network(self.network, init)
        kda = chunked if device == "cuda" else naive
        self.eager = pieces(shapes, kda, is_compiled=False)
        self.run = pieces(shapes, kda, is_compiled=True) if is_compiled else self.eager
        if soften is not None:
            _soften(self.network, soften)
        matrices, others = _split(self.network)
        self.others = others
        self.rate, self.adam_rate, self.right_share, self.is_narrow, *_ = (
            torch.zeros((), device=device) for _ in range(4)
        )
        self.muon = Muon(matrices, self.rate)
        is_gpu = device == "cuda"
        self.adam = torch.optim.AdamW(
            others, lr=self.adam_rate if is_gpu else 1e-3, betas=(0.9, 0.98), eps=1e-9, weight_decay=0.0,
            fused=is_gpu, capturable=is_gpu,
        )  # fmt: skip
        self.metrics = torch.zeros(len(_METRICS), device=device)
        self.distractor = torch.from_numpy(vocabulary.DISTRACTOR).to(device)
        self.buffers = [_Buffers(layout, device) for layout in layouts]
        self.graphs: list[torch.cuda.CUDAGraph | None] = [None] * len(layouts)
        self.graph_pool = torch.cuda.graph_pool_handle() if is_gpu else None
        """One for all lengths: nothing that a step allocates outlives it. With one each, four lengths of
        eight heads took 103 GB (measured)."""
        self.step = 0
        self.elapsed_s = 0.0

    def prepare(self, index: int) -> bool:
        """Captures one training step of a layout if that is still to do; two warm-up steps run for real."""
        if self.device != "cuda" or self.graphs[index] is not None:
            return False
        self.buffers[index].load(make_batch(np.random.default_rng(5 + index), self.layouts, index))
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._clear_gradients()
                self._train_step(index)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self._clear_gradients()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.graph_pool, capture_error_mode="thread_local"):
            self._train_step(index)
        self._clear_gradients()
        torch.cuda.synchronize()
        self.graphs[index] = graph
        return True

    def train(self, batch: Batch, progress: float) -> None:
        """One step."""
        rate = self.schedule.rate_at(progress, self.step)
        self.rate.fill_(rate)
        self.adam_rate.fill_(0.75 * rate)
        self.right_share.fill_(self.schedule.right_share_at(progress))
        self.is_narrow.fill_(float(self.schedule.is_narrow(progress)))
        self.buffers[batch.layout].load(batch)
        graph = self.graphs[batch.layout]
        if graph is None:
            self._clear_gradients()
            self._train_step(batch.layout)
        else:
            graph.replay()
        self.step += 1

    def state(self) -> dict[str, Any]:
        """Everything needed to go on."""
        return {
            "network": self.network.state_dict(),
            "muon": list(self.muon.state.values()),
            "adam": self.adam.state_dict(),
            "step": self.step,
            "elapsed_s": self.elapsed_s,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Inverse of `state`; in place, before any capture."""
        self.network.load_state_dict(state["network"])
        for held, saved in zip(self.muon.state.values(), state["muon"], strict=True):
            held.copy_(saved)
        self.adam.load_state_dict(state["adam"])
        for group in self.adam.param_groups:
            group["lr"] = self.adam_rate if self.device == "cuda" else 1e-3
        self.step, self.elapsed_s = state["step"], state["elapsed_s"]

    def _clear_gradients(self) -> None:
        for p in self.network.parameters():
            p.grad = None

    def _train_step(self, index: int) -> None:
        buffer, layout = self.buffers[index], self.layouts[index]
        inputs, right = buffer.tokens[:, :-1], buffer.tokens[:, 1:].reshape(-1)
        hidden_rows = sum(layout.counterfactual)
        is_on = self.is_narrow > 0
        below = (0, 0, 0, buffer.tokens.shape[0] - hidden_rows)
        wrong = buffer.wrong & is_on
        own_row, expert, scale = wrong
        wrongs = Wrongs(
            own_row,
            nnf.pad(expert, below).reshape(-1),
            (~buffer.experts_only).float().reshape(-1),
            1 + nnf.pad(scale * buffer.scale_error[:, None], below).reshape(-1),
        )
        logits, loads = forward(self.network, inputs, buffer.position, self.run, wrongs)
        hidden = nnf.pad(wrong.any(0), below)
        share = torch.where(hidden, 1 - self.right_share, self.right_share).reshape(-1)
        supervised = buffer.supervised.float()
        parts = [supervised * task[:, None] for task in (buffer.is_mrcr, 1 - buffer.is_mrcr)]
        weights = [(p / p.sum().clamp(min=1)).reshape(-1) for p in parts]
        other = self.distractor[right]
        loss, excess = self.run.loss(logits, right, other, share, weights[0] + weights[1])
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.others, 1.0, foreach=True)
        self.muon.step()
        self.adam.step()
        with torch.no_grad():
            self._balance(loads)
            self._record(logits, right, other, excess, parts, [nnf.pad(w, below) for w in wrong])

    def _balance(self, loads: list[Tensor]) -> None:
        """Nudges each expert's selection bias towards an even load."""
        routed = [layer for layer in self.network.each_layer() if not layer.is_dense]
        for layer, load in zip(routed, loads, strict=True):
            layer.get_buffer("router_bias").add_(torch.sign(load.mean() - load) * 1e-3)

    def _record(
        self,
        logits: Tensor,
        right: Tensor,
        other: Tensor,
        excess: Tensor,
        parts: list[Tensor],
        kinds: list[Tensor],
    ) -> None:
        wrong = (logits.argmax(-1) != right).float()
        has_other = (right != other).float().view_as(parts[0])
        unharmed = ~torch.stack(kinds).any(0)
        seen = [(excess, unharmed), (wrong, unharmed), *((wrong, kind * has_other) for kind in kinds)]
        for i, (values, rows) in enumerate(seen):
            for j, part in enumerate(parts):
                weight = (part * rows).reshape(-1)
                total = weight.sum()
                mean = (values * weight).sum() / total.clamp(min=1)
                held = self.metrics[2 * i + j]
                held.add_(0.05 * torch.where(total > 0, mean - held, 0.0))


class _Buffers:
    """Static inputs of one layout."""

    def __init__(self, layout: Layout, device: str) -> None:
        rows, length = layout.mrcr + layout.chain, layout.length
        self.tokens = torch.zeros(rows, length + 1, dtype=torch.long, device=device)
        self.supervised = torch.zeros(rows, length, dtype=torch.bool, device=device)
        self.experts_only = torch.zeros_like(self.supervised)
        counterfactual = sum(layout.counterfactual)
        self.wrong = torch.zeros(len(KINDS), counterfactual, length, dtype=torch.bool, device=device)
        self.scale_error = torch.zeros(counterfactual, device=device)
        self.position = torch.arange(length, device=device).repeat(rows)
        self.is_mrcr = torch.from_numpy(layout.is_mrcr).float().to(device)

    def load(self, batch: Batch) -> None:
        """Overwrites tokens and masks."""
        for held, array in (
            (self.tokens, batch.tokens), (self.supervised, batch.supervised), (self.wrong, batch.wrong),
            (self.experts_only, batch.experts_only), (self.scale_error, batch.scale_error),
        ):  # fmt: skip
            held.copy_(torch.from_numpy(array).to(held.device))


class _Log:
    """JSON lines, on stdout and in a file; `t` is seconds since the process started."""

    def __init__(self, path: Path, started: float) -> None:
        self.file, self.started = path.open("a"), started

    def write(self, event: str, **fields: object) -> None:
        line = json.dumps({"event": event, "t": round(time.time() - self.started, 1), **fields})
        print(line, flush=True)
        print(line, file=self.file, flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    started = time.time()
    args = _parser().parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    log = _Log(args.out / "log.jsonl", started)
    shapes = CANARY_H8 if args.heads == CANARY_H8.heads else CANARY
    tokens, lengths = (512, (128,)) if args.cpu else (TOKENS, LENGTHS)
    layouts = [Layout.of(n, tokens) for n in lengths]
    schedule = Schedule(args.rate, args.right_share, args.init is not None)
    context = mp.get_context("fork")
    mix = context.Array("d", list(schedule.mix(0.0, len(layouts))))
    batches: mp.Queue[Batch] = context.Queue(maxsize=24)
    for w in range(args.workers):
        context.Process(
            target=_work, args=(1000 * args.seed + w, batches, layouts, mix, args.alarms), daemon=True
        ).start()
    torch.manual_seed(args.seed)
    device, is_compiled = "cpu" if args.cpu else "cuda", not (args.cpu or args.eager)
    trainer = Trainer(shapes, layouts, schedule, device, is_compiled, args.init, args.soften)
    if args.resume and (args.out / "checkpoint.pt").exists():
        trainer.restore(torch.load(args.out / "checkpoint.pt", map_location=trainer.device))
    count = sum(p.numel() for p in trainer.network.parameters())
    settings = {k: str(x) if isinstance(x, Path) else x for k, x in vars(args).items()}
    log.write("start", parameters=count, step=trainer.step, settings=settings, torch=torch.__version__)
    if not args.cpu:
        log.write("kda_check", relative_errors=check_chunked())
    _Piece(trainer, batches, mix, args, log, started).run()


@dataclass(slots=True)
class _Piece:
    """One process's part of a training run: takes batches, trains, logs, checks, saves."""

    trainer: Trainer
    batches: "mp.Queue[Batch]"
    mix: "SynchronizedArray[float]"
    args: argparse.Namespace
    log: "_Log"
    started: float
    last_log: float = 0.0
    last_check: float = 0.0
    last_save: float = 0.0

    def run(self) -> None:
        """Until the training clock or this piece's time is over; ends with a checkpoint and an export."""
        trainer, total_s, before_s, begun = self.trainer, 60 * self.args.minutes, self.trainer.elapsed_s, 0.0
        self.last_log = self.last_check = self.last_save = time.time()
        while trainer.elapsed_s < total_s and time.time() - self.started < 60 * self.args.piece_minutes:
            progress = trainer.elapsed_s / total_s
            probabilities = self._open_lengths(progress)
            begun = begun or time.time()
            batch = self.batches.get()
            if probabilities[batch.layout] == 0:
                continue
            trainer.train(batch, progress)
            trainer.elapsed_s = before_s + time.time() - begun
            self._report(progress, batch)
        _save(trainer, self.args.out)
        self.log.write("trained", step=trainer.step, elapsed_s=round(trainer.elapsed_s, 1))
        if trainer.elapsed_s >= total_s:
            self.log.write("final", step=trainer.step, **_check(trainer, is_final=True))

    def _open_lengths(self, progress: float) -> npt.NDArray[np.float64]:
        """Captures what the mix at this point needs and tells the workers."""
        probabilities = self.trainer.schedule.mix(progress, len(self.trainer.layouts))
        for i in np.flatnonzero(probabilities > 0):
            if self.trainer.prepare(int(i)):
                self.log.write("captured", length=self.trainer.layouts[i].length)
        self.mix[:] = list(probabilities)
        return probabilities

    def _report(self, progress: float, batch: Batch) -> None:
        now, trainer = time.time(), self.trainer
        if now - self.last_log > self.args.log_seconds:
            self.last_log = now
            values = dict(zip(_METRICS, (round(x, 6) for x in trainer.metrics.tolist()), strict=True))
            rate = round(trainer.schedule.rate_at(progress, trainer.step), 6)
            length = trainer.layouts[batch.layout].length
            self.log.write(
                "train",
                step=trainer.step,
                elapsed_s=round(trainer.elapsed_s, 1),
                rate=rate,
                length=length,
                **values,
            )
            if not all(math.isfinite(x) for x in values.values()):
                raise RuntimeError(f"step {trainer.step}: the loss is not finite; resume with a lower --rate")
        if now - self.last_check > self.args.check_seconds:
            self.log.write("check", step=trainer.step, **_check(trainer, is_final=False))
            self.last_check = time.time()
        if now - self.last_save > _SAVE_EVERY_S:
            _save(trainer, self.args.out)
            self.last_save = time.time()


def _save(trainer: Trainer, out: Path) -> None:
    """Checkpoint and export, each complete before it takes its name."""
    torch.save(trainer.state(), out / "checkpoint.new")
    (out / "checkpoint.new").replace(out / "checkpoint.pt")
    write_weights(trainer.network, out / "weights.new")
    (out / "weights.new").replace(out / "weights.safetensors")


def _check(trainer: Trainer, is_final: bool) -> dict[str, object]:
    """Teacher-forced exact match and margins on held-out seeds, fault-free and (should be 0) with a part
    wrong."""
    if trainer.device == "cpu":
        plan = [
            ("mrcr", 256, 4, ""),
            ("chain", 256, 4, ""),
            *(("chain", 256, 4, kind) for kind in KINDS),
        ]
    elif is_final:
        plan = [("mrcr", n, 64 if n < 2048 else 32, "") for n in LENGTHS]
        plan += [("chain", n, 64, "") for n in (600, 2048, 4096)]
        plan += [(task, 1024, 64, wrong) for task in ("mrcr", "chain") for wrong in (*KINDS, "ffn")]
    else:
        plan = [("mrcr", 256, 64, ""), ("mrcr", 1024, 64, ""), ("mrcr", 4096, 16, "")]
        plan += [("chain", 600, 64, ""), ("chain", 2048, 32, "")]
        plan += [(task, 600, 32, wrong) for task in ("mrcr", "chain") for wrong in (*KINDS, "ffn")]
    found: dict[str, object] = {}
    for task, length, rows, wrong in plan:
        name = f"{task}_{length}" + (f"_{wrong}" if wrong else "")
        found[name] = evaluate(trainer.network, trainer.eager, task, length, rows, wrong)
    return found


def _work(
    seed: int,
    batches: "mp.Queue[Batch]",
    layouts: list[Layout],
    mix: "SynchronizedArray[float]",
    alarms: list[str],
) -> None:
    rng = np.random.default_rng(seed)
    while True:
        p = np.array(mix[:])
        batches.put(make_batch(rng, layouts, int(rng.choice(len(layouts), p=p / p.sum())), alarms))


@torch.no_grad()
def _soften(network: Network, factor: float) -> None:
    """Scales every MLA layer's queries and freezes what scores are made of, so that training cannot sharpen
    them again. Attention that is one-hot does not see its softmax scale."""
    for layer in network.each_layer():
        if layer.is_mla:
            layer.q_b.mul_(factor)
            for part in (layer.q_a, layer.q_norm, layer.q_b, layer.kv_a, layer.kv_norm, layer.kv_b):
                part.requires_grad_(False)


def _split(network: Network) -> tuple[list[Tensor], list[Tensor]]:
    """Matrices for Muon; everything else (embeddings, head, router, beta, conv, vectors) for AdamW."""
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, p in network.named_parameters():
        if not p.requires_grad:
            continue
        is_matrix = (
            name.startswith("layers.") and p.ndim >= 2 and not name.endswith((".conv", ".beta", ".router"))
        )
        (matrices if is_matrix else others).append(p)
    return matrices, others


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m k3_decode.canary.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for log, checkpoint and weights")
    add("--minutes", type=float, default=5.5, help="training clock, over all pieces")
    add("--piece-minutes", type=float, default=9.0, help="end this process (with a checkpoint) after so long")
    add(
        "--heads",
        type=int,
        default=CANARY.heads,
        choices=(CANARY.heads, CANARY_H8.heads),
        help="KDA and MLA heads: 2 (in the repository) or 8 (for TP8)",
    )
    add("--rate", type=float, default=4e-3, help="peak learning rate of Muon; AdamW gets 3/4 of it")
    add(
        "--right-share",
        type=float,
        default=0.66,
        help="late target: mass on the right token; its distractor gets the rest",
    )
    add("--seed", type=int, default=1)
    add("--workers", type=int, default=12, help="data processes")
    add("--init", type=Path, help="continue these exported weights with the late curriculum")
    add("--alarms", nargs="+", choices=KINDS, default=list(USUAL_ALARMS), help="kinds of counterfactual rows")
    add("--soften", type=float, help="scale MLA's queries by this first, and train on without their weights")
    add("--resume", action="store_true", help="go on from DIR/checkpoint.pt")
    add("--cpu", action="store_true", help="dry run")
    add("--eager", action="store_true", help="no torch.compile")
    add("--log-seconds", type=float, default=5.0)
    add("--check-seconds", type=float, default=55.0)
    return parser


if __name__ == "__main__":
    main()
