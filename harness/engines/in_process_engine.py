"""A pack's model in this process as an `Engine`: both arms open at once, batches as large as the caller asks.

Draws come from seed, item, repeat and place alone, so that two arms that agree on the probabilities draw
the same tokens. Answers under a schema need outlines-core, which is asked for only where one is used.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

from harness.domain.errors import InputError
from harness.domain.pack import Decision, Pack, Session, SessionRequest
from harness.engines.in_process import force, open_session
from harness.engines.serving import Ask, Finish, Reply, StepTotal
from harness.engines.text_codec import TextCodec
from harness.engines.writer import StepTaken, Writer, drawn_places, write_answers
from harness.measure.goodness import Draw

__all__ = ["InProcessEngine", "OpenArm"]


class InProcessEngine:
    """See `serving.Engine`. `request` is how the stock arm opens; other arms differ from it in arm and
    poison.
    """

    name = "in-process"
    is_concurrent = True

    def __init__(
        self, pack: Pack, request: SessionRequest, codec: TextCodec, poisoned_op: str | None
    ) -> None:
        self._pack, self._request, self._codec, self._poisoned_op = pack, request, codec, poisoned_op

    @property
    def arms(self) -> tuple[str, ...]:
        """Stock, optimised, and the poisoned one where the pack has an op to poison."""
        return ("stock", "optimised", *(("poison",) if self._poisoned_op else ()))

    @contextmanager
    def open(self, arm: str) -> Iterator["OpenArm"]:
        """A session for the arm."""
        decisions: list[Decision] = []
        with open_session(self._pack, self._session(arm), decisions.append) as session:
            yield OpenArm(session, self._codec, decisions)

    def description(self, arm: str) -> tuple[tuple[str, str], ...]:
        """The session's request, field by field."""
        fields = self._session(arm).model_dump(mode="json")
        return tuple(sorted((name, json.dumps(value)) for name, value in fields.items()))

    def _session(self, arm: str) -> SessionRequest:
        if arm not in self.arms:
            raise ValueError(f"arm {arm!r} is none of {', '.join(self.arms)}")
        poison = self._poisoned_op if arm == "poison" else None
        changed = {"arm": "stock" if arm == "stock" else "optimised", "poisoned_op": poison}
        return self._request.model_copy(update=changed)


class OpenArm:
    """See `serving.ArmServer`."""

    def __init__(self, session: Session, codec: TextCodec, decisions: list[Decision]) -> None:
        self.session = session
        self._codec, self._decisions = codec, decisions
        self._totals: Counter[StepTotal] = Counter()

    def answer(self, asks: Sequence[Ask]) -> tuple[Reply, ...]:
        """One batch, from prefill to the last answer's end."""
        writers = [self._writer(ask) for ask in asks]
        write_answers(self.session, writers, self._last_step)
        return tuple(self._reply(ask, writer) for ask, writer in zip(asks, writers, strict=True))

    def ledger(self) -> dict[StepTotal, int]:
        """What the dispatcher decided, summed up."""
        for d in self._decisions:
            self._totals[StepTotal.of(d)] += d.tokens
        self._decisions.clear()
        return dict(self._totals)

    def counters(self) -> dict[str, int]:
        """Of the session's prefix cache, where it keeps prefixes."""
        queries, hits, _reused = self.session.prefix_counters()
        return {"prefix_queries": queries, "prefix_hits": hits}

    def stated(self, asks: Sequence[Ask], replies: Sequence[Reply]) -> list[list[Draw | None]]:
        """Where tokens that some arm generated lie in the probabilities that this arm gives at the
        temperature asked for; None where a probability is not finite. Answers of one length are forced
        together.
        """
        draws: dict[int, list[Draw | None]] = {}
        for length in sorted({len(reply.tokens) for reply in replies if reply.tokens}):
            members = [i for i, reply in enumerate(replies) if len(reply.tokens) == length]
            prompts = [self._codec.encode(asks[i]) for i in members]
            rows = force(self.session, prompts, [replies[i].tokens[:-1] for i in members])
            for i, logprobs in zip(members, rows, strict=True):
                tokens = replies[i].tokens
                draws[i] = drawn_places(logprobs, tokens, float(asks[i].temperature))
        return [draws.get(i, []) for i in range(len(replies))]

    def _last_step(self) -> StepTaken:
        if not self._decisions:
            return None, ""
        last = self._decisions[-1]
        return last.step, f"{last.path}/{last.reason}"

    def _writer(self, ask: Ask) -> Writer:
        writer = Writer(
            prompt=self._codec.encode(ask),
            max_tokens=ask.max_tokens,
            stop_token=self._codec.stop,
            pieces=self._codec.pieces(),
            stop_texts=tuple(stop.encode() for stop in ask.stop),
            temperature=float(ask.temperature),
            number=_numbers(ask),
        )
        if ask.answer_schema:
            writer.allowed, writer.advance = _grammar(ask.answer_schema, self._codec)
        return writer

    def _reply(self, ask: Ask, writer: Writer) -> Reply:
        return Reply(
            item=ask.item,
            repeat=ask.repeat,
            text=self._text(writer),
            tokens=tuple(writer.tokens),
            finish=cast("Finish", writer.finish),
            detail="a log-probability was not finite" if writer.finish == "error" else "",
            prompt_tokens=len(writer.prompt),
            likeliest=tuple(writer.likeliest),
            steps=tuple(step for step, _ in writer.steps),
            paths=tuple(path for _, path in writer.steps),
        )

    def _text(self, writer: Writer) -> str:
        return writer.text.decode("utf-8", "replace").removeprefix(" ")


def _grammar(schema: str, codec: TextCodec) -> tuple[Callable[[], Sequence[int]], Callable[[int], None]]:
    """Tokens that keep the answer within the schema, and how that moves on."""
    try:
        import outlines_core  # type: ignore[import-untyped,import-not-found,unused-ignore]  # ships no types
        from outlines_core import json_schema
    except ImportError as error:
        raise InputError(
            "answers under a schema need outlines-core, which is not installed; `pip install outlines-core`"
        ) from error
    by_text: dict[bytes, list[int]] = {}
    for token, piece in enumerate(codec.pieces()):
        if piece and token != codec.stop:
            by_text.setdefault(piece, []).append(token)
    pattern = json_schema.build_regex_from_schema(schema, whitespace_pattern="")
    index = outlines_core.Index(pattern, outlines_core.Vocabulary(codec.stop, by_text))
    guide = outlines_core.Guide(index)

    def advance(token: int) -> None:
        if token != codec.stop:
            guide.advance(token)

    return guide.get_tokens, advance


def _numbers(ask: Ask) -> Callable[[int], float]:
    """Draws of one answer, 0 to 1: seed, item, repeat and place decide them, on any machine."""
    key = f"{ask.seed}:{ask.item}:{ask.repeat}:".encode()

    def draw(place: int) -> float:
        return int.from_bytes(hashlib.sha256(key + str(place).encode()).digest()[:6]) / 2**48

    return draw
