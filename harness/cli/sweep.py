"""`fasttrack sweep run|compare|reconcile|replay|null`."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.evals import BundleA, BundleB, EngineName, ServerFile
from harness.cli.selectors import (
    Address,
    ExecutorName,
    JsonOutput,
    Out,
    PackName,
    Resume,
    Selection,
    selecting,
)

if TYPE_CHECKING:  # records load when a command runs
    from harness.domain.check import Outcome
    from harness.domain.null_run import NullRun
    from harness.engines.bench_serve import Load
    from harness.evidence.reader import Bundle
    from harness.measure.levels import Level

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True)
DEFAULT_BATCHES = (1, 8)
"""Requests at once of a served sweep."""
NULL_CELL = "sweep/decode_step/cpu.tp1.dcp1.b1.c64"
"""Repeated by `null`: the shortest cell has the most noise."""
Batches = Annotated[
    list[int] | None, typer.Option("--batch", min=1, help="Requests at once, of servers; may be repeated.")
]
InputTokens = Annotated[
    int,
    typer.Option("--input", min=1, help="Tokens of a prompt, of servers: 1 times decode alone, more a mix."),
]
BenchProgram = Annotated[
    str, typer.Option("--bench", help="serve: vllm bench serve; sweep: vllm bench sweep starts the servers.")
]
OutputTokens = Annotated[int, typer.Option("--output", min=2, help="Tokens of an answer, of servers.")]


@app.command()
@selecting(without=("stage", "machine"), policy="smoke")
def run(
    selection: Selection,
    name: Annotated[list[str] | None, typer.Argument(help="Which; all of the policy where none.")] = None,
    out: Out = Path("out/sweep"),
    resume: Resume = False,
    executor: ExecutorName = "local",
    address: Address = None,
    engine: EngineName = "in-process",
    server: ServerFile = None,
    batch: Batches = None,
    tokens: OutputTokens = 100,
    prompt: InputTokens = 1,
    bench: BenchProgram = "serve",
    json: JsonOutput = False,
) -> None:
    """Time decode steps, stock against optimised, into a bundle; whole servers with --engine vllm.

    Servers are timed by vLLM's own load generator into a report, which no gate counts: 0 where the optimised
    one is not slower beyond noise, 1 where it is, 2 where the comparison is invalid.
    """
    if engine != "in-process" or server is not None:
        raise typer.Exit(
            bench_servers(engine, server, _loads(batch, prompt, tokens), out, bench, as_json=json)
        )
    from harness.cli.finish import RunOptions, cluster_of, validate_selection

    chosen = replace(selection, stages=("sweep",), only=tuple(name or selection.only))
    how = RunOptions(resume, True, json, cluster_of(executor, address))
    raise typer.Exit(validate_selection(chosen, out, how))


def _loads(batches: list[int] | None, prompt: int, tokens: int) -> list["Load"]:
    from harness.engines.bench_serve import Load

    return [
        Load(concurrency=size, input_tokens=prompt, output_tokens=tokens)
        for size in batches or DEFAULT_BATCHES
    ]


def bench_servers(
    engine: str, server: Path | None, loads: list["Load"], out: Path, bench: str, *, as_json: bool
) -> int:
    """Exit code of a timed comparison of two servers; prints it and writes `bench.json` into `out`."""
    from harness.cli.console import err, print_json
    from harness.cli.console import out as console
    from harness.domain.errors import InputError
    from harness.engines.bench_serve import bench_arms
    from harness.engines.bench_sweep import sweep_arms
    from harness.engines.served import load_settings

    if engine != "vllm" or server is None:
        raise InputError("servers are timed with `--engine vllm --server FILE`, both together")
    if bench not in ("serve", "sweep"):
        raise InputError(f"--bench is serve or sweep, as in `vllm bench serve`; not {bench!r}")
    time_arms = bench_arms if bench == "serve" else sweep_arms
    report = time_arms(load_settings(server), loads, out, lambda words: err.print(words, markup=False))
    (out / "bench.json").write_text(report.model_dump_json(indent=1), encoding="utf-8")
    if as_json:
        print_json(report)
    for row in () if as_json else report.rows:
        words = f"{row.load.concurrency} at once: {row.status}, {row.words}"
        console.print(words, markup=False, soft_wrap=True)
    if any(row.status == "INVALID" for row in report.rows):
        return 2
    return int(any(row.high is not None and row.high < 1 - float(row.noise or 0) for row in report.rows))


@app.command()
def compare(first: BundleA, second: BundleB, json: JsonOutput = False) -> None:
    """Say whether two sweeps can be compared, then how much faster the second is in each cell.

    Exit code: 0 alike, 1 not, 2 not comparable.
    """
    from harness.cli.console import out, outcome_table, print_json
    from harness.evidence.pack import bundle_folder
    from harness.evidence.reader import open_bundle
    from harness.stages.sweep.comparing import compare_sweeps

    with bundle_folder(first) as one_folder, bundle_folder(second) as two_folder:
        one, two = open_bundle(one_folder), open_bundle(two_folder)
        found = compare_sweeps((one.plan, one.outcomes), (two.plan, two.outcomes))
    if json:
        print_json({**found.model_dump(mode="json"), "exit_code": found.exit_code})
        raise typer.Exit(found.exit_code)
    for obstacle in found.obstacles:
        out.print(f"not comparable: {obstacle}", markup=False, soft_wrap=True)
    if found.cells:
        rows = [
            (
                "-" if c.ratio is None else f"{c.ratio:.2f}x [{c.low:.2f}, {c.high:.2f}]",
                c.check,
                c.words if c.first_us is None else f"{c.first_us:.1f} us and {c.second_us:.1f} us: {c.words}",
            )
            for c in found.cells
        ]  # fmt: skip
        out.print(outcome_table(f"{first.name}, then {second.name}", rows))
    raise typer.Exit(found.exit_code)


@app.command("replay")
def replay_trace(
    server: Annotated[Path, typer.Option("--server", help="Settings of both servers (YAML).", exists=True)],
    trace: Annotated[
        Path | None, typer.Option("--trace", help="A trace of yours (JSONL); drawn where none.", exists=True)
    ] = None,
    users: Annotated[int, typer.Option("--users", min=1, max=64, help="Users of a drawn trace.")] = 4,
    out: Out = Path("out/replay"),
    json: JsonOutput = False,
) -> None:
    """Replay agentic traffic against both servers: turns, tool pauses, branches; tokens a second by user.

    Exit code: 0 where the optimised server is not slower beyond noise, 1 where it is, 2 where the comparison
    is invalid. The report is counted by no gate.
    """
    from harness.cli.console import err, print_json
    from harness.cli.console import out as console
    from harness.engines.replay_arms import replay_arms, vocabulary_of
    from harness.engines.served import load_settings
    from harness.engines.traces import draw_trace, load_trace

    settings = load_settings(server)
    asked = draw_trace(users) if trace is None else load_trace(trace)
    vocabulary = vocabulary_of(settings.model)
    report = replay_arms(settings, asked, vocabulary, out, lambda words: err.print(words, markup=False))
    (out / "replay.json").write_text(report.model_dump_json(indent=1), encoding="utf-8")
    if json:
        print_json(report)
    for run in () if json else report.runs:
        got = run.got
        told = "no interactivity" if got is None else (
            f"P50 {got.p50:.1f}, P90 {got.p90:.1f} tokens/s a user; answers P50 "
            f"{got.latency_p50_ms:.0f}, P90 {got.latency_p90_ms:.0f} ms"
        )  # fmt: skip
        console.print(f"{run.arm}, run {run.turn + 1}: {told}", markup=False, soft_wrap=True)
    if not json:
        console.print(f"{report.status}: {report.words}", markup=False, soft_wrap=True)
    slower = report.high is not None and report.high < 1 - float(report.noise or 0)
    raise typer.Exit(2 if report.status == "INVALID" else int(slower))


@app.command()
def reconcile(
    bundles: Annotated[list[Path], typer.Argument(help="Bundles of one machine and build.", exists=True)],
    json: JsonOutput = False,
) -> None:
    """Say whether the gains of single ops explain the layer's, and layers' the step's. Samples are judged
    anew, so that bundles of several versions are held to one rule.

    Exit code: 0 explained, 1 a gap is left, 2 nothing names parts or the bundles are of unlike machines.
    """
    from contextlib import ExitStack

    from harness.cli.console import out, outcome_table, print_json
    from harness.domain.check import StageName
    from harness.domain.errors import InputError
    from harness.evidence.pack import bundle_folder
    from harness.evidence.reader import open_bundle
    from harness.measure.levels import reconciled
    from harness.stages.sweep.planning import all_sweeps, with_parts

    with ExitStack() as stack:
        read = [open_bundle(stack.enter_context(bundle_folder(path))) for path in bundles]
        if len({(b.plan.machine.gpus, b.plan.machine.driver, b.plan.machine.cpu_model) for b in read}) > 1:
            raise InputError("the bundles are of unlike machines, so their times do not add up")
        sweeps = all_sweeps()
        asked = {c.id: with_parts(c, sweeps) for b in read for c in b.plan.of_stage(StageName.SWEEP)}
        judged = [(o.check, _today(b, o)) for b in read for o in b.outcomes if o.check in asked]
        levels = reconciled([(asked[check], outcome) for check, outcome in judged])
    rows = [(f"{one.saved.us:.1f} us", one.check.id, f"{_by(one)}: {one.words()}") for one in levels]
    if json:
        print_json({"levels": [
            {"check": one.check.id, "saved": one.saved, "explained": one.explained, "gap": one.gap,
             "missing": one.missing, "is_explained": one.is_explained} for one in levels
        ]})  # fmt: skip
    elif rows:
        out.print(outcome_table("saved, and what explains it", rows))
    else:
        out.print("no cell here names its parts")
    raise typer.Exit(2 if not levels else int(not all(one.is_explained for one in levels)))


def _today(bundle: "Bundle", outcome: "Outcome") -> "Outcome":
    """An outcome as its samples are judged now; as it stands where it has none."""
    from harness.pipeline import rejudge

    again = rejudge(bundle.plan)(bundle.check(outcome.check), bundle.samples(outcome.check))
    return outcome if again is None else again


def _by(level: "Level") -> str:
    explained = level.explained
    return f"parts {explained.us:.1f} us [{explained.low:.1f}, {explained.high:.1f}]"


@app.command("null")
def null_run(
    pack: PackName = "k3_decode",
    cell: Annotated[str, typer.Option("--cell", help="How the id of the repeated check begins.")] = NULL_CELL,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Runs of stock against itself.")] = 50,
    out: Annotated[Path | None, typer.Option("--out", help="File for the record, with every time.")] = None,
    read: Annotated[Path | None, typer.Option("--read", help="Judge a record again; run nothing.")] = None,
    json: JsonOutput = False,
) -> None:
    """Run stock against itself, time after time, and count how often the verdict accuses it.

    Exit code: 0 inside the stated false-alarm rate, 1 outside.
    """
    from harness.cli.console import out as console
    from harness.cli.console import print_json
    from harness.domain.null_run import NullRun
    from harness.stages.sweep.null import rejudged

    if read is not None:
        from harness.documents.load import load_record

        found = rejudged(load_record(NullRun, read))
    else:
        found = _repeated(pack, cell, repeats)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(found.canonical() + b"\n")
    if json:
        print_json(found)
    else:
        console.print(found.words(), markup=False, soft_wrap=True)
    raise typer.Exit(int(not found.is_inside))


def _repeated(pack: str, cell: str, repeats: int) -> "NullRun":
    """The record of so many repeats of a planned cell, made here and now."""
    import tempfile
    from datetime import UTC, datetime

    from harness.cli.console import progress_bar
    from harness.domain.check import StageName
    from harness.domain.errors import InputError
    from harness.domain.null_run import NullRun
    from harness.engines.packs import harness_digest
    from harness.faults.bench import Bench
    from harness.stages.sweep.null import null_check, null_repeats, stock_units

    with tempfile.TemporaryDirectory(prefix="fasttrack-null-") as folder, progress_bar() as show:
        bench = Bench(Path(folder), pack)
        planned = [c for c in bench.plan(StageName.SWEEP).checks if c.unavailable is None]
        check = next((c for c in planned if c.id.startswith(cell)), None)
        if check is None:
            raise InputError(f"no planned check's id begins with {cell!r}; `fasttrack plan --stage sweep`")
        check, context, digest = null_check(check), bench.context(bench.request), harness_digest()
        done = []
        for repeat in null_repeats(check, lambda: stock_units(check, context), repeats):
            done.append(repeat)
            show(f"{check.id}: {repeat.status.value}", len(done), repeats, None)
    return NullRun(
        harness_digest=digest, created=datetime.now(UTC).replace(microsecond=0),
        machine=bench.request.machine, check=check, repeats=tuple(done),
        work=f"decode steps of {check.parameter('model')}, four sessions of stock a repeat",
    )  # fmt: skip
