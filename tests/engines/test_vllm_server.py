"""Servers that come up, do not, die, or lie: each told in words."""

import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from math import exp
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from harness.domain.errors import InputError, ServiceError
from harness.engines.served import ServedArm, ServerSettings, load_settings
from harness.engines.server_process import ServerProcess, free_port, why_it_ended
from harness.engines.serving import Ask, Message, Reply, StepTotal
from harness.engines.vllm_server import ServerArm, VllmServer
from harness.measure.goodness import Draw

FAKE = Path(__file__).parents[1] / "fakes" / "model_server.py"
PROGRAM = (sys.executable, str(FAKE))


def settings(tmp_path: Path, *ways: str, **more: object) -> ServerSettings:
    """Stock behaves well; the optimised arm as `ways` say."""
    arguments = tuple(f"--behave={way}" for way in ways) or ("--switch=on",)
    fields: dict[str, object] = {
        "model": str(tmp_path), "served_name": "fake", "program": PROGRAM, "start_limit_s": 20,
        "optimised": ServedArm(arguments=arguments),
    }  # fmt: skip
    return ServerSettings.model_validate(fields | more)


def questions(count: int, words: str = "one two three") -> tuple[Ask, ...]:
    return tuple(Ask(item=f"q{n}", text=words, max_tokens=8) for n in range(count))


@contextmanager
def opened(tmp_path: Path, *ways: str, arm: str = "optimised", **more: Any) -> Iterator[ServerArm]:
    engine = VllmServer(settings(tmp_path, *ways, **more), tmp_path, tmp_path / "run")
    with closing(engine), engine.open(arm) as server:
        yield server


def lost(tmp_path: Path, *ways: str, **more: Any) -> Reply:
    """The reply of an optimised arm that is in trouble."""
    with opened(tmp_path, *ways, **more) as server:
        (reply,) = server.answer(questions(1))
    assert reply.finish == "transport"
    return reply


def test_an_answer_carries_text_tokens_and_what_was_likely(tmp_path: Path) -> None:
    with opened(tmp_path) as server:
        plain, chat = server.answer(
            (
                Ask(item="a", text="one four", max_tokens=9),
                Ask(item="b", messages=(Message(role="user", content="x y"),), max_tokens=1),
            )
        )
    assert (plain.text, plain.tokens, plain.finish, plain.prompt_tokens) == (" one four", (4, 5), "stop", 2)
    assert plain.likeliest == (((4, -0.25), (0, -3.0)), ((5, -0.25), (0, -3.0)))
    assert (chat.text, chat.tokens, chat.finish) == (" x", (2,), "length")


def test_counters_and_the_reached_batch_are_read_from_metrics(tmp_path: Path) -> None:
    with opened(tmp_path, "slow") as server:
        server.answer(questions(3))
        assert server.counters()["prefix_queries"] == 9
        assert server.counters()["generated_tokens"] == 9
        assert server.ledger() == {StepTotal("decode", "stock", "not_observed", 3): 9}


def test_the_arms_command_lines_differ_in_the_switch_alone(tmp_path: Path) -> None:
    engine = VllmServer(settings(tmp_path, common=("--max-num-seqs=4",)), tmp_path, tmp_path)
    commands = [dict(engine.description(arm))["command"].split() for arm in engine.arms]
    assert [word for word in commands[1] if word not in commands[0]] == ["--switch=on"]
    assert dict(engine.description("optimised"))["switch"] == "--switch=on"


def test_a_description_says_version_metrics_and_no_folder(tmp_path: Path) -> None:
    engine = VllmServer(settings(tmp_path), tmp_path, tmp_path / "run")
    with closing(engine), engine.open("stock") as server:
        server.answer(questions(1))
    told = dict(engine.description("stock"))
    assert told["version"] == "0.32.0"
    assert json.loads(told["metrics_before"])["vllm:generation_tokens_total"] == 0.0
    assert json.loads(told["metrics_after"])["vllm:generation_tokens_total"] == 3.0
    assert str(tmp_path) not in json.dumps(told)


def test_a_server_that_starts_slowly_is_waited_for(tmp_path: Path) -> None:
    with opened(tmp_path, "late") as server:
        assert server.answer(questions(1))[0].finish == "stop"


def test_a_server_that_never_gets_ready_is_ended_at_the_deadline(tmp_path: Path) -> None:
    assert "not ready within 1 s" in lost(tmp_path, "never", start_limit_s=1).detail


def test_a_server_that_hangs_after_it_said_why_is_told_with_the_cause(tmp_path: Path) -> None:
    script = "import time; print('RuntimeError: CUDA out of memory', flush=True); time.sleep(60)"
    server = ServerProcess((sys.executable, "-c", script), {}, tmp_path / "log", free_port())
    with server, pytest.raises(ServiceError, match="it says why: it ran out of memory"):
        server.wait_until(lambda: False, 1.0)


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("out_of_memory", "ran out of memory: serve a shorter context"),
        ("killed", "SIGKILL; something killed it from outside, mostly the kernel for want of memory"),
        ("port_taken", "its port is in use"),
        ("no_model", "does not find the model"),
        ("bad_argument", "does not know one of its arguments"),
        ("other_model", "serves someone-else, and not fake"),
        ("other_root", "says that it serves /another/folder"),
    ],
)
def test_an_optimised_arm_that_does_not_come_up_says_why(tmp_path: Path, way: str, words: str) -> None:
    assert words in lost(tmp_path, way).detail


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (
            "HFValidationError: Repo id must be in the form 'repo_name': '/no/such/model'.",
            "not find the model",
        ),
        ("LocalEntryNotFoundError: cannot find the requested files in the local cache", "not find the model"),
        ("RuntimeError: Failed to infer device type", "cannot run on this machine"),
        ("ValueError: No available memory for the cache blocks", "ran out of memory"),
        ("Available memory on kv cache allocation is less than requested memory for kv", "ran out of memory"),
    ],
)
def test_what_real_servers_wrote_last_names_its_cause(line: str, cause: str) -> None:
    assert cause in why_it_ended(1, f"Traceback (most recent call last):\n{line}").split("Its last words")[0]


def test_a_stock_arm_that_does_not_come_up_is_an_error_of_the_service(tmp_path: Path) -> None:
    broken = ServedArm(arguments=("--behave=out_of_memory",))
    with pytest.raises(ServiceError, match="ran out of memory"), opened(tmp_path, arm="stock", stock=broken):
        pass


def test_a_server_that_dies_in_mid_run_loses_its_answers_and_says_how(tmp_path: Path) -> None:
    with opened(tmp_path, "crash") as server:
        assert server.answer(questions(1))[0].finish == "stop"
        (reply,) = server.answer(questions(1))
        (later,) = server.answer(questions(1))
    assert "died in mid-run" in reply.detail
    assert reply.finish == later.finish == "transport"
    assert "died in mid-run: SIGSEGV" in later.detail
    assert "illegal memory access" in later.detail


def test_a_port_in_use_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port} is in use"), opened(tmp_path, port=port):
            pass


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "no-such-program cannot be started" in lost(tmp_path, program=("no-such-program",)).detail


def test_a_server_that_wants_a_key_gets_the_one_in_the_file(tmp_path: Path) -> None:
    assert "wants a key (401); put it into a file" in lost(tmp_path, "key").detail
    key = tmp_path / "key"
    key.write_text("open sesame\n", encoding="utf-8")
    with opened(tmp_path, "key", key_file=str(key)) as server:
        assert server.answer(questions(1))[0].finish == "stop"


def test_a_server_that_answers_as_another_model_loses_its_answers(tmp_path: Path) -> None:
    assert lost(tmp_path, "answers_as_other").detail == "answered as model 'someone-else', not 'fake'"


def test_a_server_with_another_tokenizer_than_the_models_serves_another_model(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {chr(code): code for code in range(128)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    made.save(str(tmp_path / "tokenizer.json"))
    assert "it serves another model" in lost(tmp_path, "other_tokens").detail


@pytest.mark.parametrize(
    ("way", "finish", "words"),
    [
        ("refuse", "refusal", "answered 400: This model's maximum context"),
        ("garbage", "transport", "answered with no JSON"),
        ("nan", "error", "a log-probability was not finite"),
        ("deep", "transport", "answered with no JSON"),
    ],
)
def test_an_answer_that_is_none_says_what_it_is(tmp_path: Path, way: str, finish: str, words: str) -> None:
    with opened(tmp_path, way) as server:
        (reply,) = server.answer(questions(1))
    assert reply.finish == finish
    assert words in reply.detail


def test_the_server_and_its_children_are_gone_when_the_arm_closes(tmp_path: Path) -> None:
    log, port = tmp_path / "log", free_port()
    script = "import subprocess as s, time; print(s.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
    with ServerProcess((sys.executable, "-c", script), {}, log, port) as server:
        limit = time.monotonic() + 10
        while not log.read_text().strip() and time.monotonic() < limit:
            time.sleep(0.02)
        child = int(log.read_text())
        assert server.exit_code() is None
    assert server.exit_code() is not None
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_an_answer_that_drips_ends_at_its_limit(tmp_path: Path) -> None:
    begun = time.monotonic()
    reply = lost(tmp_path, "drip", answer_limit_s=1)
    assert "did not answer within 1 s" in reply.detail
    assert time.monotonic() - begun < 10


def test_counters_that_are_not_finite_count_nothing(tmp_path: Path) -> None:
    with opened(tmp_path, "infinite") as server:
        (reply,) = server.answer(questions(1))
        assert (reply.finish, server.counters()) == ("stop", {})


def test_a_server_that_lists_no_models_does_not_come_up(tmp_path: Path) -> None:
    assert "lists no models, so this is no OpenAI-like server" in lost(tmp_path, "no_models").detail


def test_a_server_that_gives_no_tokens_is_told_in_words(tmp_path: Path) -> None:
    with opened(tmp_path, "no_tokens") as server, pytest.raises(ServiceError, match="answers without tokens"):
        server.tokens_of("a b")


def test_a_drawn_token_that_is_not_among_the_likeliest_is_one_of_all_others(tmp_path: Path) -> None:
    ask = Ask(item="a", tokens=(1, 2), max_tokens=2)
    reply = Reply(item="a", text="", tokens=(7, 5), finish="length", prompt_tokens=2)
    with opened(tmp_path, top_logprobs=2) as server:
        ((likely, other),) = server.stated([ask], [reply])
    assert likely == Draw(0.0, pytest.approx(exp(-1)))
    assert other == Draw(pytest.approx(exp(-1) + exp(-2)), pytest.approx(1 - exp(-1) - exp(-2)))


def test_a_server_that_states_nothing_of_a_prompt_is_told_in_words(tmp_path: Path) -> None:
    ask = Ask(item="a", tokens=(1, 2), max_tokens=2)
    with opened(tmp_path, "garbage") as server, pytest.raises(ServiceError, match="answered with no JSON"):
        server.stated([ask], [Reply(item="a", text="", tokens=(7,), finish="length", prompt_tokens=2)])
    with opened(tmp_path, top_logprobs=0) as server, pytest.raises(ServiceError, match="states no log-prob"):
        server.stated([ask], [Reply(item="a", text="", tokens=(7,), finish="length", prompt_tokens=2)])


def test_what_a_server_started_in_a_session_of_its_own_is_gone_too(tmp_path: Path) -> None:
    with opened(tmp_path, "strayed"):
        (log,) = tmp_path.glob("server-*-optimised.log")
        stray = int(log.read_text().partition("strayed ")[2].split()[0])
        assert Path(f"/proc/{stray}").exists()
    limit = time.monotonic() + 5
    while _is_running(stray) and time.monotonic() < limit:
        time.sleep(0.02)
    assert not _is_running(stray)


def _is_running(process: int) -> bool:
    try:
        return "(sleep) Z" not in Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False


def test_two_urls_are_asked_side_by_side_and_a_warm_cache_shows_in_the_counters(tmp_path: Path) -> None:
    started = [free_port(), free_port()]
    ways: tuple[tuple[str, ...], ...] = ((), ("--behave=warm",))
    servers = [
        ServerProcess(
            (*PROGRAM, "serve", "m", "--served-model-name=fake", f"--port={port}", *way),
            {},
            tmp_path / f"{port}",
            port,
        )
        for port, way in zip(started, ways, strict=True)
    ]
    try:
        for port in started:
            _until_listening(port)
        urls = [ServedArm(url=f"http://127.0.0.1:{port}") for port in started]
        asked = ServerSettings(model="m", served_name="fake", stock=urls[0], optimised=urls[1])
        engine = VllmServer(asked, tmp_path, tmp_path)
        assert engine.is_concurrent
        with engine.open("stock") as one, engine.open("optimised") as two:
            one.answer(questions(1))
            two.answer(questions(1))
            assert (one.counters()["prefix_hits"], two.counters()["prefix_hits"]) == (0, 3)
    finally:
        for server in servers:
            server.close()


def test_what_the_observer_wrote_in_a_server_of_others_is_its_ledger(tmp_path: Path) -> None:
    port, book = free_port(), tmp_path / "steps.jsonl"
    entries = [
        {"kind": "observer", "vllm": "0.33.0", "is_on": True, "why": ""},
        {"kind": "step", "step": 1, "phase": "decode", "requests": 1, "tokens": 1, "path": "stock",
         "reason": "before", "ids": ["cmpl-0"], "prompts": []},
    ]  # fmt: skip
    book.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    command = (*PROGRAM, "serve", "m", "--served-model-name=fake", f"--port={port}")
    with ServerProcess(command, {}, tmp_path / "log", port):
        _until_listening(port)
        ours = ServedArm(url=f"http://127.0.0.1:{port}", observer=str(book))
        asked = ServerSettings(
            model="m", served_name="fake", stock=ServedArm(url="http://127.0.0.1:1"), optimised=ours
        )
        engine = VllmServer(asked, tmp_path, tmp_path)
        with engine.open("optimised") as server:
            server.answer(questions(1))
            with book.open("a") as file:
                step = {**entries[1], "step": 2, "tokens": 2, "path": "optimised", "reason": "taken"}
                file.write(json.dumps(step) + "\n")
            assert server.ledger() == {StepTotal("decode", "optimised", "taken", 1): 2}
            assert server.path_share() == 1.0


def test_an_arm_that_is_opened_again_has_the_same_server_and_counts_anew(tmp_path: Path) -> None:
    with closing(VllmServer(settings(tmp_path), tmp_path, tmp_path)) as engine:
        with engine.open("stock") as first:
            first.answer(questions(2))
        with engine.open("stock") as again:
            again.answer(questions(1))
            assert again.counters()["generated_tokens"] == 3
        with engine.open("optimised"):
            pass
    assert sorted(path.name for path in tmp_path.glob("server-*.log")) == [
        "server-1-stock.log", "server-3-optimised.log",
    ]  # fmt: skip


def test_settings_whose_arms_do_not_differ_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="the arms do not differ"):
        ServerSettings(model="m", served_name="m", optimised=ServedArm())


def test_settings_are_read_from_a_file_of_yaml(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(
        "schema_version: 1\nmodel: m\nserved_name: m\noptimised: {arguments: [--fast]}\n", encoding="utf-8"
    )
    assert load_settings(file).command("optimised", "h", 1)[-1] == "--fast"


def _until_listening(port: int) -> None:
    limit = time.monotonic() + 20
    while time.monotonic() < limit:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError(f"nothing listens on {port}")
