"""Irregular launch timing: an op inside a chain of dependent launches with random delays, on a GPU.

The real faults of this kind needed a predecessor that was late. `produce` lets its dependents start at
once, waits, and only then writes the op's inputs, over the poison that lay there; a candidate that reads an
input above its dependency wait reads poison. Rounds differ in delay, in what is in L2, and in whether another
stream is busy. Two readers of our own are the control: one waits and must read what was written, one does not
and must not. Row (reader, round, delay_us, is_cold, is_busy, output, elements, differing) of table `jitter`.
"""

import random
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from harness.measure.driver import Kernel, Module

__all__ = ["READERS", "Round", "chain_of", "readers_differ", "rounds_of"]

READERS = ("early", "patient")
ROUNDS = 12
MAX_DELAY_US = 200
COLD_BYTES = 256 * 2**20
"""More than any L2: writing it leaves nothing of the op's data there."""
BLOCKS, THREADS = 8, 256
"""Few blocks, so that the op's own find room beside those that wait."""
MAX_COPIED_BYTES = 64 * 2**20
"""Inputs above this size stay as they are: a cache of gigabytes is no late activation."""
PTX = b"""
.version 8.0
.target sm_90
.address_size 64

.visible .entry produce(.param .u64 table, .param .u32 count, .param .u64 delay_ns)
{
  .reg .pred %p<4>;
  .reg .b32 %r<12>;
  .reg .b64 %rd<16>;
  griddepcontrol.launch_dependents;
  ld.param.u64 %rd1, [delay_ns];
  mov.u64 %rd2, %globaltimer;
  add.u64 %rd2, %rd2, %rd1;
SPIN:
  mov.u64 %rd3, %globaltimer;
  setp.lt.u64 %p1, %rd3, %rd2;
  @%p1 bra SPIN;
  ld.param.u64 %rd4, [table];
  cvta.to.global.u64 %rd4, %rd4;
  ld.param.u32 %r1, [count];
  mov.u32 %r2, %ctaid.x;
  mov.u32 %r3, %ntid.x;
  mov.u32 %r4, %tid.x;
  mad.lo.u32 %r5, %r2, %r3, %r4;
  mov.u32 %r6, %nctaid.x;
  mul.lo.u32 %r7, %r6, %r3;
  mul.wide.u32 %rd5, %r5, 16;
  mul.wide.u32 %rd6, %r7, 16;
ENTRY:
  setp.eq.u32 %p2, %r1, 0;
  @%p2 bra DONE;
  ld.global.u64 %rd7, [%rd4];
  ld.global.u64 %rd8, [%rd4+8];
  ld.global.u64 %rd9, [%rd4+16];
  mov.u64 %rd10, %rd5;
COPY:
  setp.ge.u64 %p3, %rd10, %rd9;
  @%p3 bra NEXT;
  add.u64 %rd11, %rd8, %rd10;
  ld.global.v4.u32 {%r8, %r9, %r10, %r11}, [%rd11];
  add.u64 %rd12, %rd7, %rd10;
  st.global.v4.u32 [%rd12], {%r8, %r9, %r10, %r11};
  add.u64 %rd10, %rd10, %rd6;
  bra COPY;
NEXT:
  add.u64 %rd4, %rd4, 24;
  sub.u32 %r1, %r1, 1;
  bra ENTRY;
DONE:
  ret;
}

.visible .entry early(.param .u64 source, .param .u64 target)
{
  .reg .b32 %r<2>;
  .reg .b64 %rd<3>;
  ld.param.u64 %rd1, [source];
  ld.param.u64 %rd2, [target];
  ld.volatile.global.u32 %r1, [%rd1];
  griddepcontrol.wait;
  st.global.u32 [%rd2], %r1;
  ret;
}

.visible .entry patient(.param .u64 source, .param .u64 target)
{
  .reg .b32 %r<2>;
  .reg .b64 %rd<3>;
  ld.param.u64 %rd1, [source];
  ld.param.u64 %rd2, [target];
  griddepcontrol.wait;
  ld.volatile.global.u32 %r1, [%rd1];
  st.global.u32 [%rd2], %r1;
  ret;
}
"""


class Round(NamedTuple):
    """How one launch of the op is disturbed."""

    number: int
    delay_us: int
    pause_us: int
    """Between the producer and whatever ran before it."""
    is_cold: bool
    is_busy: bool


@dataclass(frozen=True, slots=True)
class _Chain:
    """The producer's copies, and what makes a round: memory to evict with and a neighbour's work."""

    producer: Kernel
    table: torch.Tensor
    copies: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """(buffer of an input, what the producer writes into it)."""
    evict: torch.Tensor
    neighbour: torch.Tensor
    stream: torch.cuda.Stream
    busy: torch.cuda.Stream

    def run(self, turn: Round, call: Callable[[], object]) -> None:
        """One round: inputs hold poison until the producer, which is late, has written them."""
        for buffer, _ in self.copies:
            buffer.fill_(0xFF)
        if turn.is_cold:
            self.evict.fill_(turn.number)
        torch.cuda.synchronize()
        if turn.is_busy:
            with torch.cuda.stream(self.busy):
                for _ in range(8):
                    torch.mm(self.neighbour, self.neighbour)
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(turn.pause_us * 1500)  # type: ignore[no-untyped-call]  # torch has no types
            parameters = (
                struct.pack("<Q", self.table.data_ptr()), struct.pack("<I", len(self.copies)),
                struct.pack("<Q", turn.delay_us * 1000),
            )  # fmt: skip
            self.producer.launch((BLOCKS, 1, 1), (THREADS, 1, 1), parameters, stream=self.stream.cuda_stream)
            call()
        torch.cuda.synchronize()


def rounds_of(seed: int) -> tuple[Round, ...]:
    """Rounds by seed: delays from none to long, L2 cold and warm, alone and beside a busy stream."""
    source = random.Random(seed)
    return tuple(
        Round(n, source.randrange(5, MAX_DELAY_US) if n else 0, source.randrange(50), n % 2 == 1, n % 4 > 1)
        for n in range(ROUNDS)
    )


def chain_of(inputs: Sequence[torch.Tensor]) -> _Chain:
    """A chain whose producer writes what these buffers (bytes, a multiple of 16 long) hold now."""
    copies = tuple((b, b.clone()) for b in inputs if b.numel() <= MAX_COPIED_BYTES)
    entries = [[to.data_ptr(), kept.data_ptr(), to.numel()] for to, kept in copies] or [[0, 0, 0]]
    return _Chain(
        producer=_module().kernel("produce"),
        table=torch.tensor(entries, dtype=torch.int64).cuda(),
        copies=copies,
        evict=torch.empty(COLD_BYTES, dtype=torch.uint8, device="cuda"),
        neighbour=torch.ones(2048, 2048, dtype=torch.bfloat16, device="cuda"),
        stream=torch.cuda.Stream(),  # type: ignore[no-untyped-call]  # torch leaves it untyped
        busy=torch.cuda.Stream(),  # type: ignore[no-untyped-call]  # as above
    )


def readers_differ(turns: Sequence[Round]) -> Mapping[str, tuple[int, ...]]:
    """By reader of our own, whether (1 or 0) it read anything but what the producer wrote, round by round."""
    buffer = torch.arange(1, 65, dtype=torch.int32, device="cuda").view(torch.uint8)
    seen = torch.zeros(1, dtype=torch.int32, device="cuda")
    chain = chain_of((buffer,))
    parameters = (struct.pack("<Q", buffer.data_ptr()), struct.pack("<Q", seen.data_ptr()))
    found: dict[str, tuple[int, ...]] = {}
    for reader in READERS:
        kernel, wrong = _module().kernel(reader), []
        for turn in turns:
            chain.run(
                turn,
                lambda kernel=kernel: kernel.launch(  # type: ignore[misc]  # bound in this round
                    (1, 1, 1), (1, 1, 1), parameters, stream=chain.stream.cuda_stream, is_dependent=True
                ),
            )
            wrong.append(int(seen.item() != 1))
        found[reader] = tuple(wrong)
    return found


@lru_cache(maxsize=1)
def _module() -> Module:
    return Module(PTX)
