"""Scores of trained weights at every length, on either path: `python -m k3_decode.canary.accuracy`.

`engine.Engine` prefills each prompt and then verifies the right answer as drafts, eight rows a step: what
speculative decoding does with a perfect drafter. A draft is accepted where the row before it puts it first,
so all accepted is the same as a greedy generation of exactly the answer, in an eighth of the steps.

Three ways: `stock`; `optimised`, the fused ops, as CUDA graphs on a GPU, and an error where the dispatcher
declined a step; `replay`, the answers through `replay.py` instead, the same formulas layer by layer:
hundreds of long questions in a minute on a GPU. Questions go in groups, one JSON line a group as it
finishes, so that a run cut short keeps what it had; `table.py` adds them up.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path as File
from typing import NamedTuple

import torch
from torch import Tensor

from k3_decode.canary.export import read_safetensors
from k3_decode.canary.replay import Path, load_model
from k3_decode.canary.sensitivity import measure, prepare
from k3_decode.canary.tasks import Sample, chain_samples, mrcr_samples
from k3_decode.dispatch import Decision, load_guard
from k3_decode.engine import Engine, EngineOptions
from k3_decode.rank_weights import shard
from k3_decode.shapes import CANARY, CANARY_H8, K3Shapes
from k3_decode.weights import open_checkpoint

__all__ = [
    "LENGTHS",
    "ROWS",
    "WAYS",
    "Graded",
    "by_replay",
    "grade",
    "groups_on",
    "held_out",
    "lower_bound",
    "main",
    "open_engine",
]

SEED = 909
"""Held out from training and from the sensitivity table."""
LENGTHS: tuple[tuple[str, int], ...] = (
    *(("chain_canary", n) for n in (4023, 2000, 1000, 504)),
    *(("mrcr_canary", n) for n in (256, 512, 1024, 2048, 4096, 8192)),
)
"""Task and tokens (mrcr: context; chain: generated)."""
WAYS = ("stock", "optimised", "replay")
QUESTIONS = 96
"""All right, the lower bound is 0.969; with one wrong, 0.952."""
ROWS = 8
"""Rows of a verify step: the most that the state layout allows."""
_WIDTHS = {"stock": 64, "optimised": 8, "replay": 32}
"""Questions at once; eight of eight rows are the most that the claim's envelope allows. A stock step costs
launches more than rows: 16 at once took as long as 64 (measured)."""


class Graded(NamedTuple):
    """Per question."""

    exact: list[bool]
    margins: list[float]
    """Smallest log-probability of a right token less that of the best other one."""


class PathNotTaken(RuntimeError):
    """The dispatcher declined steps that were to be graded on the optimised path."""


def open_engine(
    shapes: K3Shapes,
    weights: File,
    device: str,
    requests: int,
    context: int,
    way: str = "stock",
    decisions: list[Decision] | None = None,
) -> Engine:
    """One rank over a weight file; `decisions` hears what the dispatcher decided."""
    ranks = [shard(open_checkpoint(weights, shapes), shapes.rank(1), 0, torch.device(device))]
    is_gpu = torch.device(device).type == "cuda"
    is_on = way == "optimised"
    options = EngineOptions(
        max_requests=requests,
        max_context=context,
        drafts=ROWS - 1,
        implementation=("cute" if is_gpu else "cpu") if is_on else "stock",
        arch=_architecture() if is_gpu else "cpu",
        is_on=is_on,
        is_graph=is_gpu and is_on,
    )
    return Engine(ranks, load_guard(), options, decisions.append if decisions is not None else None)


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


def groups_on(
    way: str, shapes: K3Shapes, weights: File, device: str, samples: Sequence[Sample]
) -> Iterator[Graded]:
    """`samples` in groups, each when it is done, on the path or by the replay that `way` names.

    Raises `PathNotTaken` where an optimised step was declined.
    """
    width = min(_WIDTHS[way], len(samples))
    parts = [samples[start : start + width] for start in range(0, len(samples), width)]
    if way == "replay":
        yield from (by_replay(shapes, weights, device, part) for part in parts)
        return
    context = max(len(s.prompt) + len(s.answer) for s in samples)
    decisions: list[Decision] = []
    engine = open_engine(shapes, weights, device, width, context, way, decisions)
    try:
        for part in parts:
            graded = grade(engine, part)
            declined = [d for d in decisions if d.phase != "prefill" and d.path != way]
            if declined:
                raise PathNotTaken(
                    f"{len(declined)} of {len(decisions)} steps did not take the {way} path, the first one "
                    f"because of {declined[0].reason!r}; grade at a size inside the claim's envelope"
                )
            decisions.clear()
            yield graded
    finally:
        engine.close()


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


def _architecture() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}a"


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


@torch.no_grad()  # for the time of the run: a caller keeps its own gradients
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
    parser.add_argument("--skip", type=int, default=0, help="leave out this many: for several processes")
    parser.add_argument("--way", default="stock", choices=WAYS)
    parser.add_argument("--only", nargs="+", help="only these, as chain_canary:504", metavar="TASK:TOKENS")
    parser.add_argument("--out", type=File, required=True)
    args = parser.parse_args(arguments)
    shapes = CANARY_H8 if args.heads == CANARY_H8.heads else CANARY
    started = time.monotonic()
    for task, tokens in LENGTHS:
        if args.only and f"{task}:{tokens}" not in args.only:
            continue
        for is_marked in (False, True) if task == "mrcr_canary" else (False,):
            samples = held_out(task, tokens, args.skip + args.questions, is_marked)[args.skip :]
            first = args.skip
            for graded in groups_on(args.way, shapes, args.weights, args.device, samples):
                line = json.dumps({
                    "way": args.way, "device": args.device, "task": task, "tokens": tokens,
                    "marked": is_marked, "first": first, "exact": graded.exact,
                    "smallest_margin": min(graded.margins),
                })  # fmt: skip
                with args.out.open("a") as file:
                    print(line, file=file, flush=True)
                first += len(graded.exact)
                print(f"{time.monotonic() - started:6.1f} s {line}", flush=True)


if __name__ == "__main__":
    main()
