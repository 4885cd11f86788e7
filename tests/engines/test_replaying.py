"""A trace of turns, pauses and branches against a streaming server: order, interactivity, and what failed."""

import json
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from harness.domain.errors import InputError
from harness.engines.replaying import Asked, ReplayedRequest, asker_of, interactivity, replay
from harness.engines.traces import Trace, TraceRequest, draw_trace, load_trace, prompts_of

STEP_S = 0.004


class Streaming(BaseHTTPRequestHandler):
    """Streams as many tokens as asked; a prompt that begins with 13 is answered short, with 14 not at all."""

    def log_message(self, *_: Any) -> None: ...

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        count = body["max_tokens"] - (body["prompt"][0] == 13)
        if body["prompt"][0] == 14:
            self.send_error(503, "overloaded")
            return
        self.send_response(200)
        self.end_headers()
        if body["prompt"][0] == 15:  # four at once, without and with saying so
            self.event({"choices": [{"text": "x" * 4}]})
            count -= 4
        if body["prompt"][0] == 16:
            self.event({"choices": [{"text": "x" * 4, "token_ids": [7] * 4}]})
            count -= 4
        for _ in range(count):
            time.sleep(STEP_S)
            self.event({"choices": [{"text": "x"}]})
        count += 4 * (body["prompt"][0] in (15, 16))
        self.event({"choices": [], "usage": {"completion_tokens": count}})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, value: Any) -> None:
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Streaming)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def _request(name: str, *after: str, user: str = "u", **fields: Any) -> TraceRequest:
    known = {"id": name, "user": user, "after": after, "new_tokens": 4, "output_tokens": 5}
    return TraceRequest.model_validate(known | fields)


def test_a_drawn_trace_has_shared_prefixes_pauses_and_branches_that_the_next_turn_waits_for() -> None:
    trace = draw_trace(users=2, turns=3, branches=2)
    assert [r.id for r in trace.requests if r.user == "user0"] == [
        "user0.0", "user0.1.0", "user0.1.1", "user0.2",
    ]  # fmt: skip
    last = trace.requests[3]
    assert (last.after, last.parent, last.pause_s) == (("user0.1.0", "user0.1.1"), "user0.1.0", 0.1)
    prompts = prompts_of(trace, 1000, seed=1)
    assert prompts["user0.0"][:192] == prompts["user1.0"][:192]
    assert prompts["user0.0"][192:] != prompts["user1.0"][192:]
    assert prompts["user0.1.0"][:216] == prompts["user0.1.1"][:216] == prompts["user0.0"]
    assert len(prompts["user0.2"]) == 216 + 16 + 24 + 16 + 24


def test_a_turn_begins_when_all_it_waits_for_are_answered_and_branches_run_side_by_side() -> None:
    seen: list[tuple[str, int]] = []

    def ask(prompt: Sequence[int], count: int) -> Asked:
        seen.append(("begin", prompt[0]))
        time.sleep(0.03)
        seen.append(("end", prompt[0]))
        return Asked(0.01, 0.02, count)

    trace = Trace(requests=(
        _request("a"), _request("b", "a", parent="a"), _request("c", "a", parent="a"),
        _request("d", "b", "c", parent="b"),
    ))  # fmt: skip
    prompts = {name: (place,) for place, name in enumerate("abcd")}
    found = replay(trace, prompts, ask)
    assert [one.failure for one in found] == [""] * 4
    assert seen[:2] == [("begin", 0), ("end", 0)]
    assert {word for word, _ in seen[2:4]} == {"begin"}
    assert seen[6:] == [("begin", 3), ("end", 3)]


def test_a_streaming_server_is_timed_token_by_token(url: str) -> None:
    went = asker_of(url, "m", "", 10.0)([1, 2, 3], 6)
    assert went.output_tokens == 6
    assert went.ttft_s >= STEP_S
    assert went.decode_s >= 5 * STEP_S


def test_tokens_that_come_in_lumps_are_counted_as_the_server_says(url: str) -> None:
    went = asker_of(url, "m", "", 10.0)([16, 2, 3], 10)
    assert (went.output_tokens, went.first_tokens) == (10, 4)
    assert went.decode_s >= 6 * STEP_S


def test_an_answer_that_came_at_once_counts_and_tells_no_interactivity(url: str) -> None:
    trace = Trace(requests=(_request("a", output_tokens=4), _request("b")))
    found = replay(trace, {"a": (16,), "b": (1,)}, asker_of(url, "m", "", 10.0))
    assert (found[0].failure, found[0].tpot_us, found[0].output_tokens) == ("", None, 4)
    assert found[0].latency_ms is not None
    assert interactivity(found) is None
    assert interactivity(found[1:]) is not None


def test_lumps_that_do_not_say_how_many_tokens_they_hold_time_nothing(url: str) -> None:
    with pytest.raises(ValueError, match="10 tokens came in 7 lumps"):
        asker_of(url, "m", "", 10.0)([15, 2, 3], 10)


@pytest.mark.parametrize(
    ("first", "words"), [(13, "4 tokens came back, and 5 were asked"), (14, "answered 503")]
)
def test_a_request_that_fails_stays_with_its_reason_and_ends_the_users_chain(
    url: str, first: int, words: str
) -> None:
    trace = Trace(requests=(_request("a"), _request("b", "a", parent="a"), _request("c", user="v")))
    prompts = {"a": (first,), "b": (1,), "c": (1,)}
    found = replay(trace, prompts, asker_of(url, "m", "", 10.0))
    assert found[0].failure.startswith(words)
    assert found[1].failure == "never asked: a failed before it"
    assert found[2].failure == ""
    assert interactivity(found) is None


def _went(user: str, tpot_us: float, tokens: int = 11) -> ReplayedRequest:
    return ReplayedRequest(
        id=f"{user}.{tpot_us}",
        user=user,
        prompt_tokens=1,
        output_tokens=tokens,
        ttft_ms=5,
        tpot_us=tpot_us,
        latency_ms=9,
    )


def test_interactivity_is_what_each_user_got_over_all_turns_and_p90_what_nine_in_ten_get() -> None:
    """User 0: 10 tokens in 10 ms and 30 in 60 ms: 571 a second; users 1 to 9: 100 to 900."""
    found = [_went("user0", 1000.0), _went("user0", 2000.0, tokens=31)]
    found += [_went(f"user{n}", 1e6 / (100 * n)) for n in range(1, 10)]
    got = interactivity(found)
    assert got is not None
    assert (round(float(got.p50)), round(float(got.p90)), got.users) == (500, 100, 10)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ('{"id": "a", "user": "u", "new_tokens": 1, "output_tokens": 2, "after": ["b"]}', "not above it"),
        ('{"id": "a", "user": "u", "new_tokens": 1, "output_tokens": 1}', "greater than or equal to 2"),
        ("{", "no trace can be read here"),
    ],
)
def test_a_users_trace_that_is_wrong_is_told_in_words(tmp_path: Path, lines: str, words: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(lines)
    with pytest.raises(InputError, match=words):
        load_trace(path)


def test_a_users_trace_is_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"id": "a", "user": "u", "new_tokens": 9, "output_tokens": 2}\n\n'
        '{"id": "b", "user": "u", "after": ["a"], "parent": "a", "pause_s": 1.5, "new_tokens": 3, '
        '"output_tokens": 4}\n'
    )
    assert [r.id for r in load_trace(path).requests] == ["a", "b"]
