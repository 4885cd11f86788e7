"""What the exchange kernels share: sending words to mailboxes, waiting for them, counting epochs, giving up.

Invariant: whatever peers write or read is touched by strong accesses at system scope alone, in units of 4
bytes, each of which tells by itself whether it is there (`ops/mailbox.py` has the protocol and
`collectives/models.py` its models). No access here orders another. A wait ends after a bounded number of
looks: then the first to miss something writes down in the rank's control what it missed, the output becomes
NaN, and later launches look once only, until the host begins anew. Peers never see a rank's control.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_tensor

from k3_decode.cute import fragments as frag
from k3_decode.cute import instructions as ins
from k3_decode.ops.mailbox import CONTROL_WORDS, EPOCHS, EXCHANGES, SENTINEL, VECTOR_BYTES

__all__ = [
    "LAUNCH_PLACE", "NAN_WORD", "Mail", "State", "Turn", "advance", "arrived", "begin", "canonical",
    "canonical_fp32", "canonical_words", "collect", "collect_word", "count_launch", "delay", "enter",
    "fake_control", "fake_launches", "fake_mailbox", "fake_reach", "floats", "open_mail", "peer_address",
    "poisoned_if", "post", "post_to_all", "post_word", "rearm", "rearm_word", "report", "sum_in_rank_order",
    "value_of", "word_of",
]  # fmt: skip

LAUNCH_PLACE = 14
"""Place of every exchange in the launch counters: the last but one, as exchanges are no ops of their own."""
NAN_WORD = 0x7FC07FC0
"""bf16 NaN twice: what an exchange gives that did not end."""
MARK = SENTINEL - (1 << 32)
"""The sentinel as a signed word."""


class Mail(NamedTuple):
    """Mailboxes as one rank reaches them."""

    ranks: int
    rank: Int32
    """This rank."""
    peers: list[Int64]
    """Address of every rank's mailbox, this rank's too."""
    own: Int64
    base: Int64
    reach_at: Int64
    """Where the distances from `base` to all mailboxes lie."""


class State(NamedTuple):
    """A rank's control as a launch found it."""

    at: Int64
    epoch: Int32
    slot: Int64
    """epoch % 2."""
    limit: Int32
    """Looks at a word before giving up; 0 after a fault."""


class Turn(NamedTuple):
    """A thread's share of a launch whose threads take whole vectors in turn."""

    state: State
    tid: Int32
    bid: Int32
    blocks: Int32
    first: Int32
    """The thread's first vector."""
    step: Int32
    """Threads of a local rank, and so the distance to the thread's next vector."""
    sent_to: Int64
    """Where this rank's part of the epoch begins in every mailbox."""
    parts_at: Int64
    """Address of the parts of this epoch in the own mailbox, rank 0's first."""
    words: list[ins.Words]
    """What was asked for before the control was looked at."""
    single: list[Int32]
    """The same of 4 bytes each."""


def fake_control() -> Any:
    """The control of all local ranks, for compilation."""
    return make_fake_tensor(Int32, (cute.sym_int32(), CONTROL_WORDS), (CONTROL_WORDS, 1), assumed_align=16)


def fake_mailbox() -> Any:
    """The first local rank's mailbox, for compilation."""
    return make_fake_tensor(Int32, (cute.sym_int64(),), (1,), assumed_align=16)


def fake_reach(ranks: int) -> Any:
    """The distances to all mailboxes, for compilation."""
    return make_fake_tensor(Int64, (ranks,), (1,), assumed_align=16)


def fake_launches() -> Any:
    """The launch counters, for compilation."""
    return make_fake_tensor(Int32, (cute.sym_int32(),), (1,), assumed_align=4)


def open_mail(mailbox: cute.Tensor, reach: cute.Tensor, rank: Int32, ranks: int) -> Mail:
    """Addresses of all mailboxes; reads constants only, so it may stand before the wait."""
    base, at = ins.byte_address(mailbox), ins.byte_address(reach)
    peers = [base + _load_distance(at + 8 * peer) for peer in range(ranks)]
    return Mail(ranks, rank, peers, base + _load_distance(at + Int64(rank) * 8), base, at)


def peer_address(mail: Mail, peer: Int32) -> Int64:
    """Address of the mailbox of a rank that is known at run time only."""
    return mail.base + _load_distance(mail.reach_at + Int64(peer) * 8)


def enter(control: cute.Tensor, local: Int32, limit: Int32) -> State:
    """What this launch is; after the wait on the previous kernel."""
    at = ins.byte_address(control) + Int64(local) * (CONTROL_WORDS * 4)
    epoch, _, fault, _ = ins.load_activation(at)
    return State(at, epoch, Int64(epoch & 1), frag.choose_word(fault, Int32(0), limit))


def begin(
    mail: Mail,
    control: cute.Tensor,
    local: Int32,
    limit: Int32,
    room: int,
    threads: int,
    delay_ns: int,
    asked: tuple[Int64, ...] = (),
    asked_word: tuple[Int64, ...] = (),
) -> Turn:
    """Let the next kernel start, wait for the previous one, and find this thread's share of the epoch.

    `asked`, `asked_word`: addresses of 16 bytes and of 4 whose loads are to be on their way together with the
    control's; the compiler would begin them once the epoch is known.
    """
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()
    words = [ins.load_activation(address) for address in asked]
    single = [ins.load_activation_word(address) for address in asked_word]
    state = enter(control, local, limit)
    delay(state, mail, delay_ns, 0)
    sent_to = state.slot * (mail.ranks * room) + Int64(mail.rank) * room
    return Turn(
        state, tid, bid, blocks, bid * threads + tid, blocks * threads, sent_to, arrived(mail, state, room),
        words, single,
    )  # fmt: skip


@cute.jit
def advance(state: Any, tid: Int32, blocks: Int32):
    """All threads of a block, which have read the control: the last block to come counts the epoch.

    It runs before the data are waited for, so that it costs no time of its own.
    """
    cute.arch.sync_threads()
    if tid == 0:
        before = ins.asm("atom.relaxed.gpu.global.add.s32 $0, [$1], 1;", "=r,l", [state.at + 4], [Int32])
        if before == blocks - 1:
            ins.store_word(state.at + 4, Int32(0))
            ins.store_word(state.at, state.epoch + 1)


def canonical(word: Int32) -> Int32:
    """Two bf16 with -0.0 turned into 0.0, all else kept, NaN payloads too."""
    template = (
        "{.reg .b32 m; and.b32 m, $1, 0x7FFF7FFF; add.u32 m, m, 0x7FFF7FFF; or.b32 m, m, 0x7FFF7FFF; "
        "and.b32 $0, $1, m;}"
    )
    return ins.asm(template, "=r,r", [word], [Int32], is_pure=True)


def canonical_words(words: ins.Words, is_fp32: bool = False) -> ins.Words:
    """16 bytes fit to be sent; of fp32 values the one that looks like the sentinel (-4.6e-41) is -0.0."""
    return tuple(canonical_fp32(word) if is_fp32 else canonical(word) for word in words)


def canonical_fp32(word: Int32) -> Int32:
    """An fp32 value fit to be sent."""
    template = f"{{.reg .pred p; setp.eq.b32 p, $1, {SENTINEL:#x}; selp.b32 $0, 0x80000000, $1, p;}}"
    return ins.asm(template, "=r,r", [word], [Int32], is_pure=True)


def word_of(value: Float32) -> Int32:
    """The bits of an fp32 value."""
    return ins.asm("mov.b32 $0, $1;", "=r,f", [value], [Int32], is_pure=True)


def value_of(word: Int32) -> Float32:
    """The fp32 value of bits."""
    return ins.asm("mov.b32 $0, $1;", "=f,r", [word], [Float32], is_pure=True)


def post(address: Int64, words: ins.Words) -> None:
    """16 bytes to a mailbox."""
    ins.asm("st.relaxed.sys.global.v4.b32 [$0], {$1,$2,$3,$4};", "l,r,r,r,r", [address, *words])


def post_word(address: Int64, word: Int32, is_wanted: Int32) -> None:
    """4 bytes to a mailbox by the lanes whose flag is not 0."""
    template = "{.reg .pred p; setp.ne.b32 p, $2, 0; @p st.relaxed.sys.global.b32 [$0], $1;}"
    ins.asm(template, "l,r,r", [address, word, is_wanted])


def post_to_all(mail: Mail, offset: Int64, words: ins.Words) -> None:
    """16 bytes to the same place of every mailbox."""
    for peer in mail.peers:
        post(peer + offset, words)


def collect(address: Int64, sources: int, stride: int, limit: Int32) -> tuple[list[ins.Words], Int32]:
    """What `sources` ranks sent, 16 bytes each at `address` + i `stride`, and whether some of it is missing.

    Looks until every word is there, at least once and at most `limit` times; all loads of a look are on their
    way together.
    """
    words, missing = _collected(address, sources, stride, limit, 4)
    return [tuple(words[4 * s : 4 * s + 4]) for s in range(sources)], missing


def collect_word(address: Int64, sources: int, stride: int, limit: Int32) -> tuple[list[Int32], Int32]:
    """The same of 4 bytes a source."""
    return _collected(address, sources, stride, limit, 1)


def _collected(
    address: Int64, sources: int, stride: int, limit: Int32, width: int
) -> tuple[list[Int32], Int32]:
    count = width * sources
    targets = [[f"${1 + width * s + i}" for i in range(width)] for s in range(sources)]
    kind, brackets = (".v4", "{{{}}}") if width == 4 else ("", "{}")
    loads = "".join(
        f"ld.relaxed.sys.global{kind}.b32 {brackets.format(','.join(target))}, [${count + 1}+{s * stride}]; "
        for s, target in enumerate(targets)
    )
    marks = "".join(f"xor.b32 t{i}, ${1 + i}, {SENTINEL:#x}; " for i in range(count))
    least, left = "", count
    while left > 1:
        half = (left + 1) // 2
        least += "".join(f"min.u32 t{i}, t{i}, t{i + half}; " for i in range(left - half))
        left = half
    template = (
        f"{{ .reg .pred p, q; .reg .b32 n, t<{count}>; mov.b32 n, ${count + 2}; AGAIN: {loads}{marks}{least}"
        "setp.eq.u32 p, t0, 0; @!p bra DONE; sub.s32 n, n, 1; setp.gt.s32 q, n, 0; @q bra AGAIN; "
        "DONE: selp.b32 $0, 1, 0, p; }"
    )
    constraints = ",".join(["=&r"] * (count + 1) + ["l", "r"])
    missing, *words = ins.asm(template, constraints, [address, limit], [Int32] * (count + 1))
    return words, missing


def rearm(address: Int64, sources: int, stride: int) -> None:
    """Put the sentinel back where `collect` has read."""
    for source in range(sources):
        post(address + source * stride, (Int32(MARK),) * 4)


def rearm_word(address: Int64, sources: int, stride: int) -> None:
    """The same where `collect_word` has read."""
    for source in range(sources):
        post_word(address + source * stride, Int32(MARK), Int32(1))


@cute.jit
def report(state: Any, parts: Any, missing: Int32, source: Int32, vector: Int32, name: Any):
    """Write down a rank's first fault: whose words are missing, and where. `source`: rank of `parts[0]`."""
    if missing != 0:
        absent = Int32(len(parts) - 1)
        for i in cutlass.range_constexpr(len(parts) - 1, -1, -1):
            here = Int32(0)
            for word in parts[i]:
                here = here | Int32(word == MARK)
            absent = frag.choose_word(here, Int32(i), absent)
        template = "atom.relaxed.gpu.global.cas.b32 $0, [$1], 0, $2;"
        before = ins.asm(template, "=r,l,r", [state.at + 8, Int32(EXCHANGES.index(name) + 1)], [Int32])
        if before == 0:
            ins.store_word(state.at + 12, state.epoch)
            ins.store_word(state.at + 16, source + absent)
            ins.store_word(state.at + 20, vector)


def poisoned_if(words: ins.Words, missing: Int32) -> ins.Words:
    """NaN where something is missing."""
    return tuple(frag.choose_word(missing, Int32(NAN_WORD), word) for word in words)


def floats(words: ins.Words) -> list[Float32]:
    """8 bf16 as fp32."""
    return [half for word in words for half in (ins.low_half(word), ins.high_half(word))]


def sum_in_rank_order(parts: list[ins.Words]) -> ins.Words:
    """8 columns of bf16: added in fp32 by ascending rank, rounded once."""
    totals = floats(parts[0])
    for part in parts[1:]:
        totals = [total + value for total, value in zip(totals, floats(part), strict=True)]
    return tuple(ins.pack_halves(totals[i], totals[i + 1]) for i in range(0, 8, 2))


def delay(state: State, mail: Mail, most_ns: int, salt: int) -> None:
    """For tests: sleep, most of all in the rank whose turn the epoch is, and by chance in every block."""
    if not most_ns:
        return
    bid, _, _ = cute.arch.block_idx()
    chance = (state.epoch * 40503 + mail.rank * 9973 + bid * 613 + salt * 7919) * -1640531527
    turn = Int32(state.epoch % mail.ranks == mail.rank)
    sleep = ((chance >> 20) & 63) * (most_ns // 64) + turn * (most_ns if salt == 0 else 0)
    ins.asm("nanosleep.u32 $0;", "r", [sleep])


def arrived(mail: Mail, state: State, room: int) -> Int64:
    """Where the parts of this epoch lie in the own mailbox, rank 0's first."""
    return mail.own + state.slot * (mail.ranks * room)


def count_launch(launches: cute.Tensor) -> None:
    """By one thread of the launch."""
    ins.add_launch(ins.byte_address(launches) + LAUNCH_PLACE * 4)


def _load_distance(address: Int64) -> Int64:
    return ins.asm("ld.weak.global.b64 $0, [$1];", "=l,l", [address], [Int64])


assert EPOCHS == 2  # `State.slot` is one bit
assert VECTOR_BYTES == 16
