"""Both arms under `vllm bench sweep serve`: vLLM's own sweep starts the servers and asks every load of each.

A sweep of one arm has all loads as its parameters; stock, optimised and stock again follow one another, so
that the rows are those of `bench_serve`. What the sweep does not tell is read beside it, from the metrics of
the server that it started: how many requests ran at once, cached prefixes and drafts, load by load, as each
leaves its result in turn. A pause behind every load gives the last reading time.
"""

import json
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.domain.errors import FasttrackError, InputError, ServiceError
from harness.engines.bench_serve import (
    ORDER,
    BenchReport,
    BenchRun,
    Load,
    Target,
    Watched,
    bench_command,
    row_of,
    told_run,
)
from harness.engines.metrics import RUNNING, counted
from harness.engines.observed import StepBook
from harness.engines.observer_home import observer_environment
from harness.engines.served import ServerSettings
from harness.engines.server_client import Client
from harness.engines.server_process import HOST, ServerProcess, free_port
from harness.engines.vllm_server import identity, key_of, read_metrics, share_of, without_folders

__all__ = ["load_name", "sweep_arms", "sweep_command"]

LIMIT_S = 7200.0
POLL_S = 0.2
PAUSE_S = 1
"""Behind each load, in which the server still answers."""
OPTIONS = ("random-input-len", "random-output-len", "num-prompts", "max-concurrency", "num-warmups", "seed")
"""Of the load generator: what differs between the loads of one sweep."""


def sweep_arms(
    settings: ServerSettings, loads: Sequence[Load], out: Path, say: Callable[[str], None]
) -> BenchReport:
    """Every load against both arms; raises `ServiceError` where the sweep fails."""
    if not settings.is_started:
        raise InputError(
            "`vllm bench sweep` starts its servers itself, and these settings name servers that run already; "
            "time those with `--bench serve`"
        )
    if len({load_name(load) for load in loads}) != len(loads):
        raise InputError("two loads have one number of requests at once, and their results one name")
    out.mkdir(parents=True, exist_ok=True)
    runs: list[BenchRun] = []
    facts: dict[str, list[tuple[str, str]]] = {}
    for turn, arm in enumerate(ORDER):
        say(f"vllm bench sweep, {arm} server, run {turn + 1} of {len(ORDER)}")
        found, told = _swept(settings, arm, turn, loads, out)
        runs += found
        facts[arm] = told
    commands = tuple(
        (arm, without_folders(shlex.join(settings.command(arm, HOST, settings.port)))) for arm in facts
    )
    command = sweep_command(settings, "stock", settings.port, Path("PARAMETERS"), Path("OUT"), loads[0])
    return BenchReport(
        switch=settings.switch(), commands=commands,
        load_command=tuple(without_folders(word) for word in command),
        settings=tuple((arm, *fact) for arm, told in facts.items() for fact in told),
        rows=tuple(row_of(settings, load, [run for run in runs if run.load == load]) for load in loads),
        runs=tuple(runs),
    )  # fmt: skip


def sweep_command(
    settings: ServerSettings, arm: str, port: int, parameters: Path, out: Path, load: Load
) -> tuple[str, ...]:
    """The command line of one arm's sweep; `load` gives what all loads of it share."""
    # The sweep reads host and port of its server from words of their own.
    serve = [w for word in settings.command(arm, HOST, port) for w in _split(word, ("--host", "--port"))]
    words = bench_command(Target(f"http://{HOST}:{port}", settings), load, "FILE")
    varied = tuple(f"--{name}=" for name in OPTIONS)
    left_to_it = ("--save-result", "--result-filename=", "--percentile-metrics=")
    bench = [word for word in words if not word.startswith((*varied, *left_to_it))]
    return (
        *settings.program, "bench", "sweep", "serve", f"--serve-cmd={shlex.join(serve)}",
        f"--bench-cmd={shlex.join(bench)}", f"--bench-params={parameters}", "--num-runs=1",
        f"--after-bench-cmd=sleep {PAUSE_S}", f"--output-dir={out}", f"--experiment-name={arm}",
        f"--server-ready-timeout={round(float(settings.start_limit_s))}", "--show-stdout",
    )  # fmt: skip


def load_name(load: Load) -> str:
    """By which a load's results are found."""
    return f"c{load.concurrency}"


def _split(word: str, names: Sequence[str]) -> Sequence[str]:
    name, _, value = word.partition("=")
    return (name, value) if name in names and value else (word,)


def _parameters(loads: Sequence[Load]) -> dict[str, dict[str, int]]:
    """By name, as the sweep takes them: options of the load generator, with underscores."""
    target = Target("", ServerSettings.model_construct(program=(), model="", served_name=""))
    found = {}
    for load in loads:
        told = dict(
            w[2:].split("=", 1) for w in bench_command(target, load, "") if w.startswith("--") and "=" in w
        )
        found[load_name(load)] = {name.replace("-", "_"): int(told[name]) for name in OPTIONS}
    return found


def _swept(
    settings: ServerSettings, arm: str, turn: int, loads: Sequence[Load], out: Path
) -> tuple[list[BenchRun], list[tuple[str, str]]]:
    """Runs of one arm, and what was learned of its server."""
    port = settings.port or free_port()
    home = (out / "scratch" / f"{turn}-{arm}").resolve()
    home.mkdir(parents=True, exist_ok=True)
    parameters = home / "loads.json"
    parameters.write_text(json.dumps(_parameters(loads)), encoding="utf-8")
    book = StepBook(home / "steps.jsonl")
    environment = settings.child_environment(arm)
    environment |= observer_environment(home, book.path, environment)
    command = sweep_command(settings, arm, port, parameters, home, loads[0])
    client = Client(
        f"http://{HOST}:{port}", settings.served_name, key_of(settings), float(settings.answer_limit_s), 0
    )
    log = out / "logs" / f"sweep-{turn}-{arm}.log"
    with ServerProcess(command, environment, log, port) as process:
        windows, facts = _watched(process, client, settings, home, loads)
        if process.exit_code() != 0:
            raise ServiceError(f"`vllm bench sweep` failed against {arm}: {process.why_it_ended()}")
    share = share_of(book.totals(settings.observed, 0)) if book.is_observed() else None
    runs = []
    for load in loads:
        result = _result(home, load)
        if result is None:
            raise ServiceError(f"`vllm bench sweep` left no result of {load_name(load)}; see {log}")
        told: Mapping[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        window = windows.get(load_name(load), Watched(0, {}, None))
        runs.append(told_run((arm, turn), load, told, window._replace(path_share=share)))
    return runs, facts


def _watched(
    process: ServerProcess, client: Client, settings: ServerSettings, home: Path, loads: Sequence[Load]
) -> tuple[dict[str, Watched], list[tuple[str, str]]]:
    """Reads the server's metrics until the sweep ends, and cuts them where results appear."""
    windows: dict[str, Watched] = {}
    facts: list[tuple[str, str]] = []
    before: Mapping[str, float] | None = None
    last: Mapping[str, float] = {}
    most, begun = 0, time.monotonic()
    while process.exit_code() is None:
        if time.monotonic() - begun > LIMIT_S:
            raise ServiceError(f"`vllm bench sweep` was not done within {LIMIT_S:.0f} s; see {process.log}")
        with suppress(FasttrackError):  # not up yet, or down already
            last = read_metrics(client)
            before = last if before is None else before
            most = max(most, round(last.get(RUNNING, 0.0)))
            facts = facts or identity(client, settings)
        for load in loads:
            name = load_name(load)
            if name not in windows and before is not None and _result(home, load) is not None:
                windows[name] = Watched(most, counted(last, before), None)
                before, most = last, 0
        time.sleep(POLL_S)
    return windows, facts


def _result(home: Path, load: Load) -> Path | None:
    """The file of a load's run, once it is there; named by the sweep after the load."""
    found = home.glob(f"*/*-{load_name(load)}/run=0.json")
    return next((path for path in sorted(found) if path.stat().st_size), None)
