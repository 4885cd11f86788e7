"""vLLM behind a URL as an `Engine`: started by us one arm after another, or two servers that run already.

Every arm begins cold: a server of ours is new, a foreign one is asked to drop its prefix cache, and what it
had counted before is known. What was asked of a server stands in `description`: command line, version, what
it says of itself, and its metrics before and after. An arm other than stock that does not come up, or dies,
is an arm whose every answer is missing: that is a fault of the candidate, and its words travel along. A stock
server that does not come up is nobody's fault but the machine's or ours, and raises `ServiceError`.
"""

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from harness.domain.errors import FasttrackError, InputError, ServiceError
from harness.engines.metrics import RUNNING, acceptance_length, counted, parse_metrics
from harness.engines.observed import StepBook
from harness.engines.observer_home import observer_environment
from harness.engines.served import ServerSettings
from harness.engines.server_client import Client, HttpError
from harness.engines.server_process import HOST, ServerProcess, free_port
from harness.engines.serving import Ask, Reply, StepTotal

__all__ = ["ServerArm", "VllmServer"]

PROBE = "The quick brown fox: 0123456789, \u00e9\u4e2d\U0001f600."
"""Text whose tokens tell tokenizers apart."""
POLL_S = 0.05
Fact = tuple[str, str]


class VllmServer:
    """See `serving.Engine`. `folder` takes logs, `<arm>.log`, and the observer's ledgers."""

    name = "vllm"

    def __init__(self, settings: ServerSettings, folder: Path) -> None:
        self._settings, self._folder = settings, folder
        self._facts: dict[str, list[Fact]] = {}
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
        facts = self._facts.setdefault(arm, [])
        facts.clear()
        begun = time.monotonic()
        with ExitStack() as stack:
            try:
                opened = self._up(arm, stack)
            except ServiceError as error:
                facts.append(("failure", str(error)))
                if arm == "stock":
                    raise
                yield ServerArm(None, None, None, str(error), self._settings.observed, arm)
                return
            facts.append(("ready_s", f"{time.monotonic() - begun:.1f}"))
            try:
                yield opened
            finally:
                facts += opened.closing_facts(self._settings)

    def description(self, arm: str) -> tuple[Fact, ...]:
        """Settings of the arm, and what was learned of it while it was open."""
        settings = self._settings
        own = settings.arm(arm)
        command = settings.command(arm, HOST, settings.port) if settings.is_started else (own.url,)
        known = {
            "command": _without_folders(" ".join(command)),
            "environment": " ".join(f"{k}={v}" for k, v in (*settings.environment, *own.environment))
            or "as ours",
            "switch": _without_folders(settings.switch()),
            **({"acceptance": settings.acceptance.label} if settings.acceptance else {}),
            **dict(self._facts.get(arm, ())),
        }
        return tuple(sorted((name, _without_folders(value)) for name, value in known.items()))

    def _up(self, arm: str, stack: ExitStack) -> "ServerArm":
        settings, own = self._settings, self._settings.arm(arm)
        process, book = None, None
        if settings.is_started:
            port = settings.port or free_port()
            home = self._folder / f"{self._opened}-{arm}"
            book = StepBook(home / "steps.jsonl")
            environment = {**dict(settings.environment), **dict(own.environment)}
            environment |= observer_environment(home, book.path, environment)
            process = stack.enter_context(
                ServerProcess(settings.command(arm, HOST, port), environment, home / "server.log", port)
            )
            url = f"http://{HOST}:{port}"
        else:
            url = own.url
        client = Client(
            url, settings.served_name, _key(settings), float(settings.answer_limit_s), settings.top_logprobs
        )
        if process is not None:
            process.wait_until(lambda: _is_healthy(client), float(settings.start_limit_s))
        self._facts[arm] += identity(client, settings)
        before = read_metrics(client)
        if process is None:
            _drop_prefixes(client, before)
            before = read_metrics(client)
        self._facts[arm].append(("metrics_before", _told(before)))
        return ServerArm(client, process, book, "", settings.observed, arm, before)


class ServerArm:
    """See `serving.ArmServer`."""

    def __init__(
        self,
        client: Client | None,
        process: ServerProcess | None,
        book: StepBook | None,
        failure: str,
        observed: Sequence[Fact],
        arm: str,
        before: Mapping[str, float] | None = None,
    ) -> None:
        self._client, self._process, self._book, self._failure = client, process, book, failure
        self._before, self._last = before or {}, before or {}
        self._observed, self._arm = tuple(observed), arm
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
            replies = [
                self._book.with_steps(reply, answer.request)
                for reply, answer in zip(replies, answers, strict=True)
            ]
        else:
            kind = StepTotal("decode", "stock", "not_observed", max(1, most[0]))
            self._reached[kind] = self._reached.get(kind, 0) + sum(len(reply.tokens) for reply in replies)
        if self._process is not None and self._process.exit_code() is not None:
            self._failure = f"the server died in mid-run: {self._process.why_it_ended()}"
            replies = [
                reply.model_copy(update={"detail": self._failure}) if reply.finish == "transport" else reply
                for reply in replies
            ]
        return tuple(replies)

    def ledger(self) -> dict[StepTotal, int]:
        """What the observer in the server wrote down; without one, requests at once by `/metrics`."""
        if self._book is not None and self._book.is_observed():
            return self._book.totals(self._observed)
        return dict(self._reached)

    def counters(self) -> dict[str, int]:
        """From `/metrics`."""
        if self._client is None or self._failure:
            return counted(self._last, self._before)
        try:
            self._last = read_metrics(self._client)
        except ServiceError:
            return counted(self._last, self._before)
        return counted(self._last, self._before)

    def closing_facts(self, settings: ServerSettings) -> list[Fact]:
        """What is to be said of the arm when it closes."""
        counters = self.counters()
        facts = [("metrics_after", _told(self._last))]
        if self._failure:
            facts.append(("failure", self._failure))
        if self._book is not None:
            facts += self._book.facts()
        length = acceptance_length(counters)
        if length is not None:
            label = settings.acceptance.label if settings.acceptance else "unlabelled"
            facts.append(("acceptance_length", f"{length:.3f} ({label})"))
        return facts


def identity(client: Client, settings: ServerSettings) -> list[Fact]:
    """What a server says of itself; raises `ServiceError` where that is not what the settings say."""
    try:
        models = json.loads(client.get("/v1/models"))["data"]
    except HttpError as error:
        if error.status in (401, 403):
            raise ServiceError(
                f"{client.url} wants a key ({error.status}); put it into a file of its own and name that "
                "under `key_file` in the server settings"
            ) from error
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise ServiceError(
            f"{client.url}/v1/models lists no models, so this is no OpenAI-like server"
        ) from error
    found = next((m for m in models if m.get("id") == settings.served_name), None)
    if found is None:
        names = ", ".join(str(m.get("id")) for m in models) or "none"
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
        except (ServiceError, KeyError, TypeError, ValueError):
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
    except (ServiceError, KeyError, TypeError, ValueError):
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


def _key(settings: ServerSettings) -> str:
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
        detail=why[:1000],
        prompt_tokens=0,
    )


def _told(metrics: Mapping[str, float]) -> str:
    """vLLM's own metrics without its histograms, in one line."""
    wanted = {k: v for k, v in sorted(metrics.items()) if k.startswith("vllm:") and not _is_histogram(k)}
    return json.dumps(wanted, separators=(",", ":"))


def _is_histogram(name: str) -> bool:
    return name.endswith(("_bucket", "_sum", "_count", "_created"))


def _without_folders(text: str) -> str:
    """No host paths leave the machine: of a path the last part."""
    import re

    return re.sub(r"(?<![\w:/])/(?:[^\s/=,:\"']+/)+([^\s/=,:\"']+)", r".../\1", text)
