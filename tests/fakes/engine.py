"""An engine that answers from a script: what a server behind a URL looks like to the evals."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from harness.engines.serving import Ask, Finish, Reply, StepTotal

__all__ = ["ScriptedArm", "ScriptedEngine", "said"]

Script = Callable[[str, Ask], Reply]


def said(ask: Ask, text: str, finish: Finish = "stop", gap: float = 1.0) -> Reply:
    """A reply of one token a character; each token leads the letter `?` by `gap` nats."""
    tokens = tuple(ord(letter) for letter in text)
    return Reply(
        item=ask.item, repeat=ask.repeat, text=text, tokens=tokens, finish=finish,
        prompt_tokens=len(ask.text),
        likeliest=tuple(((token, -0.1), (ord("?"), -0.1 - gap)) for token in tokens),
        steps=tuple(range(1, len(tokens) + 1)), paths=("optimised/taken",) * len(tokens),
    )  # fmt: skip


class ScriptedArm:
    """See `serving.ArmServer`."""

    def __init__(self, arm: str, engine: "ScriptedEngine") -> None:
        self._arm, self._engine = arm, engine
        self._tokens: dict[StepTotal, int] = {}

    def answer(self, asks: Sequence[Ask]) -> tuple[Reply, ...]:
        self._engine.seen.append((self._arm, tuple((ask.item, ask.repeat) for ask in asks)))
        replies = tuple(self._engine.script(self._arm, ask) for ask in asks)
        path = "stock" if self._arm == "stock" else self._engine.path
        kind = StepTotal("decode", path, "taken", len(asks))
        self._tokens[kind] = self._tokens.get(kind, 0) + sum(len(reply.tokens) for reply in replies)
        return replies

    def ledger(self) -> dict[StepTotal, int]:
        return dict(self._tokens)

    def counters(self) -> dict[str, int]:
        return dict(self._engine.counted.get(self._arm, {})) if self._tokens else {}


class ScriptedEngine:
    """See `serving.Engine`; `seen` holds every batch in the order asked."""

    name = "scripted"

    def __init__(self, script: Script, arms: tuple[str, ...] = ("stock", "optimised")) -> None:
        self.script, self.arms = script, arms
        self.is_concurrent = True
        self.path = "optimised"
        self.counted: dict[str, dict[str, int]] = {}
        self.seen: list[tuple[str, tuple[tuple[str, int], ...]]] = []
        self.opened: list[str] = []

    @contextmanager
    def open(self, arm: str) -> Iterator[ScriptedArm]:
        self.opened.append(arm)
        yield ScriptedArm(arm, self)

    def description(self, arm: str) -> tuple[tuple[str, str], ...]:
        return (("command", f"serve --arm {arm}"),)
