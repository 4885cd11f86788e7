"""Ask an OpenAI-compatible server as the evals ask: a request is an `Ask`, an answer a `Reply`.

Standard library only, so that a bare worker can ask. A request that failed is a reply that says how: refused
by the server (4xx), or never answered (connection, time, 5xx). Nothing is asked twice.
"""

import hashlib
import http.client
import json
import math
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from harness.domain.errors import ServiceError
from harness.engines.serving import Ask, Finish, Reply

__all__ = ["MALFORMED", "Answer", "Client", "HttpError"]

TOKEN_PREFIX = "token_id:"
CHUNK_BYTES, MOST_BYTES = 1 << 16, 64 << 20
MALFORMED = (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError, OverflowError)
"""What reading an answer raises that has not the form of one."""
SAID = 300
"""Characters of a server's words that are quoted."""
SAMPLING: Mapping[str, Any] = {
    "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "return_token_ids": True,
    "return_tokens_as_token_ids": True,
}  # fmt: skip
"""Said out loud, as a model's own generation settings would else change the distribution."""


class HttpError(ServiceError):
    """An answer other than 200; `status` says which."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class Answer(NamedTuple):
    """A reply, and the server's name of the request; empty where it failed."""

    reply: Reply
    request: str


@dataclass(frozen=True, slots=True)
class Client:
    """One server. Safe to use from several threads: every request has a connection of its own."""

    url: str
    model: str
    key: str = ""
    limit_s: float = 900.0
    top_logprobs: int = 5
    salt: str = ""
    """Prefixes are shared among requests of one salt only."""

    def get(self, path: str, limit_s: float = 10.0) -> str:
        """Body of a GET; raises `HttpError` or `ServiceError`."""
        return self._request("GET", path, None, limit_s)

    def post(self, path: str, body: Mapping[str, Any], limit_s: float | None = None) -> Any:
        """JSON answer of a POST; raises `HttpError` or `ServiceError`."""
        text = self._request("POST", path, json.dumps(body), limit_s or self.limit_s)
        try:
            return json.loads(text) if text else {}
        except (ValueError, RecursionError) as error:
            raise ServiceError(f"{self.url}{path} answered with no JSON: {text[:SAID]!r}") from error

    def answer(self, ask: Ask) -> "Answer":
        """The reply to one request; never raises for what a server did."""
        is_chat = bool(ask.messages)
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        try:
            said = self.post(path, self._body(ask, is_chat))
        except HttpError as error:
            return _failed(ask, "refusal" if 400 <= error.status < 500 else "transport", str(error))
        except ServiceError as error:
            return _failed(ask, "transport", str(error))
        try:
            return self._reply(ask, said, is_chat)
        except MALFORMED as error:
            return _failed(ask, "transport", f"the answer has not the form of an answer: {error!r}")

    def tokens_of(self, text: str) -> tuple[int, ...]:
        """A text in the server's tokens; raises `ServiceError`."""
        said = self.post("/tokenize", {"model": self.model, "prompt": text, "add_special_tokens": False})
        try:
            return tuple(int(token) for token in said["tokens"])
        except MALFORMED as error:
            raise ServiceError(f"{self.url}/tokenize answers without tokens: {str(said)[:SAID]}") from error

    def stated(self, prompt: Sequence[int], answer: Sequence[int]) -> list[tuple[tuple[int, float], ...]]:
        """For each token of an answer that some server gave: the likeliest tokens there by this one, and
        their log-probabilities. vLLM tells the given one too, wherever it stands; it is left out where it is
        not among them, as what lies between is not told. Raises `ServiceError`.
        """
        body = {
            "model": self.model, "prompt": [*prompt, *answer], "max_tokens": 1, "temperature": 0,
            "prompt_logprobs": self.top_logprobs,
        }  # fmt: skip
        said = self.post("/v1/completions", body)
        try:
            rows = said["choices"][0]["prompt_logprobs"][len(prompt) :]
            told = [{int(token): float(fields["logprob"]) for token, fields in row.items()} for row in rows]
        except MALFORMED as error:
            raise ServiceError(
                f"{self.url} states no log-probabilities of a prompt: {str(said)[:SAID]}"
            ) from error
        if len(told) != len(answer) or not all(math.isfinite(v) for row in told for v in row.values()):
            raise ServiceError(
                f"{self.url} states log-probabilities of {len(told)} of {len(answer)} tokens, or some that "
                "are not finite"
            )
        ranked = (sorted(row.items(), key=lambda pair: (-pair[1], pair[0])) for row in told)
        return [tuple(row[: self.top_logprobs]) for row in ranked]

    def _body(self, ask: Ask, is_chat: bool) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model, "max_tokens": ask.max_tokens, "temperature": float(ask.temperature),
            "seed": _seed(ask), **SAMPLING,
        }  # fmt: skip
        if is_chat:
            body["messages"] = [message.model_dump() for message in ask.messages]
            body["logprobs"], body["top_logprobs"] = True, self.top_logprobs
        else:
            body["prompt"] = list(ask.tokens) if ask.tokens else ask.text
            body["logprobs"] = self.top_logprobs
        if self.salt:
            body["cache_salt"] = self.salt
        if ask.stop:
            body["stop"] = list(ask.stop)
        if ask.answer_schema:
            schema = {"name": "answer", "schema": json.loads(ask.answer_schema)}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return body

    def _reply(self, ask: Ask, said: Any, is_chat: bool) -> "Answer":
        if said["model"] != self.model:
            return _failed(ask, "transport", f"answered as model {said['model']!r}, not {self.model!r}")
        choice = said["choices"][0]
        text = (choice["message"]["content"] or "") if is_chat else choice["text"]
        places = _chat_places(choice) if is_chat else _plain_places(choice)
        tokens = tuple(choice.get("token_ids") or (token for token, _ in places))
        is_finite = all(math.isfinite(value) for _, told in places for _, value in told)
        finish: Finish = "stop" if choice["finish_reason"] == "stop" else "length"
        if choice["finish_reason"] not in ("stop", "length"):
            detail = f"ended with {choice['finish_reason']!r}"
            return _failed(ask, "transport", detail)
        if not is_finite:
            return _failed(ask, "error", "a log-probability was not finite")
        reply = Reply(
            item=ask.item, repeat=ask.repeat, text=text, tokens=tokens, finish=finish,
            prompt_tokens=int(said["usage"]["prompt_tokens"]),
            likeliest=tuple(told for _, told in places) if len(places) == len(tokens) else (),
        )  # fmt: skip
        return Answer(reply, str(said["id"]))

    def _request(self, method: str, path: str, body: str | None, limit_s: float) -> str:
        place = urlsplit(self.url)
        kind = http.client.HTTPSConnection if place.scheme == "https" else http.client.HTTPConnection
        connection = kind(place.hostname or "", place.port, timeout=limit_s)
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        deadline = time.monotonic() + limit_s
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            text = _body_of(answer, connection, deadline).decode("utf-8", "replace")
        except socket.timeout as error:  # noqa: UP041  (the name that http.client documents)
            raise ServiceError(f"{self.url}{path} did not answer within {limit_s:.0f} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise ServiceError(
                f"{self.url}{path} cannot be asked: {error or type(error).__name__}"
            ) from error
        finally:
            connection.close()
        if answer.status != http.client.OK:
            raise HttpError(answer.status, f"{self.url}{path} answered {answer.status}: {text[:SAID]}")
        return text


def _body_of(
    answer: http.client.HTTPResponse, connection: http.client.HTTPConnection, deadline: float
) -> bytes:
    """The whole body by the deadline: a socket's own limit starts anew with every byte that drips in."""
    parts, size = list[bytes](), 0
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        if connection.sock is not None:
            connection.sock.settimeout(left)
        part = answer.read1(CHUNK_BYTES)
        if not part:
            return b"".join(parts)
        parts.append(part)
        size += len(part)
        if size > MOST_BYTES:
            raise http.client.HTTPException(f"more than {MOST_BYTES >> 20} MiB")


Place = tuple[int, tuple[tuple[int, float], ...]]
"""A generated token, and the likeliest ones with it among them."""


def _plain_places(choice: Mapping[str, Any]) -> list[Place]:
    told = choice.get("logprobs") or {}
    rows = zip(
        told.get("tokens", ()), told.get("token_logprobs", ()), told.get("top_logprobs", ()), strict=True
    )
    return [_place(token, value, (likely or {}).items()) for token, value, likely in rows]


def _chat_places(choice: Mapping[str, Any]) -> list[Place]:
    told = (choice.get("logprobs") or {}).get("content") or ()
    return [
        _place(
            row["token"], row["logprob"], ((t["token"], t["logprob"]) for t in row.get("top_logprobs", ()))
        )
        for row in told
    ]


def _place(token: str, value: float, likely: Any) -> Place:
    own = _token(token)
    known = {_token(other): float(other_value) for other, other_value in likely}
    known[own] = float(value)
    return own, tuple(sorted(known.items(), key=lambda pair: (-pair[1], pair[0])))


def _token(text: str) -> int:
    if not text.startswith(TOKEN_PREFIX):
        raise ValueError(f"{text[:40]!r} is no token id, though ids were asked for")
    return int(text.removeprefix(TOKEN_PREFIX))


def _failed(ask: Ask, finish: Finish, detail: str) -> Answer:
    reply = Reply(
        item=ask.item, repeat=ask.repeat, text="", tokens=(), finish=finish, detail=detail[:1000],
        prompt_tokens=0,
    )  # fmt: skip
    return Answer(reply, "")


def _seed(ask: Ask) -> int:
    """One number an answer, the same for every arm."""
    key = f"{ask.seed}:{ask.item}:{ask.repeat}".encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:4]) >> 1
