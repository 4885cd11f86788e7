"""Time both arms of a server comparison under vLLM's own load generator, `vllm bench serve`.

Servers of ours run in turn: stock, optimised, stock again, so that what drifts in time shows as the noise
between the two stock runs; foreign ones alternate. Decode alone is what is compared (time a token after the
first), verify steps come before tokens, and the acceptance travels with its label. A batch that was not
reached, a cache that was warm in one arm, or a request that failed makes the comparison invalid.
"""

import json
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

from pydantic import Field

from harness.domain.errors import ServiceError
from harness.domain.record import Number, Positive, Record, Whole
from harness.engines.metrics import acceptance_length
from harness.engines.served import ServerSettings
from harness.engines.vllm_server import ServerArm, VllmServer, without_folders
from harness.measure.interleaved import Comparison, compare

__all__ = [
    "BenchReport",
    "BenchRun",
    "Load",
    "Target",
    "Watched",
    "bench_arms",
    "bench_command",
    "row_of",
    "told_run",
]

ORDER = ("stock", "optimised", "stock")
ALPHA = 0.025
LIMIT_S = 1800
LEAST_REQUESTS = 8
"""Below, an interval over requests says nothing."""


class Load(Record):
    """One point of the load."""

    concurrency: Positive
    input_tokens: Positive = 1
    """Of a prompt. 1: decode alone; more: prefills of some requests run between the steps of others."""
    output_tokens: Positive = 100
    requests_each: Positive = 8
    """Requests a concurrent user; the first and last ones run in a batch that fills or empties."""
    seed: Whole = 0

    @property
    def phase(self) -> str:
        """What the time of a token holds."""
        return "decode alone" if self.input_tokens == 1 else "mixed prefill and decode"


class BenchRun(Record):
    """One run of the load generator against one arm."""

    arm: Literal["stock", "optimised"]
    turn: Whole
    load: Load
    completed: Whole
    failed: Whole
    reached: Whole
    """Most requests that the server had running at once, by its own metrics."""
    prefix_hits: Whole
    tpot_us: tuple[Number, ...]
    """Mean time a token after the first, by request."""
    output_tokens: Whole
    """Of all requests together."""
    ttft_ms: Number
    output_tokens_per_s: Number
    """Prefill included, as the load generator counts."""
    acceptance: Number | None = None
    """Tokens a verify step; None without drafts."""
    path_share: Number | None = None
    """Share of decoded tokens from the optimised path; None where nobody observed."""


class BenchRow(Record):
    """Both arms at one load."""

    load: Load
    status: Literal["measured", "INVALID"]
    words: str
    stock_us: Number | None = None
    optimised_us: Number | None = None
    ratio: Number | None = None
    low: Number | None = None
    high: Number | None = None
    noise: Number | None = None
    """How far the two stock runs are apart, as a share."""
    verify_steps_per_s: tuple[Number, Number] | None = None
    """Stock, optimised: requests at once over the time of a step, a token's time times the acceptance."""
    decode_tokens_per_s: tuple[Number, Number] | None = None
    acceptance: str = "none: no drafts"


class BenchReport(Record):
    """What `sweep run --engine vllm` writes."""

    schema_version: Literal[1] = 1
    switch: str
    commands: tuple[tuple[str, str], ...]
    """(arm, command line) of both servers, without folders."""
    load_command: tuple[str, ...]
    settings: tuple[tuple[str, str, str], ...]
    rows: tuple[BenchRow, ...]
    runs: tuple[BenchRun, ...] = Field(min_length=1)


class Target(NamedTuple):
    """What the load generator is pointed at."""

    url: str
    settings: ServerSettings


class Watched(NamedTuple):
    """What a server said of itself while one load was run."""

    reached: int
    """Most requests at once."""
    gained: Mapping[str, int]
    """By its counters."""
    path_share: float | None


def bench_arms(
    settings: ServerSettings, loads: Sequence[Load], out: Path, say: Callable[[str], None]
) -> BenchReport:
    """Every load against both arms; raises `ServiceError` where a server or the load generator fails."""
    runs: list[BenchRun] = []
    out.mkdir(parents=True, exist_ok=True)
    with closing(VllmServer(settings, out / "logs", out / "scratch")) as engine:
        for turn, arm in enumerate(ORDER):
            say(f"{arm} server, run {turn + 1} of {len(ORDER)}")
            with engine.open(arm) as server:
                if server.failure:
                    raise ServiceError(f"the {arm} server does not come up: {server.failure}")
                for load in loads:
                    say(f"{arm}, {load.concurrency} at once")
                    runs.append(_run(Target(server.url, settings), server, arm, turn, load, out))
        described = {arm: dict(engine.description(arm)) for arm in ("stock", "optimised")}
    return BenchReport(
        switch=described["optimised"]["switch"],
        commands=tuple((arm, facts["command"]) for arm, facts in described.items()),
        load_command=tuple(
            without_folders(word) for word in bench_command(Target("URL", settings), loads[0], "FILE")
        ),
        settings=tuple((arm, k, v) for arm, facts in described.items() for k, v in facts.items()),
        rows=tuple(row_of(settings, load, [run for run in runs if run.load == load]) for load in loads),
        runs=tuple(runs),
    )


def bench_command(target: Target, load: Load, result: str) -> tuple[str, ...]:
    """The load generator's command line."""
    settings = target.settings
    return (
        *settings.program, "bench", "serve", f"--base-url={target.url}", f"--model={settings.served_name}",
        f"--tokenizer={settings.model}", "--dataset-name=random", f"--random-input-len={load.input_tokens}",
        f"--random-output-len={load.output_tokens}", "--ignore-eos",
        f"--num-prompts={load.concurrency * load.requests_each}", f"--max-concurrency={load.concurrency}",
        f"--num-warmups={load.concurrency}", f"--seed={load.seed}", "--percentile-metrics=ttft,tpot,itl",
        "--metric-percentiles=50,90,99", "--save-result", "--save-detailed", f"--result-filename={result}",
        "--disable-tqdm",
    )  # fmt: skip


def row_of(settings: ServerSettings, load: Load, runs: Sequence[BenchRun]) -> BenchRow:
    """What the runs at one load amount to. Pure."""
    if objections := tuple(_objections(load, runs)):
        return BenchRow(load=load, status="INVALID", words="; ".join(objections))
    first, optimised, again = (next(run for run in runs if run.turn == turn) for turn in range(len(ORDER)))
    gain = _compare(first, optimised, load.seed)
    null = _compare(first, again, load.seed)
    noise = max(abs(null.low - 1), abs(null.high - 1))
    lengths = [run.acceptance or 1.0 for run in (first, optimised)]
    tokens = [load.concurrency * 1e6 / us for us in (gain.stock_us, gain.other_us)]
    steps = [rate / length for rate, length in zip(tokens, lengths, strict=True)]
    return BenchRow(
        load=load, status="measured",
        words=f"{load.phase}: {gain.ratio:.2f}x [{gain.low:.2f}, {gain.high:.2f}], noise {noise:.1%}",
        stock_us=gain.stock_us, optimised_us=gain.other_us, ratio=gain.ratio, low=gain.low, high=gain.high,
        noise=noise, verify_steps_per_s=(steps[0], steps[1]), decode_tokens_per_s=(tokens[0], tokens[1]),
        acceptance=_acceptance_words(settings, first, optimised),
    )  # fmt: skip


def _compare(stock: BenchRun, other: BenchRun, seed: int) -> Comparison:
    """Request against request: the same prompts in the same order."""
    return compare(stock.tpot_us, other.tpot_us, ALPHA, seed)


def _objections(load: Load, runs: Sequence[BenchRun]) -> Any:
    wanted = load.concurrency * load.requests_each
    if [run.turn for run in runs] != list(range(len(ORDER))):
        yield "not every arm was run"
        return
    for run in runs:
        if run.failed or run.completed != wanted:
            yield f"{run.arm}: {run.completed} of {wanted} requests completed, {run.failed} failed"
        if len(run.tpot_us) != wanted:
            yield f"{run.arm}: times of {len(run.tpot_us)} of {wanted} requests were kept"
        asked = wanted * load.output_tokens
        if run.output_tokens != asked:
            yield f"{run.arm}: {run.output_tokens} tokens came back, and {asked} were asked"
        if run.reached < load.concurrency:
            yield f"{run.arm}: {load.concurrency} at once were asked, the server had {run.reached} at most"
    hits = {run.prefix_hits for run in runs}
    if len(hits) > 1:
        yield f"the arms found {min(hits)} to {max(hits)} cached prefix tokens: one ran on a warm cache"
    if wanted < LEAST_REQUESTS:
        yield f"{wanted} requests an arm say nothing of the spread; ask {LEAST_REQUESTS} or more"


def _acceptance_words(settings: ServerSettings, stock: BenchRun, optimised: BenchRun) -> str:
    if optimised.acceptance is None and stock.acceptance is None:
        return "none: no drafts"
    told = settings.acceptance
    label = "unlabelled" if told is None else told.label
    lengths = " and ".join(
        "none" if run.acceptance is None else f"{run.acceptance:.2f}" for run in (stock, optimised)
    )
    words = f"{lengths} tokens a step, {label}"
    if told is not None and told.label == "measured" and told.golden is not None and optimised.acceptance:
        short = 1 - optimised.acceptance / float(told.golden)
        verdict = "below" if short > float(told.tolerance) else "in line with"
        words += f", {verdict} the golden {float(told.golden):g} for {told.drafts} drafts"
    return words


def _run(target: Target, server: ServerArm, arm: str, turn: int, load: Load, out: Path) -> BenchRun:
    name = f"{turn}-{arm}-c{load.concurrency}"
    result, log = (out / f"{name}.json").resolve(), out / f"{name}.log"
    done, most = threading.Event(), [0]
    watcher = threading.Thread(target=server.watch, args=(done, most), daemon=True)
    before = server.counters()
    watcher.start()
    try:
        with log.open("wb") as file:
            code = subprocess.run(
                bench_command(target, load, str(result)),
                env=target.settings.child_environment(arm),
                stdout=file, stderr=subprocess.STDOUT, timeout=LIMIT_S, check=False,
            ).returncode  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise ServiceError(f"the load generator was not done within {LIMIT_S} s; see {log}") from error
    finally:
        done.set()
        watcher.join()
    if code != 0 or not result.is_file():
        words = log.read_text(encoding="utf-8", errors="replace").splitlines()[-8:]
        raise ServiceError(f"the load generator ended with {code} against {arm}:\n" + "\n".join(words))
    told = json.loads(result.read_text(encoding="utf-8"))
    gained = {name: value - before.get(name, 0) for name, value in server.counters().items()}
    return told_run((arm, turn), load, told, Watched(most[0], gained, server.path_share()))


def told_run(turn: tuple[str, int], load: Load, told: Mapping[str, Any], watched: "Watched") -> BenchRun:
    """A run of (arm, turn) as the load generator's result file and the server's own metrics tell it."""
    reached, gained, path_share = watched
    return BenchRun(
        arm="stock" if turn[0] == "stock" else "optimised",
        turn=turn[1],
        load=load,
        completed=int(told["completed"]),
        failed=int(told.get("failed", 0)),
        reached=reached,
        prefix_hits=gained.get("prefix_hits", 0),
        output_tokens=int(told["total_output_tokens"]),
        tpot_us=_token_times(told),
        ttft_ms=float(told["mean_ttft_ms"]),
        output_tokens_per_s=float(told["output_throughput"]),
        acceptance=acceptance_length(gained),
        path_share=path_share,
    )


def _token_times(told: Mapping[str, Any]) -> tuple[float, ...]:
    """Microseconds a token after the first, by request in the order sent."""
    return tuple(fmean(times) * 1e6 for times in told.get("itls", ()) if times)
