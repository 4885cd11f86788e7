"""The exchange protocols as models: each rank's atomic steps, and the same with a known fault.

Each word of a part has a thread of its own on every rank, and every store, read and re-arming of one word is
a step, so that torn parts, ranks an epoch ahead and ranks that are late all occur in some order. A word holds
the launch that wrote it; `None` is the sentinel. What the kernels leave to hardware is assumed: a store
arrives once and whole, stores of one thread to one word keep their order, and a launch of a rank begins when
its last one has ended.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from harness.domain.collective_model import CollectiveModel, ModelState, Program, Step
from k3_decode.ops.mailbox import EPOCHS

__all__ = ["FAULTS", "Fault", "Launch", "Plan", "collective_models", "model_of"]


class Fault(StrEnum):
    """What goes wrong when one rule of the protocol is broken."""

    CLEARS_NEXT = "three epochs, and each clears the slots of the next but two: (e + 1) mod 3"
    NO_REARM = "the reader leaves what it has read"
    ONE_EPOCH = "every epoch has the same slots"
    OWN_COUNTERS = "one-shot and two-stage count epochs apart over the same slots"
    BLOCK_COUNTERS = "each block counts its own launches, and shapes give words to other blocks"
    CLEARS_OWN_EXTENT = "three epochs, and a small step clears only as much as it uses itself"
    SENDER_RESETS = "the sender takes its words back when it is done itself"
    FLAG_FIRST = "the flag goes up before the data"
    SHARED_FLAG = "one-shot and two-stage count apart and raise the same flags"
    RESTART_ALONE = "after an abort a rank clears its mailbox without waiting for its peers"


@dataclass(frozen=True, slots=True)
class Launch:
    """One exchange of a run."""

    words: int
    """Words of each rank's part."""
    is_two_stage: bool = False
    """Owners reduce their words and send the sums out; otherwise everyone reduces everything."""
    is_restart: bool = False
    """The run was aborted before it: mailboxes are cleared and epochs begin again."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A protocol: what ranks do in each launch."""

    name: str
    launches: tuple[Launch, ...]
    has_flags: bool = False
    """Words are plain and a flag a source tells that they are there; otherwise words carry their mark."""
    is_cleared_ahead: bool = False
    """Three epochs whose slots are cleared while waiting, (e + 2) mod 3; otherwise the reader re-arms."""
    fault: Fault | None = None


ALTERNATING = (Launch(2), Launch(2, True), Launch(1), Launch(2))
"""Shapes and forms in turn."""
PLANS = (
    (Plan("exchange_one_shot", (Launch(2), Launch(1), Launch(2), Launch(2))), Fault.NO_REARM),
    (Plan("exchange_two_stage", ALTERNATING), Fault.OWN_COUNTERS),
    (Plan("exchange_restart", (Launch(1), Launch(1), Launch(1, is_restart=True))), Fault.RESTART_ALONE),
    (Plan("exchange_flags", ALTERNATING, has_flags=True), Fault.SHARED_FLAG),
)
"""What the kernels do, each with the fault that is its control."""
FAULTS: dict[Fault, Plan] = {
    Fault.CLEARS_NEXT: Plan("clears_next", (Launch(1),) * 4, is_cleared_ahead=True),
    Fault.NO_REARM: PLANS[0][0],
    Fault.ONE_EPOCH: PLANS[0][0],
    Fault.OWN_COUNTERS: PLANS[1][0],
    Fault.BLOCK_COUNTERS: Plan("block_counters", (Launch(2), Launch(1), Launch(2), Launch(2))),
    Fault.CLEARS_OWN_EXTENT: Plan(
        "clears_own_extent", (Launch(2), Launch(1), Launch(1), Launch(2)), is_cleared_ahead=True
    ),
    Fault.SENDER_RESETS: PLANS[0][0],
    Fault.FLAG_FIRST: PLANS[3][0],
    Fault.SHARED_FLAG: PLANS[3][0],
    Fault.RESTART_ALONE: PLANS[2][0],
}
"""For each fault the protocol in which it is planted."""


def collective_models() -> tuple[CollectiveModel, ...]:
    """The kernels' protocols between two ranks, small enough to be explored whole."""
    return tuple(model_of(plan, 2, fault) for plan, fault in PLANS)


def model_of(plan: Plan, ranks: int, fault: Fault | None = None) -> CollectiveModel:
    """A protocol of so many ranks, and the same with `fault` as what is planted."""
    start: ModelState = {}
    words = max(launch.words for launch in plan.launches)
    places = [(rank, word) for rank in range(ranks) for word in range(words)]
    sound, wrong = (
        tuple(_Thread(version, ranks, words, *place).program(start) for place in places)
        for version in (plan, replace(plan, fault=fault))
    )
    names = tuple(f"rank {rank} thread {word}" for rank, word in places)
    return CollectiveModel(plan.name, start, sound, wrong, names)


class _Thread:
    """The steps of one thread: it moves one word of every launch that has so many."""

    def __init__(self, plan: Plan, ranks: int, threads: int, rank: int, word: int) -> None:
        self.plan, self.fault = plan, plan.fault
        self.ranks, self.threads, self.rank, self.word = ranks, threads, rank, word
        self.peers = [peer for peer in range(ranks) if peer != rank]
        self.steps: list[Step] = []
        self.forms = [0, 0]
        """Launches so far of the one-shot and of the two-stage form."""
        self.since = 0
        """Launch since which epochs are counted."""
        self.joins = 0

    def program(self, start: ModelState) -> Program:
        """All launches in order; names every word and flag in `start`."""
        for index, launch in enumerate(self.plan.launches):
            if launch.is_restart:
                self._restart(index)
            if launch.is_two_stage:
                self._two_stage(index, launch.words)
            else:
                self._one_shot(index, launch.words)
            self.forms[launch.is_two_stage] += 1
            self._join()
        for step in self.steps:
            start.update(dict.fromkeys((n for n in step.label.split()[1:] if "." in n), None))
        return tuple(self.steps)

    def _one_shot(self, index: int, words: int) -> None:
        is_mine = self.word < words
        targets = [self._name(index, peer, self.rank, "part") for peer in self.peers if is_mine]
        self._send(index, targets, "part")
        self._clear_ahead(index, words)
        if is_mine:
            self._receive(index, self.peers, "part")
        if self.fault is Fault.SENDER_RESETS:
            self.steps += [Step(f"resets {name}", _clearer(name)) for name in targets]

    def _two_stage(self, index: int, words: int) -> None:
        is_mine, owner = self.word < words, self.word % self.ranks
        is_owner = is_mine and owner == self.rank
        part = [] if is_owner or not is_mine else [self._name(index, owner, self.rank, "part")]
        self._send(index, part, "part")
        if is_owner:
            self._receive(index, self.peers, "part")
        sums = [self._name(index, peer, self.rank, "sum") for peer in self.peers if is_owner]
        self._send(index, sums, "sum")
        if is_mine and not is_owner:
            self._receive(index, [owner], "sum")

    def _restart(self, index: int) -> None:
        """All ranks stop, each clears what it owns, all go on: two meetings on the host."""
        is_alone = self.fault is Fault.RESTART_ALONE
        if not is_alone:
            self._meet(index, "stop")
        names = [
            f"{kind}.{self.rank}.{slot}.{source}.{self.word}"
            for kind in ("part", "sum")
            for slot in range(EPOCHS)
            for source in self.peers
        ]

        def clear(state: ModelState) -> None:
            state.update(dict.fromkeys(names))

        self.steps.append(Step("clears " + " ".join(names), clear))
        if is_alone:
            self._join()
        else:
            self._meet(index, "go")
        self.since = index

    def _meet(self, index: int, what: str) -> None:
        name, everyone = f"met.{what}.{index}", self.ranks * self.threads
        self.steps.append(Step(f"meets {name}", _adder(name)))
        self.steps.append(Step(f"leaves {name}", _nothing, lambda state: int(state[name] or 0) == everyone))

    def _join(self, only: int | None = None) -> None:
        """Wait for the other threads of the rank; with `only`, that thread alone waits."""
        self.joins += 1
        if self.threads == 1:
            return
        name, total = f"joined.{self.rank}", self.threads * self.joins
        self.steps.append(Step(f"arrives {name}", _adder(name)))
        if only in (None, self.word):
            wait = Step(f"joins {name}", _nothing, lambda state: int(state[name] or 0) >= total)
            self.steps.append(wait)

    def _slot(self, index: int) -> int:
        """Which of the slots a launch uses for this word."""
        if self.fault is Fault.ONE_EPOCH:
            return 0
        if self.fault is Fault.OWN_COUNTERS:
            return self.forms[self.plan.launches[index].is_two_stage] % EPOCHS
        if self.fault is Fault.BLOCK_COUNTERS:  # a block a word, and the last launch but one turns them about
            launches, block = self.plan.launches, (self.word + (index == len(self.plan.launches) - 2)) % 2
            return sum(block < launch.words for launch in launches[:index]) % EPOCHS
        return (index - self.since) % (EPOCHS + self.plan.is_cleared_ahead)

    def _name(self, index: int, owner: int, source: int, kind: str) -> str:
        """A word in the mailbox of `owner`."""
        return f"{kind}.{owner}.{self._slot(index)}.{source}.{self.word}"

    def _send(self, index: int, targets: Sequence[str], kind: str) -> None:
        data = [Step(f"writes {name}", self._writer(index, name)) for name in targets]
        if not self.plan.has_flags:
            self.steps += data
            return
        flags = [self._flag(index, peer, self.rank, kind) for peer in self.peers if self.word == 0]
        raised = [Step(f"raises {name}", _raiser(name, value)) for name, value in flags]
        if self.fault is Fault.FLAG_FIRST:
            self.steps += raised + data
            return
        self.steps += data
        self._join(only=0)
        self.steps += raised

    def _writer(self, index: int, name: str) -> Callable[[ModelState], str | None]:
        carries_mark = not self.plan.has_flags

        def write(state: ModelState) -> str | None:
            if carries_mark and state[name] is not None:
                return f"launch {index} overwrites {name}, which nobody has read"
            state[name] = index
            return None

        return write

    def _flag(self, index: int, owner: int, source: int, kind: str) -> tuple[str, int]:
        """Name and value of a flag: it holds the epoch, so nobody ever lowers it."""
        if self.fault is Fault.SHARED_FLAG:
            return f"flag.{owner}.{source}", self.forms[self.plan.launches[index].is_two_stage] + 1
        return f"flag.{kind}.{owner}.{source}", index + 1

    def _receive(self, index: int, sources: Sequence[int], kind: str) -> None:
        is_left = self.plan.has_flags or self.plan.is_cleared_ahead
        is_left = is_left or self.fault in (Fault.NO_REARM, Fault.SENDER_RESETS)
        for source in sources:
            name = self._name(index, self.rank, source, kind)
            self.steps.append(Step(f"reads {name}", _reader(index, name), self._arrival(index, source, kind)))
            if not is_left:
                self.steps.append(Step(f"rearms {name}", _clearer(name)))

    def _arrival(self, index: int, source: int, kind: str) -> Callable[[ModelState], bool]:
        if not self.plan.has_flags:
            name = self._name(index, self.rank, source, kind)
            return lambda state: state[name] is not None
        flag, value = self._flag(index, self.rank, source, kind)
        return lambda state: int(state.get(flag) or 0) >= value

    def _clear_ahead(self, index: int, words: int) -> None:
        if not self.plan.is_cleared_ahead:
            return
        if self.fault is Fault.CLEARS_OWN_EXTENT and self.word >= words:
            return
        slot = (index + (1 if self.fault is Fault.CLEARS_NEXT else 2)) % 3
        names = [f"part.{self.rank}.{slot}.{source}.{self.word}" for source in self.peers]
        self.steps += [Step(f"clears {name}", _clearer(name)) for name in names]


def _nothing(state: ModelState) -> None:
    """A wait changes nothing."""


def _reader(index: int, name: str) -> Callable[[ModelState], str | None]:
    def read(state: ModelState) -> str | None:
        seen = state[name]
        return None if seen == index else f"launch {index} reads what launch {seen} left in {name}"

    return read


def _clearer(name: str) -> Callable[[ModelState], None]:
    def clear(state: ModelState) -> None:
        state[name] = None

    return clear


def _adder(name: str) -> Callable[[ModelState], None]:
    def add(state: ModelState) -> None:
        state[name] = int(state[name] or 0) + 1

    return add


def _raiser(name: str, value: int) -> Callable[[ModelState], None]:
    def lift(state: ModelState) -> None:
        state[name] = max(int(state[name] or 0), value)

    return lift
