"""One trace against both arms of a server comparison, in turn: stock, optimised, stock again.

What is compared is each request's whole time, pair by pair, as prompts and lengths are the same: how a server
streams cannot move it. What users got (P50 and P90 of tokens a second) stands beside it. The prefix cache is
part of such traffic: arms that found unlike shares of their prompts in it did unlike work.
"""

import json
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Literal

from pydantic import Field

from harness.domain.errors import ServiceError
from harness.domain.record import Number, Record, Whole
from harness.engines.bench_serve import ALPHA, ORDER
from harness.engines.replaying import Interactivity, ReplayedRequest, asker_of, interactivity, replay
from harness.engines.served import ServerSettings
from harness.engines.traces import Trace, prompts_of
from harness.engines.vllm_server import VllmServer
from harness.measure.interleaved import compare

__all__ = ["ReplayReport", "ReplayRun", "judged_replay", "replay_arms", "vocabulary_of"]

LEAST_PAIRS, LEAST_VOCABULARY = 8, 32000
ALIKE_HITS = 0.05
"""Share of the prompts' tokens by which what the arms found in their caches may differ."""


class ReplayRun(Record):
    """One replay against one arm."""

    arm: Literal["stock", "optimised"]
    turn: Whole
    requests: tuple[ReplayedRequest, ...] = Field(min_length=1)
    reached: Whole
    """Most requests that the server had running at once, by its own metrics."""
    prefix_hits: Whole
    """Prompt tokens that came out of the prefix cache."""
    path_share: Number | None = None
    got: Interactivity | None = None


class ReplayReport(Record):
    """What `sweep replay` writes."""

    schema_version: Literal[1] = 1
    load_generator: str = "fasttrack's replayer: closed loop, a thread a request, times of a client beside"
    switch: str
    settings: tuple[tuple[str, str, str], ...]
    """(arm, name, value)."""
    users: Whole
    requests: Whole
    status: Literal["measured", "INVALID"]
    words: str
    ratio: Number | None = None
    low: Number | None = None
    high: Number | None = None
    noise: Number | None = None
    """How far the interval between the two stock runs reaches from 1."""
    runs: tuple[ReplayRun, ...]


def replay_arms(
    settings: ServerSettings, trace: Trace, vocabulary: int, out: Path, say: Callable[[str], None]
) -> ReplayReport:
    """The trace against both arms; raises `ServiceError` where a server does not come up."""
    prompts = prompts_of(trace, vocabulary, seed=0)
    key = Path(settings.key_file).read_text(encoding="utf-8").strip() if settings.key_file else ""
    runs: list[ReplayRun] = []
    out.mkdir(parents=True, exist_ok=True)
    with closing(VllmServer(settings, out / "logs", out / "scratch")) as engine:
        for turn, arm in enumerate(ORDER):
            say(f"{arm} server, run {turn + 1} of {len(ORDER)}")
            with engine.open(arm) as server:
                if server.failure:
                    raise ServiceError(f"the {arm} server does not come up: {server.failure}")
                # A server that was there before us may hold these very prefixes: each run has its own salt.
                limit_s, salt = float(settings.answer_limit_s), f"{uuid.uuid4().hex}.{turn}"
                ask = asker_of(server.url, settings.served_name, key, limit_s, salt)
                first = trace.requests[0]
                ask([1] * 8, first.output_tokens)  # the first request of a server is slow
                before, done, most = server.counters(), threading.Event(), [0]
                watcher = threading.Thread(target=server.watch, args=(done, most), daemon=True)
                watcher.start()
                try:
                    found = replay(trace, prompts, ask)
                finally:
                    done.set()
                    watcher.join()
                hits = server.counters().get("prefix_hits", 0) - before.get("prefix_hits", 0)
                runs.append(
                    ReplayRun(
                        arm="stock" if arm == "stock" else "optimised", turn=turn, requests=found,
                        reached=most[0], prefix_hits=hits, path_share=server.path_share(),
                        got=interactivity(found),
                    )
                )  # fmt: skip
        described = {arm: dict(engine.description(arm)) for arm in ("stock", "optimised")}
    facts = tuple((arm, k, v) for arm, told in described.items() for k, v in told.items())
    return judged_replay(described["optimised"]["switch"], facts, runs)


def vocabulary_of(model: str) -> int:
    """Tokens that a model in a folder knows; a number that most models have where it cannot be read."""
    try:
        told = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
        return int(told.get("text_config", told)["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return LEAST_VOCABULARY


def judged_replay(
    switch: str, facts: tuple[tuple[str, str, str], ...], runs: Sequence[ReplayRun]
) -> ReplayReport:
    """What the runs amount to. Pure."""
    told = {
        "switch": switch, "settings": facts, "runs": tuple(runs), "requests": len(runs[0].requests),
        "users": len({one.user for one in runs[0].requests}),
    }  # fmt: skip
    if objections := tuple(_objections(runs)):
        return ReplayReport.model_validate({**told, "status": "INVALID", "words": "; ".join(objections)})
    times = [[float(one.latency_ms or 0.0) * 1e3 for one in run.requests] for run in runs]
    gain, null = compare(times[0], times[1], ALPHA, 0), compare(times[0], times[2], ALPHA, 0)
    noise = max(abs(null.low - 1), abs(null.high - 1))
    words = f"{gain.ratio:.2f}x [{gain.low:.2f}, {gain.high:.2f}] an answer, noise {noise:.1%}"
    return ReplayReport.model_validate(
        {**told, "status": "measured", "words": words, "ratio": gain.ratio, "low": gain.low,
         "high": gain.high, "noise": noise}
    )  # fmt: skip


def _objections(runs: Sequence[ReplayRun]) -> Iterator[str]:
    if [run.turn for run in runs] != list(range(len(ORDER))):
        yield "not every arm was run"
        return
    for run in runs:
        lost = [one for one in run.requests if one.failure]
        if lost:
            yield f"{run.arm}: {len(lost)} of {len(run.requests)} requests failed, first {lost[0].id}: " + (
                lost[0].failure
            )
    asked = [[(one.id, one.prompt_tokens, one.output_tokens) for one in run.requests] for run in runs]
    if any(other != asked[0] for other in asked) and not any(o.failure for r in runs for o in r.requests):
        yield "the arms were not asked the same"
    total = sum(int(one.prompt_tokens) for one in runs[0].requests)
    hits = [int(run.prefix_hits) for run in runs]
    if max(hits) - min(hits) > ALIKE_HITS * total:
        yield f"the arms found {min(hits)} to {max(hits)} of {total} prompt tokens in their caches"
    if len(runs[0].requests) < LEAST_PAIRS:
        yield f"{len(runs[0].requests)} requests say nothing of the spread; ask {LEAST_PAIRS} or more"
