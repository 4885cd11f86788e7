"""vLLM behind a URL as an `Engine`: started by us one arm after another, or two servers that run already.

Every arm begins cold: its requests carry a salt of their own, under which nothing is cached, and what a
server had counted before is known. What was asked of a server stands in `description`: command line, version,
what it says of itself, and its metrics before and after. An arm other than stock that does not come up, or
dies, is an arm whose every answer is missing: that is a fault of the candidate, and its words travel along. A
stock server that does not come up is nobody's fault but the machine's or ours, and raises `ServiceError`.
"""

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from math import exp
from pathlib import Path
from typing import NamedTuple

from harness.domain.errors import FasttrackError, InputError, ServiceError
from harness.engines.metrics import RUNNING, acceptance_length, counted, parse_metrics
from harness.engines.observed import StepBook
from harness.engines.observer_home import observer_environment
from harness.engines.profiled import profile_arguments, profile_facts
from harness.engines.served import ServerSettings
from harness.engines.server_client import MALFORMED, Client, HttpError
from harness.engines.server_process import HOST, ServerProcess, free_port
from harness.engines.serving import Ask, Reply, StepTotal
from harness.measure.goodness import Draw

__all__ = [
    "ServerArm", "VllmServer", "draw_among", "identity", "key_of", "read_metrics", "share_of",
    "without_folders",
]  # fmt: skip

PROBE = "The quick brown fox: 0123456789, \u00e9\u4e2d\U0001f600."
"""Text whose tokens tell tokenizers apart."""
POLL_S = 0.05
DEATH_S = 20.0
"""A server whose engine died goes down in its own time: until then, or until it says that it is well."""
DETAIL = 1000
"""Characters of a failure that a reply carries."""
Fact = tuple[str, str]


class VllmServer:
    """See `serving.Engine`. Server logs go to `logs`, the observer and its notes to `scratch`.

    A server of ours stays up until another arm is opened, or `close`: whoever opens an arm again gets it
    with a salt of its own, under which no prefix is cached.
    """

    name = "vllm"

    def __init__(self, settings: ServerSettings, logs: Path, scratch: Path) -> None:
        self._settings, self._logs, self._scratch = settings, logs, scratch
        self._facts: dict[str, list[Fact]] = {}
        self._up: tuple[str, _Up, ExitStack] | None = None
        self._opened = 0

    @property
    def is_concurrent(self) -> bool:
        """Foreign servers run side by side; ours have the machine in turn."""
        return not self._settings.is_started

    @property
    def arms(self) -> tuple[str, ...]:
        """As the settings say."""
        return ("stock", "optimised", *(("poison",) if self._settings.poison else ()))

    @contextmanager
    def open(self, arm: str) -> Iterator["ServerArm"]:
        """The arm, ready; see the module for one that does not come up."""
        self._opened += 1
        try:
            up = self._ready(arm)
        except ServiceError as error:
            self._facts.setdefault(arm, []).append(("failure", str(error)))
            if arm == "stock":
                raise
            yield ServerArm(None, self._settings, str(error))
            return
        opened = ServerArm(up, self._settings, "", f"{arm}-{self._opened}-{time.time_ns()}")
        try:
            yield opened
        finally:
            self._facts[arm] += opened.closing_facts()

    def close(self) -> None:
        """End what runs."""
        if self._up is not None:
            _, _, stack = self._up
            self._up = None
            stack.close()

    def description(self, arm: str) -> tuple[Fact, ...]:
        """Settings of the arm, and what was learned of it while it was open."""
        settings = self._settings
        own = settings.arm(arm)
        command = settings.command(arm, HOST, settings.port) if settings.is_started else (own.url,)
        variables = (*settings.environment, *own.environment)
        known = {
            "command": " ".join(command),
            "environment": " ".join(f"{k}={v}" for k, v in variables) or "as ours",
            "switch": settings.switch(),
            "speculation": settings.speculation(arm),
            **({"acceptance": settings.acceptance.label} if settings.acceptance else {}),
            **dict(self._facts.get(arm, ())),
        }
        return tuple(sorted((name, without_folders(value)) for name, value in known.items()))

    def _ready(self, arm: str) -> "_Up":
        """The server of an arm, up; one of ours that is another arm's ends first."""
        if self._up is not None and self._up[0] == arm and self._up[1].is_alive():
            return self._up[1]
        if self._settings.is_started:
            self.close()
        stack = ExitStack()
        try:
            up = self._start(arm, stack)
        except BaseException:
            stack.close()
            raise
        if self._settings.is_started:
            self._up = (arm, up, stack)
        return up

    def _start(self, arm: str, stack: ExitStack) -> "_Up":
        settings, own = self._settings, self._settings.arm(arm)
        self._facts[arm] = facts = []
        traces = Path(own.traces) if own.traces else None
        process, book = None, StepBook(Path(own.observer)) if own.observer else None
        begun = time.monotonic()
        if settings.is_started:
            port = settings.port or free_port()
            home = self._scratch / f"{self._opened}-{arm}"
            book = StepBook(home / "steps.jsonl")
            environment = {**dict(settings.environment), **dict(own.environment)}
            environment |= observer_environment(home, book.path, environment)
            log = self._logs / f"server-{self._opened}-{arm}.log"
            command = settings.command(arm, HOST, port)
            if settings.has_profiler:
                traces = home / "traces"
                traces.mkdir(parents=True, exist_ok=True)
                command = (*command, *profile_arguments(traces))
            process = stack.enter_context(ServerProcess(command, environment, log, port))
        url = own.url or f"http://{HOST}:{port}"
        limit, top = float(settings.answer_limit_s), settings.top_logprobs
        client = Client(url, settings.served_name, key_of(settings), limit, top)
        if process is not None:
            process.wait_until(lambda: _is_healthy(client), float(settings.start_limit_s))
            facts.append(("ready_s", f"{time.monotonic() - begun:.1f}"))
        facts += identity(client, settings)
        if process is None:
            _drop_prefixes(client, read_metrics(client))
        if traces is not None:
            facts += profile_facts(client, traces)
        facts.append(("metrics_before", _told(read_metrics(client))))
        return _Up(client, process, book)


class _Up(NamedTuple):
    """A server that answers."""

    client: Client
    process: ServerProcess | None
    book: StepBook | None

    def is_alive(self) -> bool:
        """Whether it can be asked on."""
        return self.process is None or self.process.exit_code() is None


class ServerArm:
    """See `serving.ArmServer`. Without a server it is an arm that failed to come up."""

    def __init__(self, up: "_Up | None", settings: ServerSettings, failure: str, salt: str = "") -> None:
        self._settings, self._failure = settings, failure
        self._client = None if up is None else replace(up.client, salt=salt)
        self._process, self._book = (None, None) if up is None else (up.process, up.book)
        self._before = {} if self._client is None else read_metrics(self._client)
        self._last: Mapping[str, float] = self._before
        self._mark = 0 if self._book is None else self._book.mark()
        self._reached: dict[StepTotal, int] = {}

    def answer(self, asks: Sequence[Ask]) -> tuple[Reply, ...]:
        """All asks at once, one thread each; how many ran together is read while they run."""
        client = self._client
        if client is None or self._failure:
            return tuple(_lost(ask, self._failure) for ask in asks)
        done, most = threading.Event(), [0]
        watcher = threading.Thread(target=_watch, args=(client, done, most), daemon=True)
        watcher.start()
        try:
            with ThreadPoolExecutor(len(asks)) as pool:
                answers = list(pool.map(client.answer, asks))
        finally:
            done.set()
            watcher.join()
        replies = [answer.reply for answer in answers]
        if self._book is not None and self._book.is_observed():
            pairs = zip(replies, answers, strict=True)
            replies = [self._book.with_steps(reply, answer.request) for reply, answer in pairs]
        else:
            kind = StepTotal("decode", "stock", "not_observed", max(1, most[0]))
            self._reached[kind] = self._reached.get(kind, 0) + sum(len(reply.tokens) for reply in replies)
        if self._process is not None and self._has_died(replies):
            self._failure = f"the server died in mid-run: {self._process.why_it_ended()}"
            told = {"detail": self._failure[:DETAIL]}
            replies = [r.model_copy(update=told) if r.finish == "transport" else r for r in replies]
        return tuple(replies)

    def ledger(self) -> dict[StepTotal, int]:
        """What the observer in the server wrote down; without one, requests at once by `/metrics`."""
        if self._book is not None and self._book.is_observed():
            return self._book.totals(self._settings.observed, self._mark)
        return dict(self._reached)

    def counters(self) -> dict[str, int]:
        """From `/metrics`."""
        if self._client is not None and not self._failure:
            with suppress(ServiceError):  # it may have died since; what it counted before stands
                self._last = read_metrics(self._client)
        return counted(self._last, self._before)

    @property
    def failure(self) -> str:
        """Why it is not up; empty where it is."""
        return self._failure

    @property
    def url(self) -> str:
        """Where it answers; raises `ServiceError`."""
        return self._living().url

    def watch(self, done: threading.Event, most: list[int]) -> None:
        """Notes the most requests that ran at once, until it is done."""
        _watch(self._living(), done, most)

    def path_share(self) -> float | None:
        """Share of decoded tokens from the optimised path; None where nobody observed."""
        if self._book is None or not self._book.is_observed():
            return None
        return share_of(self.ledger())

    def tokens_of(self, text: str) -> tuple[int, ...]:
        """A text in the server's tokens; raises `ServiceError`."""
        return self._living().tokens_of(text)

    def max_context(self) -> int:
        """Most tokens of a request; raises `ServiceError`."""
        client = self._living()
        try:
            return min(int(m["max_model_len"]) for m in json.loads(client.get("/v1/models"))["data"])
        except MALFORMED as error:
            raise ServiceError(f"{client.url}/v1/models does not tell how long a request may be") from error

    def stated(self, asks: Sequence[Ask], replies: Sequence[Reply]) -> list[list[Draw | None]]:
        """Where tokens that some arm drew at temperature 1 lie among this one's likeliest; all others are
        one. Prompts are tokens.
        """
        client = self._living()
        return [
            [
                draw_among(token, told)
                for token, told in zip(reply.tokens, client.stated(ask.tokens, reply.tokens), strict=True)
            ]
            for ask, reply in zip(asks, replies, strict=True)
        ]

    def closing_facts(self) -> list[Fact]:
        """What is to be said of the arm when it closes."""
        counters = self.counters()
        facts = [("metrics_after", _told(self._last))]
        if self._failure:
            facts.append(("failure", self._failure))
        if self._book is not None:
            facts += self._book.facts()
        length = acceptance_length(counters)
        if length is not None:
            told = self._settings.acceptance
            facts.append(("acceptance_length", told.words(length) if told else f"{length:.3f} (unlabelled)"))
        return facts

    def _living(self) -> Client:
        if self._client is None or self._failure:
            raise ServiceError(self._failure or "the server is not up")
        return self._client

    def _has_died(self, replies: Sequence[Reply]) -> bool:
        """A connection may break long before the process is seen to be gone."""
        client = self._client
        if self._process is None or client is None or all(reply.finish != "transport" for reply in replies):
            return False
        limit = time.monotonic() + DEATH_S
        while self._process.exit_code() is None and time.monotonic() < limit and not _is_healthy(client):
            time.sleep(POLL_S)
        return self._process.exit_code() is not None


def share_of(ledger: Mapping[StepTotal, int]) -> float | None:
    """Share of decoded tokens from the optimised path; None where none was decoded."""
    kinds = [(kind, n) for kind, n in ledger.items() if kind.phase in ("decode", "verify")]
    if not kinds:
        return None
    return sum(n for kind, n in kinds if kind.path == "optimised") / sum(n for _, n in kinds)


def draw_among(token: int, told: Sequence[tuple[int, float]]) -> Draw:
    """A draw's place where only the likeliest tokens are known; all others are one."""
    above = 0.0
    for other, logprob in sorted(told, key=lambda pair: -float(pair[1])):
        if other == token:
            return Draw(above, exp(float(logprob)))
        above += exp(float(logprob))
    return Draw(above, max(0.0, 1.0 - above))


def identity(client: Client, settings: ServerSettings) -> list[Fact]:
    """What a server says of itself; raises `ServiceError` where that is not what the settings say."""
    try:
        named = {str(m["id"]): dict(m) for m in json.loads(client.get("/v1/models"))["data"]}
    except HttpError as error:
        if error.status in (401, 403):
            raise ServiceError(
                f"{client.url} wants a key ({error.status}); put it into a file of its own and name that "
                "under `key_file` in the server settings"
            ) from error
        raise
    except MALFORMED as error:
        raise ServiceError(
            f"{client.url}/v1/models lists no models, so this is no OpenAI-like server"
        ) from error
    found = named.get(settings.served_name)
    if found is None:
        names = ", ".join(named) or "none"
        raise ServiceError(
            f"{client.url} serves {names}, and not {settings.served_name}; name what it serves under "
            "`served_name`, or start another server"
        )
    root = found.get("root")
    if settings.is_started and root is not None and root != settings.model:
        raise ServiceError(
            f"{client.url} was started on {settings.model} and says that it serves {root}: another server "
            "answers there"
        )
    facts = [("served", settings.served_name), ("max_model_len", str(found.get("max_model_len")))]
    for name, path in (("version", "/version"),):
        try:
            facts.append((name, str(json.loads(client.get(path))["version"])))
        except (ServiceError, *MALFORMED):
            facts.append((name, "not told"))
    return [*facts, ("tokenizer", _tokenizer_fact(client, settings))]


def read_metrics(client: Client) -> dict[str, float]:
    """The server's metrics now; raises `ServiceError` where it has none."""
    return parse_metrics(client.get("/metrics"))


def _tokenizer_fact(client: Client, settings: ServerSettings) -> str:
    """Digest of a probe's tokens as the server gives them; raises `ServiceError` where the model's own
    tokenizer gives others, as then another model is served under its name.
    """
    from harness.domain.record import canonical_bytes, sha256_hex

    try:
        asked = {"model": settings.served_name, "prompt": PROBE, "add_special_tokens": False}
        told = [int(token) for token in client.post("/tokenize", asked, 30.0)["tokens"]]
    except (ServiceError, *MALFORMED):
        return "not told"
    own = _own_tokens(Path(settings.model) / "tokenizer.json")
    if own is not None and own != told:
        raise ServiceError(
            f"{client.url} says that it serves {settings.served_name}, and cuts text into other tokens than "
            f"the tokenizer in {settings.model}: it serves another model"
        )
    return sha256_hex(canonical_bytes(told))[:16]


def _own_tokens(file: Path) -> list[int] | None:
    """The probe's tokens by the model's tokenizer; None where it, or the library, is not here."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    if not file.is_file():
        return None
    return list(Tokenizer.from_file(str(file)).encode(PROBE, add_special_tokens=False).ids)


def _is_healthy(client: Client) -> bool:
    try:
        client.get("/health", 5.0)
    except HttpError as error:
        return error.status in (401, 403)  # it is up and wants a key, which `identity` says
    except ServiceError:
        return False
    return True


def _drop_prefixes(client: Client, before: Mapping[str, float]) -> None:
    """A foreign server begins without cached prefixes, as far as it lets us; its counters tell the rest."""
    if before.get("vllm:prefix_cache_queries_total", 0.0) == 0.0:
        return
    try:
        client.post("/reset_prefix_cache", {}, 30.0)
    except ServiceError:
        return


def key_of(settings: ServerSettings) -> str:
    """What the server wants in a header; empty where it wants nothing. Raises `InputError`."""
    if not settings.key_file:
        return ""
    try:
        return Path(settings.key_file).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise InputError(f"{settings.key_file}: no key can be read here ({error.strerror})") from error


def _watch(client: Client, done: threading.Event, most: list[int]) -> None:
    """Notes the most requests that ran at once."""
    while not done.wait(POLL_S):
        try:
            most[0] = max(most[0], round(read_metrics(client).get(RUNNING, 0.0)))
        except FasttrackError:
            continue


def _lost(ask: Ask, why: str) -> Reply:
    return Reply(
        item=ask.item,
        repeat=ask.repeat,
        text="",
        tokens=(),
        finish="transport",
        detail=why[:DETAIL],
        prompt_tokens=0,
    )


def _told(metrics: Mapping[str, float]) -> str:
    """vLLM's own metrics without its histograms, in one line."""
    wanted = {k: v for k, v in sorted(metrics.items()) if k.startswith("vllm:") and not _is_histogram(k)}
    return json.dumps(wanted, separators=(",", ":"))


def _is_histogram(name: str) -> bool:
    return name.endswith(("_bucket", "_sum", "_count", "_created"))


def without_folders(text: str) -> str:
    """No host paths leave the machine: of a path the last part."""
    import re

    return re.sub(r"(?<![\w:/])/(?:[^\s/=,:\"']+/)+([^\s/=,:\"']+)", r".../\1", text)
