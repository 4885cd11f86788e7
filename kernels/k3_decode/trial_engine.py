"""A served model on several ranks by each strategy, beside the same model with all ranks in one process.

    python -m k3_decode.trial_engine --ranks 2 4 8 16 --out FILE      ranks played on one GPU
    torchrun --nproc_per_node=N -m k3_decode.trial_engine --out FILE  N real GPUs
    torchrun --nproc_per_node=N -m k3_decode.trial_engine --cpu       N processes over gloo

Prompts, decode and verify steps, on the optimised path and on stock, with graphs on GPUs. Log-probabilities
must be those of `in_process` bit for bit, every step must name its strategy in the ledger, and the optimised
ones must have launched as many kernels. The last trial is the control, a rank whose part of every sum is
left out, and must fail. One JSON line a trial; exit code 1 when one did not end as it should.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from k3_decode.collectives.groups import ExchangeError
from k3_decode.collectives.meetings import Collective, Exchange
from k3_decode.collectives.strategies import Strategy, StrategyName, in_process, open_strategy
from k3_decode.collectives.trial_bench import compiled_ahead, write_lines
from k3_decode.dispatch import Decision, load_guard
from k3_decode.engine import Engine, EngineOptions
from k3_decode.kernel_objects import recorded_forms
from k3_decode.random_weights import random_checkpoint
from k3_decode.rank_weights import ModelWeights, shard
from k3_decode.shapes import NANO, NANO_H16, K3Shapes

__all__ = ["main", "run_trials"]

PROMPTS = ((5, 17, 200, 3), (9, 9, 4), tuple(range(1, 71)))
"""One over the first page of the cache."""
TOKENS = ((7, 30, 11), (250, 1, 60), (12, 13, 14))
DRAFTED = (((4, 5), (6, 7), (8, 9)), (1, 2, 1))
SEED = 3
CONTROL = "a rank is left out of every sum"


def model_of(ranks: int) -> K3Shapes:
    """A small model that so many ranks can share."""
    return NANO if ranks <= 2 else NANO_H16


def _options(device: torch.device, is_on: bool, is_graph: bool) -> EngineOptions:
    is_gpu = device.type == "cuda"
    arch = "sm_{}{}a".format(*torch.cuda.get_device_capability(device)) if is_gpu else "cpu"
    return EngineOptions(
        max_requests=len(PROMPTS), max_context=128, drafts=1, implementation="cute" if is_gpu else "cpu",
        arch=arch, is_on=is_on, is_graph=is_graph and is_gpu and is_on,
    )  # fmt: skip


def _serve(
    ranks: Sequence[ModelWeights], strategy: Strategy, options: EngineOptions
) -> tuple[list[torch.Tensor], list[Decision], dict[str, int]]:
    """Log-probabilities of every call, the ledger, and launches of one engine's short life."""
    decisions: list[Decision] = []
    engine = Engine(ranks, load_guard(), options, decisions.append, strategy)
    ids, first = engine.prefill(PROMPTS)
    found = [first, *(engine.decode(ids, tokens) for tokens in TOKENS)]
    found.append(engine.verify(ids, *DRAFTED))
    found.append(engine.decode(ids, TOKENS[0]))
    engine.require_sound()
    launches = engine.launches()
    engine.close()
    return [one.clone() for one in found], decisions, launches


def _without_a_rank(strategy: Strategy, first: int, ranks: int) -> Strategy:
    """The strategy whose last rank adds nothing to any sum; `first`: rank of the first forward here."""

    def silent(forward: Exchange) -> Exchange:
        answer: torch.Tensor | None = None
        while True:
            try:
                mine = next(forward) if answer is None else forward.send(answer)
            except StopIteration as end:
                result: torch.Tensor = end.value
                return result
            if mine.kind == "reduce":
                mine = Collective("reduce", mine.part.mul_(0.0))
            answer = yield mine

    def drive(forwards: Sequence[Exchange]) -> list[torch.Tensor]:
        return strategy.drive(
            [silent(one) if first + place == ranks - 1 else one for place, one in enumerate(forwards)]
        )

    return replace(strategy, drive=drive, group=None)


def run_trials(
    ranks: int,
    rank: int | None,
    name: StrategyName,
    device: torch.device,
    log: Callable[[dict[str, Any]], None],
) -> bool:
    """Both arms, then the control; whether all went well. `rank`: the one of this process; None: all."""
    model = model_of(ranks)
    source = random_checkpoint(model, SEED)
    every = [shard(source, model.rank(ranks), one, device) for one in range(ranks)]
    mine = every if rank is None else every[rank : rank + 1]
    strategy = open_strategy(name, model, ranks, device)
    with _compiled(every, mine, strategy, device):
        is_right = _run_all(every, mine, rank, strategy, log)
    strategy.close()
    return is_right


@contextmanager
def _compiled(
    every: Sequence[ModelWeights], mine: Sequence[ModelWeights], strategy: Strategy, device: torch.device
) -> Iterator[None]:
    """On a GPU every kernel is compiled before the first rank waits for another."""
    if device.type != "cuda":
        yield
        return
    options = _options(device, True, False)
    with recorded_forms() as forms:
        _serve(every, in_process(len(every)), options)
        _serve(mine, strategy, options)
    with compiled_ahead(forms, distributed.group.WORLD if len(mine) < len(every) else None):
        yield


def _run_all(
    every: Sequence[ModelWeights],
    mine: Sequence[ModelWeights],
    rank: int | None,
    strategy: Strategy,
    log: Callable[[dict[str, Any]], None],
) -> bool:
    """See `run_trials`."""
    name, ranks, device = strategy.name, len(every), every[0].embedding.device
    silenced = _without_a_rank(strategy, rank or 0, ranks)
    runs = [
        (f"optimised by {name}", strategy, True, False), (f"stock by {name}", strategy, False, False),
        *([(f"optimised by {name} under graphs", strategy, True, True)] if device.type == "cuda" else []),
        (CONTROL, silenced, True, False),
    ]  # fmt: skip
    is_right = True
    for trial, way, is_on, is_graph in runs:
        options = _options(device, is_on, is_graph)
        wrong, fault = 0, ""
        wanted, _, launched = _serve(every, in_process(ranks), options)
        if rank is not None:
            distributed.barrier()  # all have compiled
        try:
            found, decisions, launches = _serve(mine, way, options)
            wrong = sum(int((one != two).sum()) for one, two in zip(found, wanted, strict=True))
            fault = _objection(decisions, launches, launched, name, is_on, ranks // len(mine))
        except ExchangeError as error:
            fault = str(error)[:300]
        wrong, fault = _of_all(wrong, fault, rank)
        is_right &= bool(wrong or fault) == (trial == CONTROL)
        log(
            {
                "ranks": ranks, "played": rank is None, "trial": f"{trial}, {ranks} ranks",
                "wrong_words": wrong, "fault": fault, "is_control": trial == CONTROL,
            }
        )  # fmt: skip
    return is_right


def _objection(
    decisions: Sequence[Decision],
    launches: dict[str, int],
    launched: dict[str, int],
    name: str,
    is_on: bool,
    processes: int,
) -> str:
    """What ledger or counters say against the run; `launched`: by all ranks in one process."""
    steps = [one for one in decisions if one.phase != "prefill"]
    path = "optimised" if is_on else "stock"
    if unlike := [one for one in steps if one.path != path]:
        return f"step {unlike[0].step} took {unlike[0].path}: {unlike[0].reason}"
    if names := {one.collective for one in decisions} - {name}:
        return f"the ledger names {sorted(names)}, not {name}"
    if is_on and not launches:
        return "no optimised kernel was launched"
    # In the fused exchange the output projection and AttnRes are not launched under their own names.
    alike = {op for op in launched if op not in ("projection", "attn_res") or name != "exchange"}
    counts = {op: (launches.get(op, 0) * processes, launched[op]) for op in alike}
    if uneven := [
        f"{op} {mine} times, not {wanted}" for op, (mine, wanted) in counts.items() if mine != wanted
    ]:
        return f"launched {uneven[0]}"
    return ""


def _of_all(wrong: int, fault: str, rank: int | None) -> tuple[int, str]:
    """Every process's wrong values, and the first fault."""
    if rank is None:
        return wrong, fault
    every: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(every, (wrong, fault))
    return sum(one for one, _ in every), next((words for _, words in every if words), "")


def main(argv: list[str] | None = None) -> int:
    """Run the trials; see the module."""
    parser = argparse.ArgumentParser(
        prog="python -m k3_decode.trial_engine", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16], help="of played ranks")
    parser.add_argument("--cpu", action="store_true", help="processes on the CPU, over gloo")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(argv)
    lines: list[str] = []

    def log(record: dict[str, Any]) -> None:
        lines.append(json.dumps(record))
        if int(os.environ.get("RANK", "0")) == 0:
            sys.stdout.write(lines[-1] + "\n")
            sys.stdout.flush()

    with torch.no_grad():
        if "RANK" in os.environ:
            rights = [_run_as_one_of_many(asked.cpu, log)]
        else:
            device = torch.device("cuda")
            rights = [run_trials(ranks, None, "exchange_played", device, log) for ranks in asked.ranks]
    write_lines(asked.out, lines)
    return 0 if all(rights) else 1


def _run_as_one_of_many(is_cpu: bool, log: Callable[[dict[str, Any]], None]) -> bool:
    """This process's rank, as torchrun says."""
    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    if is_cpu:
        distributed.init_process_group("gloo")
        name: StrategyName = "processes"
        device = torch.device("cpu")
    else:
        device, name = torch.device("cuda", int(os.environ["LOCAL_RANK"])), "exchange"
        torch.cuda.set_device(device)
        distributed.init_process_group("nccl", device_id=device)
    is_right = run_trials(ranks, rank, name, device, log)
    distributed.destroy_process_group()
    return is_right


if __name__ == "__main__":
    sys.exit(main())
