"""Exchanges put to the test: skew, thousands of epochs, shapes and forms in turn, replays, aborts, two
groups.

    python -m k3_decode.collectives.trial --ranks 2 4 8 16 --out FILE      ranks played on one GPU
    torchrun --nproc_per_node=N -m k3_decode.collectives.trial --out FILE  N real GPUs

Every result is compared, bit for bit, with the rank-ordered fp32 sum of all ranks' parts, which each process
makes from seeds; so equal results across ranks need no second exchange. One JSON line a trial; exit code 1
when one failed. Long, as every trial is a function over the one rig.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from k3_decode.collectives.groups import ExchangeError, ExchangeGroup, played, symmetric
from k3_decode.cute.exchange import FORMS, exchange
from k3_decode.ops.exchange import rank_ordered_sum, sum_bound, true_sum

__all__ = ["ABORT_LOOKS", "CONTROL", "Rig", "main", "of_all_ranks"]

HIDDEN = 7168
ROWS = (1, 2, 5, 8, 16, 33, 64)
INPUTS = 3
"""Sets of parts of each shape."""
DELAY_NS = 4096
ABORT_LOOKS = 300_000
"""Looks after which a trial gives up: a third of a second, where other processes use the device too."""
LATE_CYCLES = 400_000
CONTROL = "wrong_epoch"
"""The trial that must fail."""
RUN = ((8, "one_shot", 0), (33, "two_stage", 1), (1, "scatter", 2), (2, "one_shot", 1), (5, "two_stage", 2))
"""Exchanges in a row: rows, form, input set."""


@dataclass(slots=True)
class Shape:
    """Parts of one number of rows, what is expected of them, and where results go."""

    parts: list[torch.Tensor]
    """[local, B, N] of each input set."""
    sums: list[torch.Tensor]
    """[B, N]."""
    outs: dict[str, torch.Tensor]


class Rig:
    """A group, its inputs and a count of wrong words."""

    def __init__(self, group: ExchangeGroup, seed: int) -> None:
        self.group, self.device = group, group.mailboxes.device
        self.wrong = torch.zeros((), dtype=torch.int64, device=self.device)
        self.launches = torch.zeros(16, dtype=torch.int32, device=self.device)
        self.worst = 0.0
        self.shapes = {rows: self._shape(rows, seed) for rows in ROWS}
        self.streams = [_stream(self.device) for _ in range(group.local)]

    def _shape(self, rows: int, seed: int) -> Shape:
        ranks, local = self.group.layout.ranks, slice(self.group.first_rank, None)
        parts, sums = [], []
        for place in range(INPUTS):
            generator = torch.Generator(self.device).manual_seed(seed * 1000 + rows * 10 + place)
            every = torch.randn((ranks, rows, HIDDEN), generator=generator, device=self.device)
            every = every.to(torch.bfloat16)
            every[:, :, ::97] = -0.0
            every[0, :, 5::1013] = torch.inf
            every[-1, :, 7::1019] = torch.nan
            total, finite = rank_ordered_sum(every), true_sum(every).isfinite()
            error = ((total.double() - true_sum(every)).abs() / sum_bound(every))[finite].max().item()
            self.worst = max(self.worst, error)
            parts.append(every[local][: self.group.local].contiguous())
            sums.append(total)
        own = HIDDEN // ranks
        shape = (self.group.local, rows, HIDDEN)
        outs = {
            form: torch.empty((*shape[:2], own) if form == "scatter" else shape, dtype=torch.bfloat16,
                              device=self.device)
            for form in FORMS
        }  # fmt: skip
        return Shape(parts, sums, outs)

    def launch(self, rows: int, form: str, place: int, delay_ns: int = 0, only: int | None = None) -> None:
        """One exchange of all local ranks in one launch, or of local rank `only`."""
        shape, sharing = self.shapes[rows], 1
        part, out, arguments = shape.parts[place], shape.outs[form], self.group.arguments()
        if only is not None:
            part, out, arguments = part[only : only + 1], out[only : only + 1], self.group.of_rank(only)
            sharing = self.group.local
        exchange(
            part=part, out=out, launches=self.launches, form=form, delay_ns=delay_ns, sharing=sharing,
            **arguments,
        )  # fmt: skip

    def launch_apart(self, rows: int, form: str, place: int, delay_ns: int = 0) -> None:
        """Each local rank's launch on a stream of its own."""
        for index, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                self.launch(rows, form, place, delay_ns, only=index)

    def poison(self, rows: int, form: str) -> None:
        """Results that no exchange gives."""
        self.shapes[rows].outs[form].fill_(-3.0)

    def compare(self, rows: int, form: str, place: int) -> None:
        """Count words that differ from what every rank must get."""
        shape, group = self.shapes[rows], self.group
        want = shape.sums[place].expand(group.local, rows, HIDDEN)
        if form == "scatter":
            own = HIDDEN // group.layout.ranks
            mine = slice(group.first_rank, group.first_rank + group.local)
            want = want[0].view(rows, -1, own).transpose(0, 1)[mine]
        self.wrong += _differ(shape.outs[form], want)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Launches inside go to the ranks' own streams, joined before and after."""
        main = torch.cuda.current_stream(self.device)
        for stream in self.streams:
            stream.wait_stream(main)
        yield
        for stream in self.streams:
            main.wait_stream(stream)


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call,unused-ignore]  # has no types


def _differ(out: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    want = want.contiguous()
    same = (out.view(torch.int16) == want.view(torch.int16)) | (out.isnan() & want.isnan())
    return (~same).sum()


def epochs_in_turn(rig: Rig, epochs: int, *, delay_ns: int, is_apart: bool) -> None:
    """Shapes, forms and inputs drawn anew in every epoch."""
    generator = torch.Generator().manual_seed(epochs)
    draws = torch.randint(0, 1 << 20, (epochs, 3), generator=generator).tolist()
    for a, b, c in draws:
        rows, form, place = ROWS[a % len(ROWS)], FORMS[b % len(FORMS)], c % INPUTS
        rig.poison(rows, form)
        if is_apart:
            with rig.apart():
                rig.launch_apart(rows, form, place, delay_ns)
        else:
            rig.launch(rows, form, place, delay_ns)
        rig.compare(rows, form, place)


def skewed_streams(rig: Rig, turns: int) -> None:
    """Each rank late in turn, by sleeping and by small kernels of its own, and several epochs in a row.

    Played ranks share one device: work that needs much of it would never find room beside ranks that wait.
    """
    small = torch.ones(64, device=rig.device)
    # A kernel's first launch loads it, for which the driver may wait for kernels that run; so not below.
    torch.cuda._sleep(1)  # type: ignore[no-untyped-call,unused-ignore]
    small.add_(1)
    for _, form, _ in RUN:
        with rig.apart():
            rig.launch_apart(1, form, 0)
    torch.cuda.synchronize(rig.device)
    for turn in range(turns):
        for rows, form, _ in RUN:
            rig.poison(rows, form)
        with rig.apart():
            for index, stream in enumerate(rig.streams):
                with torch.cuda.stream(stream):
                    is_late = (rig.group.first_rank + index) == turn % rig.group.layout.ranks
                    if is_late:
                        torch.cuda._sleep(LATE_CYCLES)  # type: ignore[no-untyped-call,unused-ignore]
                    for rows, form, place in RUN:
                        rig.launch(rows, form, place, only=index)
                        for _ in range(3 * is_late):
                            small.add_(1)
        for rows, form, place in RUN:
            rig.compare(rows, form, place)


def busy_device(rig: Rig, turns: int) -> None:
    """Real ranks only: each in turn has large products on a stream beside its exchanges."""
    side = _stream(rig.device)
    matrix = torch.ones((4096, 4096), dtype=torch.bfloat16, device=rig.device)
    product = torch.empty_like(matrix)
    for turn in range(turns):
        if rig.group.first_rank == turn % rig.group.layout.ranks:
            with torch.cuda.stream(side):
                for _ in range(6):
                    torch.mm(matrix, matrix, out=product)
        epochs_in_turn(rig, 20, delay_ns=0, is_apart=False)
    torch.cuda.current_stream(rig.device).wait_stream(side)


def chained(rig: Rig, turns: int) -> None:
    """Launches that start while their predecessors run, nothing between them."""
    for _ in range(turns):
        for rows, form, _ in RUN:
            rig.poison(rows, form)
        for rows, form, place in RUN:
            rig.launch(rows, form, place)
        for rows, form, place in RUN:
            rig.compare(rows, form, place)


def replays(rig: Rig, count: int) -> None:
    """Two graphs of odd lengths and single launches, in turn; inputs change between replays."""
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    runs = ((first, [(1, "one_shot"), (16, "two_stage"), (2, "scatter")]), (second, [(64, "two_stage")]))
    for graph, launches in runs:
        with torch.cuda.graph(graph):
            for rows, form in launches:
                rig.launch(rows, form, 0)
    for turn in range(count):
        graph, launches = runs[turn % 3 % 2]
        for rows, form in launches:
            _rotate(rig.shapes[rows])
            rig.poison(rows, form)
        graph.replay()
        for rows, form in launches:
            rig.compare(rows, form, 0)
        if turn % 3 == 0:
            rig.poison(5, "one_shot")
            rig.launch(5, "one_shot", turn % INPUTS)
            rig.compare(5, "one_shot", turn % INPUTS)


def _rotate(shape: Shape) -> None:
    """Other values in the first input set's memory."""
    for one, other in ((shape.parts[0], shape.parts[1]), (shape.sums[0], shape.sums[1])):
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)


def abort_and_reset(rig: Rig) -> str:
    """The last rank stays away: all others must say so, and after a reset all is well."""
    group = rig.group
    group.reset()
    kept, group.limit = group.limit, ABORT_LOOKS
    epochs_in_turn(rig, 3, delay_ns=0, is_apart=False)
    torch.cuda.synchronize(rig.device)  # the launches below go to streams of their own
    absent, words = group.layout.ranks - 1, ""
    begun = time.perf_counter()
    for index in range(group.local):
        if group.first_rank + index != absent:
            with torch.cuda.stream(rig.streams[index]):
                rig.launch(8, "one_shot", 0, only=index)
    torch.cuda.synchronize(rig.device)
    took = time.perf_counter() - begun
    try:
        group.require_sound()
    except ExchangeError as error:
        words = str(error)
    if group.first_rank + group.local - 1 != absent or group.local > 1:
        want = f"rank {group.first_rank}, exchange one_shot, epoch 3: nothing from rank {absent} at word"
        if not words.startswith(want):
            rig.wrong += 1
            words = f"WRONG, wanted {want}...: {words}"
    group.limit = kept
    group.reset()
    epochs_in_turn(rig, 20, delay_ns=0, is_apart=False)
    group.require_sound()
    return f"{took * 1e3:.1f} ms: {words[:300]}"


def two_groups(rig: Rig, other: Rig, count: int) -> None:
    """Two groups on two streams at once."""
    side = _stream(rig.device)
    main = torch.cuda.current_stream(rig.device)
    for turn in range(count):
        form, place = FORMS[turn % 3], turn % INPUTS
        for one in (rig, other):
            one.poison(8, form)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            other.launch(8, form, place)
        rig.launch(8, form, place)
        main.wait_stream(side)
        for one in (rig, other):
            one.compare(8, form, place)


def wrong_epoch(rig: Rig) -> None:
    """The control: rank 0 counts one epoch more than its peers, which must show."""
    group = rig.group
    group.reset()
    kept, group.limit = group.limit, ABORT_LOOKS
    if group.first_rank == 0:
        group.control[0, 0] = 1
    try:
        epochs_in_turn(rig, 4, delay_ns=0, is_apart=False)
        group.require_sound()
    finally:
        group.limit = kept
        group.reset()


def of_all_ranks(group: ExchangeGroup, wrong: int, fault: str) -> tuple[int, str]:
    """Wrong words of all ranks together, and the first rank's fault that has one: all ranks must reset a
    group together, and one of them writes the record.
    """
    if group.process_group is None:
        return wrong, fault
    every: list[Any] = [None] * group.layout.ranks
    distributed.all_gather_object(every, (wrong, fault), group=group.process_group)
    return sum(one for one, _ in every), next((words for _, words in every if words), "")


def made_anew(rig: Rig, other: Rig, make: Callable[[int], ExchangeGroup]) -> None:
    """A group is closed and another one made in its place; the first goes on."""
    other.group.close()
    other.group = make(64 * HIDDEN * 2)
    two_groups(rig, other, 20)


def run_trials(
    make: Callable[[int], ExchangeGroup], epochs: int, log: Callable[[dict[str, Any]], None]
) -> bool:
    """Every trial of one number of ranks; whether all went well."""
    rig, other = Rig(make(64 * HIDDEN * 2), 1), Rig(make(64 * HIDDEN * 2), 2)
    group = rig.group
    is_right = True
    trials: dict[str, Callable[[], object]] = {
        "epochs": lambda: epochs_in_turn(rig, epochs, delay_ns=0, is_apart=False),
        "delayed_blocks": lambda: epochs_in_turn(rig, 300, delay_ns=DELAY_NS, is_apart=False),
        "ranks_apart": lambda: epochs_in_turn(rig, 200, delay_ns=0, is_apart=True),
        "each_rank_late": lambda: skewed_streams(rig, 64),
        **({} if group.process_group is None else {"busy_device": lambda: busy_device(rig, 24)}),
        "chained": lambda: chained(rig, 300),
        "replays": lambda: replays(rig, 200),
        "two_groups": lambda: two_groups(rig, other, 200),
        "abort_and_reset": lambda: abort_and_reset(rig),
        "made_anew": lambda: made_anew(rig, other, make),
        CONTROL: lambda: wrong_epoch(rig),
    }
    for name, trial in trials.items():
        begun = time.perf_counter()
        rig.wrong.zero_()
        other.wrong.zero_()
        note, failed = "", ""
        try:
            note = str(trial() or "")
            torch.cuda.synchronize(group.mailboxes.device)
            group.require_sound()
            other.group.require_sound()
        except ExchangeError as error:
            failed = str(error)[:300]
        wrong, failed = of_all_ranks(group, int(rig.wrong.item() + other.wrong.item()), failed)
        if failed:
            group.reset()
            other.group.reset()
        is_right &= bool(wrong or failed) == (name == CONTROL)
        log(
            {
                "ranks": group.layout.ranks, "played": group.process_group is None, "trial": name,
                "wrong_words": wrong, "fault": failed, "is_control": name == CONTROL, "note": note,
                "error_of_bound": round(rig.worst, 3),
                "launches": int(rig.launches[14]), "took_s": round(time.perf_counter() - begun, 2),
            }
        )  # fmt: skip
    group.close()
    other.group.close()
    return is_right


def main(argv: list[str] | None = None) -> int:
    """Run the trials; see the module."""
    parser = argparse.ArgumentParser(
        prog="python -m k3_decode.collectives.trial", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16], help="of played ranks")
    parser.add_argument("--epochs", type=int, default=10_000)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(argv)
    lines: list[str] = []

    def log(record: dict[str, Any]) -> None:
        lines.append(json.dumps(record))
        if int(os.environ.get("RANK", "0")) == 0:
            sys.stdout.write(lines[-1] + "\n")
            sys.stdout.flush()

    # Streams that share a hardware queue would make one rank's launch wait behind another's.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if "LOCAL_RANK" in os.environ:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        distributed.init_process_group("nccl", device_id=device)
        # Every group of mailboxes over a process group of its own.
        is_right = run_trials(
            lambda room: symmetric(distributed.new_group(), room, device), asked.epochs, log
        )
        distributed.destroy_process_group()
    else:
        device = torch.device("cuda")
        rights = [
            run_trials(lambda room, ranks=ranks: played(ranks, room, device), asked.epochs, log)  # type: ignore[misc]
            for ranks in asked.ranks
        ]
        is_right = all(rights)
    if asked.out is not None and int(os.environ.get("RANK", "0")) == 0:
        asked.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
