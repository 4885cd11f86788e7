"""Ask every arm the same questions in the same batches, arms alternating from batch to batch.

The first arm of a batch is the second of the next (ABBA), so that whatever drifts in time meets both alike.
An engine that holds one arm at a time answers all batches of it before the next arm opens, and the rows say
so. Every batch is written down when it is answered: a run that was interrupted asks on from the first batch
that is missing. Batches, not requests, are repeated whole, as a request asked alone would meet another
batch size.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from harness.domain.record import Record, Whole, canonical_bytes, sha256_hex
from harness.engines.serving import ArmServer, Ask, Engine, Reply, StepTotal

__all__ = ["Answered", "Journal", "Transcript", "ask_arms", "batches"]

Progress = Callable[[str], None]


class Answered(Record):
    """One batch of one arm."""

    arm: str
    turn: Whole
    """Place in the order of asking, over all arms."""
    replies: tuple[Reply, ...]
    prompts: tuple[str, ...]
    """Digest of each prompt, in the order of the replies."""
    steps: tuple[tuple[str, str, str, Whole, Whole, Whole, Whole], ...]
    """(the fields of `StepTotal`, tokens) of this batch alone."""
    counters: tuple[tuple[str, Whole], ...]
    """What the batch added to the engine's counters."""


class Transcript(NamedTuple):
    """All answers."""

    batches: tuple[Answered, ...]

    def replies(self, arm: str) -> dict[tuple[str, int], Reply]:
        """An arm's replies by item and repeat."""
        return {(r.item, r.repeat): r for b in self.batches if b.arm == arm for r in b.replies}

    def turns(self, arm: str) -> dict[tuple[str, int], tuple[int, int]]:
        """By item and repeat: the turn in which it was asked, and how many were asked with it."""
        return {
            (r.item, r.repeat): (b.turn, len(b.replies))
            for b in self.batches
            if b.arm == arm
            for r in b.replies
        }

    def prompts(self, arm: str) -> dict[tuple[str, int], str]:
        """Digests of the prompts by item and repeat."""
        return {
            (r.item, r.repeat): digest
            for b in self.batches
            if b.arm == arm
            for r, digest in zip(b.replies, b.prompts, strict=True)
        }

    def steps(self) -> Counter[tuple[str, StepTotal]]:
        """Tokens by arm and kind of step."""
        total: Counter[tuple[str, StepTotal]] = Counter()
        for batch in self.batches:
            for phase, path, reason, requests, context, drafts, tokens in batch.steps:
                kind = StepTotal(phase, path, reason, requests, context, drafts)
                total[batch.arm, kind] += tokens
        return total

    def counters(self) -> Counter[tuple[str, str]]:
        """What each arm's engine counted, by arm and name."""
        total: Counter[tuple[str, str]] = Counter()
        for batch in self.batches:
            for name, value in batch.counters:
                total[batch.arm, name] += value
        return total


class Journal:
    """Answered batches in a file of JSON lines, found again by arm and questions. A torn last line is
    dropped.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, Answered] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    entry = json.loads(line)
                    self._known[entry["key"]] = Answered.model_validate(entry["batch"])
                except (ValueError, KeyError, TypeError, ValidationError):
                    break

    def find(self, arm: str, asks: Sequence[Ask]) -> Answered | None:
        """The batch, if it was answered before."""
        return self._known.get(_key(arm, asks))

    def keep(self, asks: Sequence[Ask], batch: Answered) -> None:
        """Write one batch down at once."""
        line = json.dumps({"key": _key(batch.arm, asks), "batch": batch.model_dump(mode="json")})
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def done(self) -> None:
        """Forget everything: the answers are in the samples, and the next run asks anew."""
        self._path.unlink(missing_ok=True)


def batches(asks: Sequence[Ask], sizes: Sequence[int]) -> Iterator[tuple[Ask, ...]]:
    """The asks in order, in batches that take their sizes by turns, so that each size answers a like share.

    A size of 1 comes as often as its turn lasts a question's time: 64 at once, then one by one 64 times,
    would leave no time for anything else, so every size gets its turn once in a round.
    """
    place, turn = 0, 0
    while place < len(asks):
        size = sizes[turn % len(sizes)]
        yield tuple(asks[place : place + size])
        place, turn = place + size, turn + 1


def ask_arms(
    engine: Engine, groups: Sequence[Sequence[Ask]], arms: Sequence[str], journal: Journal, say: Progress
) -> Transcript:
    """Every group put to every arm."""
    order = _alternating(groups, arms) if engine.is_concurrent else _in_turn(groups, arms)
    answered: list[Answered] = []
    with ExitStack() as stack:
        open_arms: dict[str, ArmServer] = {}
        for turn, (arm, asks) in enumerate(order):
            known = journal.find(arm, asks)
            if known is None:
                if arm not in open_arms:
                    if not engine.is_concurrent:
                        stack.close()
                        open_arms.clear()
                    open_arms[arm] = stack.enter_context(engine.open(arm))
                known = _answer(open_arms[arm], arm, turn, asks)
                journal.keep(asks, known)
            answered.append(known)
            say(f"batch {turn + 1} of {len(order)}, {arm} arm, {len(asks)} at once")
    return Transcript(tuple(answered))


def _alternating(groups: Sequence[Sequence[Ask]], arms: Sequence[str]) -> list[tuple[str, Sequence[Ask]]]:
    return [
        (arm, asks)
        for number, asks in enumerate(groups)
        for arm in (arms if number % 2 == 0 else tuple(reversed(arms)))
    ]


def _in_turn(groups: Sequence[Sequence[Ask]], arms: Sequence[str]) -> list[tuple[str, Sequence[Ask]]]:
    return [(arm, asks) for arm in arms for asks in groups]


def _answer(server: ArmServer, arm: str, turn: int, asks: Sequence[Ask]) -> Answered:
    before, counted = server.ledger(), server.counters()
    replies = server.answer(asks)
    steps = Counter(server.ledger())
    steps.subtract(before)
    counters = {name: value - counted.get(name, 0) for name, value in server.counters().items()}
    return Answered(
        arm=arm,
        turn=turn,
        replies=replies,
        prompts=tuple(ask.prompt_digest() for ask in asks),
        steps=tuple((*kind, tokens) for kind, tokens in sorted(steps.items()) if tokens),
        counters=tuple(sorted(counters.items())),
    )


def _key(arm: str, asks: Sequence[Ask]) -> str:
    return sha256_hex(canonical_bytes([arm, [ask.model_dump(mode="json") for ask in asks]]))
