"""The clock outside of a worker: what its windows take, and whether what it says of them can be true."""

import json
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import IO, Any

from harness.domain.check import Status
from harness.domain.errors import FasttrackError
from harness.domain.record import Record, Whole

__all__ = ["TOLERANCE", "Window", "WorkerEnded", "WorkerRun", "agreement", "ask", "run_windows"]

TOLERANCE = 0.25
"""Share by which a worker's own times and the clock outside may differ; beyond it the result is INVALID."""
WINDOW_US = 20_000.0
CALLS, MAX_CALLS = 8, 128
ROUNDS = (("none", "optimised"), ("optimised", "none")) * 2


class WorkerEnded(FasttrackError):
    """The worker is gone, or answered with something else than what it was asked for."""


class Window(Record):
    """One window as both clocks saw it."""

    arm: str
    claimed_us: float
    """Of all calls, as the worker says."""
    outside_us: float


class WorkerRun(Record):
    """Windows of one worker, and the outputs of the last one."""

    calls: Whole
    is_graph: bool
    windows: tuple[Window, ...]
    seeds: tuple[Whole, ...]
    """Of the last window's inputs."""
    stated: str
    """Digest of the last window's outputs, as the worker gave it when it was done."""


def run_windows(pipe_in: IO[str], pipe_out: IO[str], regime: str, seed: int, outputs: Path) -> WorkerRun:
    """Drive a worker: windows with calls and without, in turn; outputs of the last one lie in `outputs`.

    Seeds of inputs are drawn from `seed`, so that a worker cannot guess the next ones from those it was told.
    """
    source = random.Random(seed)

    def window(arm: str, calls: int) -> tuple[Window, list[int], Mapping[str, Any]]:
        seeds = [source.getrandbits(31) for _ in range(calls)]
        ask(pipe_in, pipe_out, {"do": "arm", "arm": arm, "regime": regime, "seeds": seeds})
        begun = time.perf_counter_ns()
        answer = ask(pipe_in, pipe_out, {"do": "go"})
        outside = (time.perf_counter_ns() - begun) / 1e3
        return Window(arm=arm, claimed_us=float(answer["us"]) * calls, outside_us=outside), seeds, answer

    window("optimised", CALLS)
    trial, _, _ = window("optimised", CALLS)
    calls = max(CALLS, min(MAX_CALLS, round(WINDOW_US * CALLS / max(trial.outside_us, 1.0))))
    windows = [window(arm, calls)[0] for pair in ROUNDS for arm in pair]
    last, seeds, answer = window("optimised", calls)
    ask(pipe_in, pipe_out, {"do": "save", "folder": str(outputs)})
    return WorkerRun(
        calls=calls, is_graph=bool(answer["is_graph"]), windows=(*windows, last), seeds=tuple(seeds),
        stated=str(answer["digest"]),
    )  # fmt: skip


def agreement(claimed_us: float, windows: Sequence[Window], calls: int) -> tuple[Status, float, str]:
    """(PASS, INCONCLUSIVE or INVALID; microseconds of a call by the clock outside; words). Pure.

    What a window without calls takes is taken off. Where that wavers by more than the calls themselves take,
    the clock outside decides nothing.
    """
    empty = [w.outside_us for w in windows if w.arm == "none"]
    full = [w.outside_us for w in windows if w.arm != "none"]
    outside = (median(full) - median(empty)) / calls
    doubt = (max(empty) - min(empty)) / calls
    words = (
        f"{claimed_us:.2f} us a call by the worker, {outside:.2f} us by the clock outside, +- {doubt:.2f} us"
    )
    gap = abs(outside - claimed_us)
    if gap > TOLERANCE * max(outside, claimed_us) + doubt:
        return Status.INVALID, outside, f"{words}: they do not measure the same"
    if doubt > max(outside, claimed_us):
        return Status.INCONCLUSIVE, outside, f"{words}: too short to be seen from outside"
    return Status.PASS, outside, words


def ask(pipe_in: IO[str], pipe_out: IO[str], request: Mapping[str, Any]) -> Mapping[str, Any]:
    """One request and its answer; raises `WorkerEnded` where there is none."""
    try:
        pipe_in.write(json.dumps(request) + "\n")
        pipe_in.flush()
        line = pipe_out.readline()
        answer: Mapping[str, Any] = json.loads(line) if line else {}
    except (BrokenPipeError, ValueError) as error:
        raise WorkerEnded(f"the worker broke off at {request['do']!r}: {error}") from error
    if answer.get("did") != request["do"]:
        raise WorkerEnded(f"the worker gave no answer to {request['do']!r}; its log says why")
    return answer
