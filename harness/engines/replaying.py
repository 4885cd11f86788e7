"""Replay a trace against a server and say what each user got: tokens a second, at the median and at P90.

`vllm bench serve` cannot do this: its traces are open loops, whose requests come by the clock, and an agent's
next turn waits for the last answer and its tool. So this is a load generator of ours, and a small one: a
thread a request, standard library only, times as a client in the same machine sees them. It is fit for
comparing two servers under equal traffic; for throughput at scale use vLLM's own. A request that fails, or
that never could be asked as one before it failed, stays in the record and makes the run INVALID.
"""

import http.client
import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from harness.domain.record import Number, Record, Whole
from harness.engines.traces import Trace, TraceRequest

__all__ = ["Asked", "Interactivity", "ReplayedRequest", "asker_of", "interactivity", "replay"]

SAID = 300
MAX_LINE = 1 << 20
MALFORMED = (
    OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError,
    http.client.HTTPException,
)  # fmt: skip
"""What reading an answer of any form can raise."""


class Asked(NamedTuple):
    """How one request went, on the client's clock."""

    ttft_s: float
    decode_s: float
    """From the first tokens to the last."""
    output_tokens: int
    first_tokens: int = 1
    """That came at once at first: a server that is ahead of its client sends them in lumps."""


class ReplayedRequest(Record):
    """One request of a trace, and what became of it."""

    id: str
    user: str
    prompt_tokens: Whole
    output_tokens: Whole = 0
    ttft_ms: Number | None = None
    tpot_us: Number | None = None
    """Mean time a token after the first ones; None where all came at once."""
    latency_ms: Number | None = None
    """From asking to the last token."""
    failure: str = ""


class Interactivity(Record):
    """Tokens a second of each user's own answers."""

    p50: Number
    p90: Number
    """What nine in ten users get at least."""
    ttft_p50_ms: Number
    """To the first tokens: a server may hold them back, so the whole answer's time stands beside it."""
    ttft_p90_ms: Number
    latency_p50_ms: Number
    latency_p90_ms: Number
    users: Whole


Asker = Callable[[Sequence[int], int], Asked]
"""Sends a prompt, waits for so many tokens; raises `OSError` or `ValueError` where that goes wrong."""


def replay(trace: Trace, prompts: Mapping[str, Sequence[int]], ask: Asker) -> tuple[ReplayedRequest, ...]:
    """Every request, in the trace's order, once those it waits for are answered."""
    done = {request.id: threading.Event() for request in trace.requests}
    failed: set[str] = set()

    def run(request: TraceRequest) -> ReplayedRequest:
        try:
            for name in request.after:
                done[name].wait()
            found = _one(request, prompts[request.id], ask, failed)
            if found.failure:
                failed.add(request.id)
            return found
        finally:
            done[request.id].set()

    with ThreadPoolExecutor(len(trace.requests)) as pool:
        return tuple(pool.map(run, trace.requests))


def interactivity(found: Sequence[ReplayedRequest]) -> Interactivity | None:
    """P50 and P90 over users; None where any request failed or was not streamed, as those left would be the
    lucky ones.
    """
    if any(one.failure or one.tpot_us is None for one in found):
        return None
    by_user: dict[str, list[tuple[int, float]]] = {}
    for one in found:
        after_first = one.output_tokens - 1
        by_user.setdefault(one.user, []).append((after_first, float(one.tpot_us or 0.0) * after_first))
    rates = [1e6 * sum(n for n, _ in rows) / sum(us for _, us in rows) for rows in by_user.values()]
    waits = [float(one.ttft_ms or 0.0) for one in found]
    whole = [float(one.latency_ms or 0.0) for one in found]
    return Interactivity(
        p50=_rank(rates, 0.5), p90=_rank(rates, 0.1), ttft_p50_ms=_rank(waits, 0.5),
        ttft_p90_ms=_rank(waits, 0.9), latency_p50_ms=_rank(whole, 0.5), latency_p90_ms=_rank(whole, 0.9),
        users=len(by_user),
    )  # fmt: skip


def asker_of(url: str, model: str, key: str, limit_s: float, salt: str = "") -> Asker:
    """An asker of an OpenAI-compatible server, which streams; prefixes are found again within one salt."""

    def ask(prompt: Sequence[int], count: int) -> Asked:
        body = {
            "model": model, "prompt": list(prompt), "max_tokens": count, "min_tokens": count,
            "ignore_eos": True, "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
            "return_token_ids": True, **({"cache_salt": salt} if salt else {}),
        }  # fmt: skip
        begun = time.perf_counter()
        arrivals, told = list[tuple[float, int]](), 0
        for event in _events(url, body, key, limit_s):
            if choices := event.get("choices"):
                tokens = choices[0].get("token_ids")
                arrivals.append((time.perf_counter(), 1 if tokens is None else len(tokens)))
            usage = event.get("usage")
            told = int(usage["completion_tokens"]) if usage else told
        if told != count or not arrivals:
            raise ValueError(f"{told} tokens came back, and {count} were asked")
        if sum(tokens for _, tokens in arrivals) != told:
            raise ValueError(
                f"{told} tokens came in {len(arrivals)} lumps that do not say how many they hold"
            )
        (first, first_tokens), (last, _) = arrivals[0], [a for a in arrivals if a[1]][-1]
        return Asked(first - begun, last - first, told, first_tokens)

    return ask


def _one(request: TraceRequest, prompt: Sequence[int], ask: Asker, failed: set[str]) -> ReplayedRequest:
    known: dict[str, Any] = {"id": request.id, "user": request.user, "prompt_tokens": len(prompt)}
    if lost := sorted(failed.intersection(request.after)):
        return ReplayedRequest(**known, failure=f"never asked: {lost[0]} failed before it")
    time.sleep(float(request.pause_s))
    try:
        went = ask(prompt, request.output_tokens)
    except MALFORMED as error:
        return ReplayedRequest(**known, failure=str(error)[:SAID] or type(error).__name__)
    later = went.output_tokens - went.first_tokens
    tpot_us = went.decode_s * 1e6 / later if later > 0 and went.decode_s > 0 else None
    return ReplayedRequest(
        **known, output_tokens=went.output_tokens, ttft_ms=went.ttft_s * 1e3, tpot_us=tpot_us,
        latency_ms=(went.ttft_s + went.decode_s) * 1e3,
    )  # fmt: skip


def _events(url: str, body: Mapping[str, Any], key: str, limit_s: float) -> Iterator[dict[str, Any]]:
    """Server-sent events of one completion, as they arrive."""
    place = urlsplit(url)
    kind = http.client.HTTPSConnection if place.scheme == "https" else http.client.HTTPConnection
    connection = kind(place.hostname or "", place.port, timeout=limit_s)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    deadline = time.monotonic() + limit_s
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            raise ValueError(f"answered {answer.status}: {answer.read(SAID).decode('utf-8', 'replace')}")
        for line in _lines(connection, answer, deadline):
            data = line.strip().removeprefix(b"data:").strip()
            if data and data != b"[DONE]":
                event = json.loads(data)
                if not isinstance(event, dict):
                    raise ValueError("an event that is none")
                yield event
    finally:
        connection.close()


def _lines(
    connection: http.client.HTTPConnection, answer: http.client.HTTPResponse, deadline: float
) -> Iterator[bytes]:
    """Lines of an answer as they arrive; a server that drips does not outlast the deadline."""
    rest = b""
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no whole answer in time")
        if connection.sock is not None:
            connection.sock.settimeout(left)
        part = answer.read1(1 << 16)
        *lines, rest = (rest + part).split(b"\n")
        yield from lines
        if not part:
            yield rest
            return
        if len(rest) > MAX_LINE:
            raise ValueError(f"a line of more than {MAX_LINE} bytes")


def _rank(values: Sequence[float], share: float) -> float:
    """The value at a share of the way up, by nearest rank."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
