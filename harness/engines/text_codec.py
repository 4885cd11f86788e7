"""Text to tokens and back, for models that bring no tokenizer.

`ByteCodec`: a token for each byte of UTF-8, for models that were never trained. `WordCodec`: a token for each
word of a fixed list, read from a file beside the evals, with the few rules of a chat that the model was
trained on. A codec never drops text silently: a word that it does not know raises.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from harness.domain.errors import InputError
from harness.domain.record import Record, Whole
from harness.engines.serving import Ask, Message

__all__ = ["ByteCodec", "TextCodec", "TokenCodec", "WordCodec", "Words", "load_words"]


class TextCodec(Protocol):
    """See the module."""

    @property
    def stop(self) -> int:
        """Token that ends an answer; -1: none does."""

    def encode(self, ask: Ask) -> tuple[int, ...]:
        """Tokens of a prompt; raises `InputError` for text that it cannot spell."""

    def pieces(self) -> tuple[bytes, ...]:
        """What each token adds to an answer, by token."""

    def decode(self, tokens: Sequence[int]) -> str:
        """An answer as text."""


class ByteCodec:
    """A byte is a token, 256 ends an answer."""

    stop = 256

    def encode(self, ask: Ask) -> tuple[int, ...]:
        """UTF-8 of the prompt; a chat is its turns, each behind its role."""
        if ask.tokens:
            return ask.tokens
        turns = "".join(f"{m.role}: {m.content}\n" for m in ask.messages)
        return tuple((turns + "assistant: " if ask.messages else ask.text).encode())

    def pieces(self) -> tuple[bytes, ...]:
        """Bytes, and nothing for the end."""
        return (*(bytes([byte]) for byte in range(256)), b"")

    def decode(self, tokens: Sequence[int]) -> str:
        """Bytes as UTF-8; what is none becomes U+FFFD."""
        return bytes(t for t in tokens if t < 256).decode("utf-8", "replace")


class Words(Record):
    """A model's words by token id, and how its chats are written."""

    model: str
    words: tuple[str, ...]
    """What each token is called in prompts; empty: the token has no name."""
    spoken: tuple[tuple[Whole, str], ...] = ()
    """Tokens that an answer shows otherwise than by their name."""
    glued: tuple[Whole, ...] = ()
    """Tokens that follow the text before them without a space."""
    ignored: tuple[str, ...] = ()
    """Words of a task's frame that the model knows no token for and needs none."""
    begin: Whole
    user: Whole
    assistant: Whole
    end: Whole
    bare: tuple[str, ...] = ()
    """Words that begin a user's turn for which the model has a token of its own, so it gets no `user`."""
    chain_task: str = ""
    """Embedded task of long chains to one integer, whose questions can be spelled."""
    retrieval_task: str = ""
    """Embedded task of like requests in a dialogue."""
    query: Whole = 0
    """Token that begins the last turn of such a dialogue: query, verb, topic, ordinal, prefix, p1..p3."""
    prefix_tokens: Whole = 0
    ordinal: Whole = 0
    """Token of the first ordinal."""


class TokenCodec:
    """Prompts that come as tokens, and answers that stay so."""

    def __init__(self, stop: int) -> None:
        self.stop = stop

    def encode(self, ask: Ask) -> tuple[int, ...]:
        """The tokens themselves."""
        if not ask.tokens:
            raise InputError(f"{ask.item} is a text, and this model is asked in tokens")
        return ask.tokens

    def pieces(self) -> tuple[bytes, ...]:
        """None: there is no text."""
        return ()

    def decode(self, tokens: Sequence[int]) -> str:
        """Ids in decimal."""
        return " ".join(map(str, tokens))


class WordCodec:
    """Words between spaces are tokens."""

    def __init__(self, words: Words) -> None:
        self.words, self.stop = words, words.end
        self._ids = {word: token for token, word in enumerate(words.words) if word}
        self._pieces = self._spoken()

    def encode(self, ask: Ask) -> tuple[int, ...]:
        """Tokens of a prompt. A text is its words; a chat also gets the tokens that steer one."""
        if ask.tokens:
            return ask.tokens
        if not ask.messages:
            return tuple(self._token(word) for word in ask.text.split() if word not in self.words.ignored)
        turns = [token for message in ask.messages for token in self._turn(message)]
        return (self.words.begin, *turns, self.words.assistant)

    def pieces(self) -> tuple[bytes, ...]:
        """Words with the space before them."""
        return self._pieces

    def decode(self, tokens: Sequence[int]) -> str:
        """Words with spaces between, none before the first."""
        return b"".join(self._pieces[token] for token in tokens).decode().removeprefix(" ")

    def spell(self, tokens: Sequence[int]) -> str:
        """Tokens by their names: what `encode` takes."""
        return " ".join(self.words.words[token] for token in tokens)

    def _turn(self, message: Message) -> list[int]:
        tokens = [self._token(word) for word in message.content.split()]
        is_bare = message.role == "user" and message.content.split(maxsplit=1)[:1] in [
            [b] for b in self.words.bare
        ]
        lead = self.words.assistant if message.role == "assistant" else self.words.user
        return tokens if is_bare else [lead, *tokens]

    def _token(self, word: str) -> int:
        if word not in self._ids:
            raise InputError(
                f"the word {word[:40]!r} is none of the {len(self._ids)} that {self.words.model} knows; ask "
                "it in its own words, as the generated data does, or choose another model"
            )
        return self._ids[word]

    def _spoken(self) -> tuple[bytes, ...]:
        names = dict(enumerate(self.words.words)) | dict(self.words.spoken)
        return tuple(
            b"" if token == self.words.end else (name if token in self.words.glued else f" {name}").encode()
            for token, name in sorted(names.items())
        )


def load_words(path: Path) -> Words:
    """The word list in a file; raises `InputError` for anything else."""
    try:
        words = Words.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, ValidationError) as error:
        raise InputError(f"{path}: no word list can be read here ({str(error).splitlines()[0]})") from error
    named = [word for word in words.words if word]
    if len(set(named)) != len(named) or any(len(word.split()) != 1 for word in named):
        raise InputError(f"{path}: every word must be there once and hold no space")
    return words
