"""`fasttrack faults list|run`: plant every known fault in turn and say which stage objected."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.selectors import JsonOutput, PackName

if TYPE_CHECKING:  # records load when a command runs
    from harness.domain.faults import FaultResult, FaultScore

__all__ = ["app"]

MARK_WIDTH = 3
"""Letters of a stage's name over its column: the matrix fits a terminal of 80 columns."""
app = typer.Typer(no_args_is_help=True, help="List known faults; plant each one and its repaired twin.")
Names = Annotated[list[str] | None, typer.Argument(help="Faults by name; default: all.")]
MARKS = {
    "caught": "[green]caught[/]",
    "caught_elsewhere": "[yellow]elsewhere[/]",
    "missed": "[bold red]missed[/]",
    "skipped": "[dim]skipped[/]",
    "broken": "[magenta]broken[/]",
}


@app.command("list")
def list_faults(json: JsonOutput = False) -> None:
    """Faults with the report each stands for, what is patched, and who must notice."""
    from harness.cli.console import out, print_json
    from harness.faults.registry import registered_faults

    rows = [
        {
            "suite": r.suite, "name": r.fault.name, "title": r.fault.title, "report": r.fault.report,
            "target": r.fault.target, "expected": r.fault.expected, "tier": r.fault.tier.value,
            "gap": r.fault.gap,
        }
        for r in registered_faults()
    ]  # fmt: skip
    if json:
        print_json({"faults": rows})
        return
    for row in rows:
        gap = f" [red](known gap: {row['gap']})[/]" if row["gap"] else ""
        out.print(f"[bold]{row['name']}[/]  {row['target']} -> {row['expected']}, {row['tier']}{gap}")
        out.print(f"  {row['title']}", markup=False)
        out.print(f"  {row['report']}", markup=False)


@app.command("run")
def run_faults(
    names: Names = None,
    pack: PackName = "k3_decode",
    tier: Annotated[str, typer.Option("--tier", help="smoke, rank, node or claim.")] = "smoke",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of all inputs.")] = 0,
    seeds: Annotated[
        int,
        typer.Option("--seeds", min=0, help="Plant nothing; count false alarms of the statistical checks."),
    ] = 0,
    workers: Annotated[int, typer.Option("--workers", min=1, help="Faults planted at a time.")] = 2,
    cache: Annotated[
        Path | None, typer.Option("--cache", help="Folder of compiled kernels; what it lacks is compiled.")
    ] = None,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="File for the record (JSON; with --seeds lines are added).")
    ] = None,
    json: JsonOutput = False,
) -> None:
    """Plant each fault, then its repaired twin; exit 0 when all went as expected.

    With --seeds N: the statistical checks on the pack as it is, N seeds from --seed on; seeds that the
    --out file holds already are not run again. Exit 0 when accusations are no more than the policy states.

    Expected: every fault is caught but those that name a gap, none is broken, and no deterministic check
    objects to a twin.
    """
    from harness.cli.console import out, print_json
    from harness.domain.machine import Tier
    from harness.faults.run import SuiteOptions, run_suite

    if seeds:
        _count_alarms(pack, range(seed, seed + seeds), out_file, json)
    options = SuiteOptions(
        pack=pack, tier=Tier(tier), seed=seed, names=tuple(names or ()), workers=workers,
        cache=str(cache.resolve()) if cache is not None else "",
    )  # fmt: skip
    score = run_suite(options, _say)
    if out_file is not None:
        out_file.parent.mkdir(parents=True, exist_ok=True)
        out_file.write_bytes(score.canonical() + b"\n")
    if json:
        print_json(score)
    else:
        out.print(_matrix(score))
        _print_misses(score)
        out.print(score.words(), markup=False, soft_wrap=True)
    raise typer.Exit(0 if score.is_as_expected else 1)


def _count_alarms(pack: str, seeds: range, out_file: Path | None, json: bool) -> None:
    """Run the seeds that are still to run, and end the command."""
    from harness.cli.console import err, out, print_json
    from harness.documents import load_policy_set
    from harness.faults.alarms import STATISTICAL_CHECKS, alarm_words, read_runs, run_seed

    runs = [] if out_file is None else list(read_runs(out_file))
    for seed in seeds:
        if any(run.seed == seed for run in runs):
            continue
        run = run_seed(pack, seed, STATISTICAL_CHECKS, lambda check, s=seed: err.print(f"seed {s}: {check}"))  # type: ignore[misc]  # bound per seed
        runs.append(run)
        if out_file is not None:
            out_file.parent.mkdir(parents=True, exist_ok=True)
            with out_file.open("ab") as sink:
                sink.write(run.canonical() + b"\n")
    allowed = load_policy_set("smoke")[0].statistics.family_false_alarm
    if json:
        print_json({"runs": [run.model_dump(mode="json") for run in runs]})
    else:
        out.print(alarm_words(runs, allowed), markup=False, soft_wrap=True)
    accused = sum(bool(run.alarms) for run in runs)
    raise typer.Exit(0 if accused <= allowed * len(runs) else 1)


def _say(result: "FaultResult", done: int, total: int) -> None:
    from harness.cli.console import err

    err.print(
        f"[{done}/{total}] {result.verdict:<16} {result.name} ({result.duration_s:.1f} s)", markup=False
    )


def _matrix(score: "FaultScore") -> Any:
    """Faults by stage: the mark of the status that decided, in bold where it caught the fault."""
    from rich.table import Table

    from harness.domain.faults import COLUMNS
    from harness.report.text import STATUS_MARKS

    table = Table(
        title=f"{len(score.results)} faults, tier {score.tier.value}", title_justify="left", pad_edge=False
    )
    seen = {cell.seen.status for result in score.results for cell in result.cells}
    legend = ", ".join(f"{STATUS_MARKS.get(status, status[0])} {status}" for status in sorted(seen))
    table.caption, table.caption_justify = f"{legend}, ? not looked at by the stage that should", "left"
    table.add_column("fault", overflow="fold", ratio=1)
    table.add_column("verdict")
    for column in COLUMNS:
        table.add_column(column[:MARK_WIDTH], justify="center", no_wrap=True)
    for result in score.results:
        cells = {cell.column: cell for cell in result.cells}
        shown = [_cell(cells.get(column), column == result.expected) for column in COLUMNS]
        table.add_row(result.name, MARKS[result.verdict], *shown)
    return table


def _cell(cell: Any, is_expected: bool) -> str:
    if cell is None:
        return "[dim]?[/]" if is_expected else ""
    from harness.report.text import STATUS_MARKS

    mark = STATUS_MARKS.get(cell.seen.status, cell.seen.status[0])
    return f"[bold]{mark}[/]" if cell.is_caught else f"[dim]{mark}[/]"


def _print_misses(score: "FaultScore") -> None:
    from harness.cli.console import out

    for result in score.results:
        if result.verdict in ("missed", "broken"):
            why = result.reason or "no check objected, and no gap is named"
            out.print(f"{result.verdict} {result.name}: {why}", markup=False, soft_wrap=True)
        for alarm in result.false_alarms:
            kind = "statistical" if alarm.is_statistical else "deterministic"
            out.print(
                f"false alarm ({kind}) on the twin of {result.name}: {alarm.subject} {alarm.status} "
                f"{alarm.words}",
                markup=False, soft_wrap=True,
            )  # fmt: skip
