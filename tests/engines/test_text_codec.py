"""Text to tokens and back."""

import json
from pathlib import Path

import pytest

from harness.domain.errors import InputError
from harness.engines.serving import Ask, Message
from harness.engines.text_codec import ByteCodec, TokenCodec, WordCodec, Words, load_words

WORDS = Words(
    model="toy", words=("BEGIN", "USER", "BOT", "END", "ASK", "", "one", "two", "digit3"), spoken=((8, "3"),),
    glued=(8,), ignored=("Question:",), begin=0, user=1, assistant=2, end=3, bare=("ASK",),
)  # fmt: skip


def test_bytes_go_there_and_back() -> None:
    codec = ByteCodec()
    tokens = codec.encode(Ask(item="x", text="é🙂", max_tokens=1))
    assert tokens == (0xC3, 0xA9, 0xF0, 0x9F, 0x99, 0x82)
    assert codec.decode((*tokens, codec.stop)) == "é🙂"
    assert b"".join(codec.pieces()[t] for t in tokens).decode() == "é🙂"


def test_a_chat_gets_the_tokens_that_steer_it() -> None:
    turns = (("user", "one"), ("assistant", "two one"), ("user", "ASK two"))
    messages = tuple(Message.model_validate({"role": role, "content": text}) for role, text in turns)
    tokens = WordCodec(WORDS).encode(Ask(item="x", messages=messages, max_tokens=1))
    assert tokens == (0, 1, 6, 2, 7, 6, 4, 7, 2)


def test_a_text_is_its_words_without_the_frame_that_the_model_does_not_know() -> None:
    assert WordCodec(WORDS).encode(Ask(item="x", text="Question: one  two\n", max_tokens=1)) == (6, 7)


def test_an_answer_is_words_with_spaces_but_where_a_token_is_glued_to_the_last() -> None:
    assert WordCodec(WORDS).decode((6, 7, 8, 8, 3)) == "one two33"


def test_a_word_that_the_list_lacks_is_an_error_that_names_it() -> None:
    with pytest.raises(InputError, match="'tapirs' is none of the 8 that toy knows"):
        WordCodec(WORDS).encode(Ask(item="x", text="one tapirs", max_tokens=1))


def test_tokens_stay_tokens_and_a_text_is_none() -> None:
    codec = TokenCodec(9)
    assert codec.encode(Ask(item="x", tokens=(4, 5), max_tokens=1)) == (4, 5)
    assert codec.decode((4, 5)) == "4 5"
    with pytest.raises(InputError, match="x is a text"):
        codec.encode(Ask(item="x", text="one", max_tokens=1))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"words": ["one", "one"]}, "there once"),
        ({"words": ["one two"]}, "there once"),
        ({"begin": "x"}, "no word list"),
    ],
)
def test_a_list_that_is_none_is_refused(changed: dict[str, object], words: str, tmp_path: Path) -> None:
    path = tmp_path / "words.json"
    path.write_text(json.dumps({**WORDS.model_dump(mode="json"), **changed}))
    with pytest.raises(InputError, match=words):
        load_words(path)
