"""Scores of trained weights at every length on the stock path: `python -m k3_decode.canary.accuracy`.

`engine.Engine` prefills each prompt and then verifies the right answer as drafts, eight rows a step: what
speculative decoding does with a perfect drafter. A draft is accepted where the row before it puts it first,
so all accepted is the same as a greedy generation of exactly the answer, in an eighth of the steps. With
`--replay` the answers go through `replay.py` instead, the same formulas layer by layer: hundreds of long
questions in a minute on a GPU. One JSON line per task, length and kind, with the 95 % lower bound and the
smallest margin.
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path as File
from typing import NamedTuple

import torch
from torch import Tensor

from k3_decode.canary.export import read_safetensors
from k3_decode.canary.replay import Path, load_model
from k3_decode.canary.sensitivity import measure, prepare
from k3_decode.canary.tasks import Sample, chain_samples, mrcr_samples
from k3_decode.dispatch import load_guard
from k3_decode.engine import Engine, EngineOptions
from k3_decode.rank_weights import shard
from k3_decode.shapes import CANARY, CANARY_H8, K3Shapes
from k3_decode.weights import open_checkpoint

__all__ = [
    "LENGTHS",
    "ROWS",
    "Graded",
    "by_replay",
    "grade",
    "held_out",
    "lower_bound",
    "main",
    "on_stock_path",
    "open_engine",
]

SEED = 909
"""Held out from training and from the sensitivity table."""
LENGTHS: tuple[tuple[str, int], ...] = (
    *(("chain_canary", n) for n in (4023, 2000, 1000, 504)),
    *(("mrcr_canary", n) for n in (256, 512, 1024, 2048, 4096, 8192)),
)
"""Task and tokens (mrcr: context; chain: generated)."""
QUESTIONS = 96
"""All right, the lower bound is 0.969; with one wrong, 0.952."""
ROWS = 8
"""Rows of a verify step: the most that the state layout allows."""
_WIDTH = 96
"""Questions at once."""


class Graded(NamedTuple):
    """Per question."""

    exact: list[bool]
    margins: list[float]
    """Smallest log-probability of a right token less that of the best other one."""


def open_engine(shapes: K3Shapes, weights: File, device: str, requests: int, context: int) -> Engine:
    """The stock path alone over a weight file."""
    ranks = [shard(open_checkpoint(weights, shapes), shapes.rank(1), 0, torch.device(device))]
    options = EngineOptions(
        max_requests=requests, max_context=context, drafts=ROWS - 1, implementation="stock", arch=device
    )
    return Engine(ranks, load_guard(), options)


def grade(engine: Engine, samples: Sequence[Sample]) -> Graded:
    """Whether the engine writes each answer, which all are of one length."""
    ids, first = engine.prefill([s.prompt for s in samples])
    answers = torch.tensor([s.answer for s in samples], device=first.device)
    margins = [_margins(first, answers[:, 0])]
    for start in range(0, answers.shape[1] - 1, ROWS):
        rows = answers[:, start : min(start + ROWS, answers.shape[1] - 1)]
        size = rows.shape[1]
        logp = engine.verify(ids, rows.tolist(), [size] * len(ids))
        margins.append(
            _margins(logp, answers[:, start + 1 : start + 1 + size].flatten()).view(-1, size).amin(1)
        )
    engine.finish(ids)
    smallest = torch.stack(margins).amin(0)
    return Graded((smallest > 0).tolist(), [round(x, 4) for x in smallest.tolist()])


def on_stock_path(shapes: K3Shapes, weights: File, device: str, samples: Sequence[Sample]) -> Graded:
    """`grade` over an engine of its own, some questions at a time."""
    context = max(len(s.prompt) + len(s.answer) for s in samples)
    engine = open_engine(shapes, weights, device, min(_WIDTH, len(samples)), context)
    parts = [grade(engine, samples[start : start + _WIDTH]) for start in range(0, len(samples), _WIDTH)]
    engine.close()
    return Graded([x for p in parts for x in p.exact], [x for p in parts for x in p.margins])


def by_replay(shapes: K3Shapes, weights: File, device: str, samples: Sequence[Sample]) -> Graded:
    """The same by replay; one margin, the smallest of all questions."""
    model = load_model(read_safetensors(weights), shapes, device)
    found = measure(model, prepare(model, samples), Path(), "accuracy", "stock")
    return Graded(list(found.exact), [found.margin])


def held_out(task: str, tokens: int, count: int, is_marked: bool = False) -> tuple[Sample, ...]:
    """Questions that neither training nor the sensitivity table has seen."""
    if task == "chain_canary":
        return chain_samples(SEED, count, tokens)
    return mrcr_samples(SEED, count, tokens, is_marked)


def _margins(logp: Tensor, right: Tensor) -> Tensor:
    """[R] of log-probabilities [R, vocab]."""
    of_right = logp.gather(1, right[:, None])
    return (of_right - logp.scatter(1, right[:, None], -torch.inf).amax(1, keepdim=True))[:, 0]


def lower_bound(right: int, count: int, alpha: float = 0.05) -> float:
    """The share that `right` or more of `count` would reach in only `alpha` of all samples (Clopper-Pearson,
    one side)."""
    low, high = 0.0, right / count
    for _ in range(60):
        share = (low + high) / 2
        tail = sum(
            math.comb(count, k) * share**k * (1 - share) ** (count - k) for k in range(right, count + 1)
        )
        low, high = (share, high) if tail < alpha else (low, share)
    return low


def main(arguments: list[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m k3_decode.canary.accuracy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--weights", type=File, default=File(__file__).with_name("weights.safetensors"))
    parser.add_argument("--heads", type=int, default=CANARY.heads, choices=(CANARY.heads, CANARY_H8.heads))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--questions", type=int, default=QUESTIONS)
    parser.add_argument("--replay", action="store_true", help="by replay, not on the stock path")
    parser.add_argument("--only", nargs="+", help="only these, as chain_canary:504", metavar="TASK:TOKENS")
    parser.add_argument("--out", type=File, required=True)
    args = parser.parse_args(arguments)
    shapes = CANARY_H8 if args.heads == CANARY_H8.heads else CANARY
    how, graded_by = ("replay", by_replay) if args.replay else ("stock path", on_stock_path)
    torch.set_grad_enabled(False)
    for task, tokens in LENGTHS:
        if args.only and f"{task}:{tokens}" not in args.only:
            continue
        for is_marked in (False, True) if task == "mrcr_canary" else (False,):
            started = time.monotonic()
            samples = held_out(task, tokens, args.questions, is_marked)
            graded = graded_by(shapes, args.weights, args.device, samples)
            right = sum(graded.exact)
            line = json.dumps({
                "how": how, "task": task, "tokens": tokens, "marked": is_marked, "questions": len(samples),
                "exact": right, "lower_bound": round(lower_bound(right, len(samples)), 4),
                "smallest_margin": min(graded.margins),
            })  # fmt: skip
            with args.out.open("a") as file:
                print(line, file=file, flush=True)
            print(f"{time.monotonic() - started:6.1f} s {line}", flush=True)


if __name__ == "__main__":
    main()
