"""A pack whose float64 oracle answers each question once: no fault touches it, and it is slow.

Answers are kept by everything that the session was asked so far, in this process only. Stock and optimised
sessions are the pack's own, as faults may change either.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from harness.domain.pack import Arm, Decision, Pack, Session, SessionRequest
from harness.domain.record import sha256_hex

__all__ = ["once"]


def once(pack: Pack) -> Pack:
    """The pack, with oracle sessions that remember."""
    return cast("Pack", _OracleOnce(pack))


class _OracleOnce:
    """Everything of the pack, but for sessions of the oracle."""

    def __init__(self, pack: Pack) -> None:
        self._pack = pack
        self._answers: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pack, name)

    def open_session(self, request: SessionRequest, observer: Callable[[Decision], None] | None) -> Session:
        """The pack's session, or one that answers from memory where it can."""
        if not request.is_oracle:
            return self._pack.open_session(request, observer)
        return cast("Session", _Remembering(self._pack, request, self._answers))


class _Remembering:
    """An oracle session that is opened when a question is new, and then asked everything again."""

    def __init__(self, pack: Pack, request: SessionRequest, answers: dict[str, Any]) -> None:
        self._pack, self._request, self._answers = pack, request, answers
        self._asked: list[tuple[str, tuple[Any, ...]]] = []
        self._live: Session | None = None

    @property
    def vocab_size(self) -> int:
        return cast("int", self._ask("vocab_size", ()))

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Any:
        return self._ask("prefill", (prompts,))

    def decode(self, requests: Sequence[int], tokens: Sequence[int]) -> Any:
        return self._ask("decode", (requests, tokens))

    def verify(self, requests: Sequence[int], rows: Sequence[Sequence[int]], accepted: Sequence[int]) -> Any:
        return self._ask("verify", (requests, rows, accepted))

    def finish(self, requests: Sequence[int]) -> None:
        self._ask("finish", (requests,))

    def switch(self, arm: Arm) -> None:
        """The oracle has one path."""

    def launches(self) -> Mapping[str, int]:
        return {}

    def watched(self) -> Mapping[str, Any]:
        return {}

    def writable(self, requests: Sequence[int]) -> Mapping[str, Any]:
        return {}

    def close(self) -> None:
        if self._live is not None:
            self._live.close()

    def _ask(self, name: str, arguments: tuple[Any, ...]) -> Any:
        before = len(self._asked)
        self._asked.append((name, arguments))
        key = sha256_hex(repr((self._request.digest(), self._asked)).encode())
        if key not in self._answers:
            missing = self._asked[before:] if self._live is not None else self._asked
            for asked, given in missing:
                self._answers[key] = self._put(asked, given)
        elif self._live is not None:
            self._put(name, arguments)
        return self._answers[key]

    def _put(self, name: str, arguments: tuple[Any, ...]) -> Any:
        if self._live is None:
            self._live = self._pack.open_session(self._request, None)
        found = getattr(self._live, name)
        return found(*arguments) if callable(found) else found
