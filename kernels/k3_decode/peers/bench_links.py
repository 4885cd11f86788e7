"""What the link between two GPUs can do: the floor that exchanges are held against.

    torchrun --nproc_per_node=2 -m k3_decode.peers.bench_links --out FILE

Inside one kernel, so that no launch is in the figures: a word that goes to the peer and back (`round_trip`),
rows that both ranks exchange again and again (`looped_exchange`: each 16 bytes carry their epoch in the last
word, two slots), and stores of many megabytes (`stores`); beside them the copy engine's rate (`copies`).
Every wait is bounded: a peer that stays away gives figures that are marked as unsound, not a hang.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_stream
from torch import distributed

from k3_decode.collectives.groups import ExchangeGroup, symmetric
from k3_decode.cute import exchange_steps as steps
from k3_decode.cute import instructions as ins
from k3_decode.shapes import K3

__all__ = ["main"]

THREADS = 128
LOOKS = 1 << 20
EPOCHS = 2000
SAMPLES = 9
BATCHES = (1, 2, 4, 8, 16, 32, 64)
ROOM_BYTES = 64 << 20
STORED_BYTES = 32 << 20


@cute.kernel
def _looped(
    mailbox: cute.Tensor,
    reach: cute.Tensor,
    missed: cute.Tensor,
    rank: Int32,
    vectors: Int32,
    epochs: Int32,
    base: Int32,
    kind: cutlass.Constexpr,
):
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    mail = steps.open_mail(mailbox, reach, rank, 2)
    peer = steps.peer_address(mail, 1 - rank)
    first, step = bid * THREADS + tid, blocks * THREADS
    if cutlass.const_expr(kind == "stores"):
        for turn in cutlass.range(0, epochs, 1, unroll=1):
            for v in cutlass.range(first, vectors, step, unroll=4):
                steps.post(peer + Int64(v) * 16, (turn, v, tid, base))
    else:
        looks = Int32(LOOKS)
        for turn in cutlass.range(1, epochs + 1, 1, unroll=1):
            tag = base + turn
            slot = Int64(tag & 1) * (ROOM_BYTES // 2)
            for v in cutlass.range(first, vectors, step, unroll=1):
                at = slot + Int64(v) * 16
                if cutlass.const_expr(kind == "exchange"):
                    steps.post(peer + at, (turn, v, tid, tag))
                    looks = _await_tag(mail.own + at, tag, looks)
                else:
                    # One side answers: a round trip is a store, its arrival, and the same again.
                    if rank == 0:
                        steps.post(peer + at, (turn, v, tid, tag))
                    looks = _await_tag(mail.own + at, tag, looks)
                    if rank == 1:
                        steps.post(peer + at, (turn, v, tid, tag))
        if looks == 0:
            ins.store_word(ins.byte_address(missed), Int32(1))


def _await_tag(address: Int64, tag: Int32, looks: Int32) -> Int32:
    """Looks that may still be spent when the last word of 16 bytes is the tag; 0 once it never was."""
    template = (
        "{.reg .pred p, q; .reg .b32 a, b, c, d, n; mov.b32 n, $3; AGAIN: "
        "ld.relaxed.sys.global.v4.b32 {a, b, c, d}, [$1]; setp.eq.b32 p, d, $2; @p bra DONE; "
        "sub.s32 n, n, 1; setp.gt.s32 q, n, 0; @q bra AGAIN; DONE: selp.b32 $0, $3, 0, p;}"
    )
    return ins.asm(template, "=r,l,r,r", [address, tag, looks], [Int32])


@cute.jit
def _launch(
    mailbox: cute.Tensor,
    reach: cute.Tensor,
    missed: cute.Tensor,
    rank: Int32,
    vectors: Int32,
    epochs: Int32,
    base: Int32,
    blocks: Int32,
    stream: Any,
    kind: cutlass.Constexpr,
):
    _looped(mailbox, reach, missed, rank, vectors, epochs, base, kind).launch(
        grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream
    )


@cache
def _compile(kind: str) -> Callable[..., None]:
    """The launch of one kind; sizes are symbolic."""
    compiled: Callable[..., None] = cute.compile(
        _launch, steps.fake_mailbox(), steps.fake_reach(2), steps.fake_launches(), Int32(0), Int32(1),
        Int32(1), Int32(0), Int32(1), make_fake_stream(use_tvm_ffi_env_stream=True), kind,
        options="--enable-tvm-ffi",
    )  # fmt: skip
    return compiled


class Links:
    """A group of two ranks and what is timed over its memory."""

    def __init__(self, group: ExchangeGroup) -> None:
        self.group, self.rank = group, group.first_rank
        self.device = group.mailboxes.device
        self.missed = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.tag = 0

    def sample(self, kind: str, vectors: int, epochs: int, blocks: int) -> float:
        """Microseconds of one launch, after both ranks have met on the device."""
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call,unused-ignore]
        launch = _compile(kind)
        distributed.barrier()
        torch.cuda._sleep(100_000)  # type: ignore[no-untyped-call,unused-ignore]
        self.group.handle.barrier()
        start.record()
        launch(
            self.group.mailboxes[0], self.group.reach[0], self.missed, self.rank, vectors, epochs, self.tag,
            blocks,
        )  # fmt: skip
        stop.record()
        torch.cuda.synchronize()
        # Tags go on from launch to launch, so that what an earlier one left is never taken for an answer.
        self.tag += epochs + epochs % 2
        return start.elapsed_time(stop) * 1e3

    def per_turn(self, kind: str, vectors: int, epochs: int, blocks: int) -> list[float]:
        """Microseconds a turn: two lengths of one loop, so that the launch itself is not in it."""
        self.sample(kind, vectors, epochs, blocks)
        found = []
        for _ in range(SAMPLES):
            longer = self.sample(kind, vectors, 2 * epochs, blocks)
            found.append((longer - self.sample(kind, vectors, epochs, blocks)) / epochs)
        return found


def _slowest(samples: list[float]) -> list[float]:
    worst = torch.tensor(samples, dtype=torch.float64, device="cuda")
    distributed.all_reduce(worst, op=distributed.ReduceOp.MAX)
    found: list[float] = worst.tolist()
    return found


def _copies(links: Links) -> list[float]:
    """GB/s of copies to the peer by the copy engine, both directions at once."""
    words = STORED_BYTES // 4
    there = links.group.handle.get_buffer(1 - links.rank, (words,), torch.int32)
    here = torch.ones(words, dtype=torch.int32, device=links.device)
    found = []
    for _ in range(SAMPLES):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call,unused-ignore]
        distributed.barrier()
        links.group.handle.barrier()
        start.record()
        for _ in range(4):
            there.copy_(here)
        stop.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(stop) * 1e3)
    return [4 * STORED_BYTES / us * 1e-3 for us in _slowest(found)]


def measure(links: Links, log: Callable[[dict[str, Any]], None]) -> None:
    """Every figure of the link, samples and median."""

    def say(cell: str, samples: list[float], unit: str, **place: Any) -> None:
        median = round(statistics.median(samples), 3)
        log(
            {"cell": cell, **place, unit: median, "samples": [round(s, 4) for s in samples],
             "is_sound": not int(links.missed.item())}
        )  # fmt: skip

    say("round_trip", _slowest(links.per_turn("round_trip", 1, EPOCHS, 1)), "us")
    for rows in BATCHES:
        vectors = rows * K3.hidden // 8
        blocks = min(-(-vectors // THREADS), 4 * 132)
        samples = _slowest(links.per_turn("exchange", vectors, EPOCHS // 2, blocks))
        say("looped_exchange", samples, "us", rows=rows, blocks=blocks)
    for blocks in (16, 132, 528):
        vectors, turns = STORED_BYTES // 16, 8
        us = _slowest(links.per_turn("stores", vectors, turns, blocks))
        say("stores", [STORED_BYTES / one * 1e-3 for one in us], "gb_per_s", blocks=blocks)
    say("copies", _copies(links), "gb_per_s")


def main(argv: list[str] | None = None) -> int:
    """Measure; see the module."""
    parser = argparse.ArgumentParser(
        prog="python -m k3_decode.peers.bench_links", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(argv)
    lines: list[str] = []
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    distributed.init_process_group("nccl", device_id=device)
    is_first = distributed.get_rank() == 0

    def log(record: dict[str, Any]) -> None:
        lines.append(json.dumps(record))
        if is_first:
            sys.stdout.write(lines[-1][:300] + "\n")
            sys.stdout.flush()

    group = symmetric(distributed.group.WORLD, ROOM_BYTES, device)
    peer = 1 - group.first_rank
    log(
        {
            "cell": "setup", "ranks": distributed.get_world_size(), "gpu": torch.cuda.get_device_name(),
            "peer_access": torch.cuda.can_device_access_peer(group.first_rank, peer),
            "multicast": bool(group.handle.multicast_ptr), "torch": torch.__version__,
            "nccl": ".".join(str(part) for part in torch.cuda.nccl.version()),  # type: ignore[no-untyped-call,unused-ignore]
        }
    )  # fmt: skip
    measure(Links(group), log)
    group.close()
    distributed.destroy_process_group()
    if asked.out is not None and is_first:
        asked.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
