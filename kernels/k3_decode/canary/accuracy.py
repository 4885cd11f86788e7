"""Scores of trained weights at every length, through the stock path's numerics: `python -m
k3_decode.canary.accuracy`.

Teacher-forced replay (`replay.py`), token-by-token KDA: the same as greedy generation, and quick enough for
hundreds of long questions. One JSON line per length, with the interval and the margins.
"""

import argparse
import json
import time
from pathlib import Path as File

import torch

from k3_decode.canary.export import read_safetensors
from k3_decode.canary.replay import Model, Path, load_model
from k3_decode.canary.sensitivity import measure, prepare
from k3_decode.canary.tasks import chain_samples, mrcr_samples
from k3_decode.shapes import CANARY

__all__ = ["LENGTHS", "main", "score"]

SEED = 909
"""Held out from training and from the sensitivity table."""
LENGTHS: tuple[tuple[str, int, int], ...] = (
    *(("mrcr_canary", n, 64) for n in (256, 512, 1024, 2048, 4096)), ("mrcr_canary", 8192, 32),
    *(("chain_canary", n, 64) for n in (504, 1000, 2000)), ("chain_canary", 4023, 48),
)  # fmt: skip
"""Task, tokens (mrcr: context; chain: generated), questions."""


def score(model: Model, task: str, tokens: int, count: int, is_marked: bool = False) -> dict[str, object]:
    """Exact answers of `count` questions and their smallest margin."""
    samples = (
        chain_samples(SEED, count, tokens)
        if task == "chain_canary"
        else mrcr_samples(SEED, count, tokens, is_marked)
    )
    result = measure(model, prepare(model, samples), Path(), task, "stock")
    right = sum(result.exact)
    low, high = _wilson(right, count)
    return {
        "task": task, "tokens": tokens, "marked": is_marked, "questions": count, "exact": right,
        "interval": [round(low, 4), round(high, 4)], "smallest_margin": result.margin,
    }  # fmt: skip


def _wilson(right: int, count: int) -> tuple[float, float]:
    """95 % score interval of a share."""
    z2, p = 1.96**2, right / count
    half = 1.96 * ((p * (1 - p) + z2 / (4 * count)) / count) ** 0.5
    return max(0.0, (p + z2 / (2 * count) - half) / (1 + z2 / count)), min(
        1.0, (p + z2 / (2 * count) + half) / (1 + z2 / count)
    )


def main(arguments: list[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m k3_decode.canary.accuracy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--weights", type=File, default=File(__file__).with_name("weights.safetensors"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=File, required=True)
    args = parser.parse_args(arguments)
    model = load_model(read_safetensors(args.weights), CANARY, args.device)
    torch.set_grad_enabled(False)
    for task, tokens, count in LENGTHS:
        for is_marked in (False, True) if task == "mrcr_canary" else (False,):
            started = time.monotonic()
            line = json.dumps(score(model, task, tokens, count, is_marked))
            with args.out.open("a") as file:
                print(line, file=file, flush=True)
            print(f"{time.monotonic() - started:6.1f} s {line}", flush=True)


if __name__ == "__main__":
    main()
