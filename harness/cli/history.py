"""`fasttrack history`: trends, moves, flaky checks and catch rates over a folder of bundles."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.selectors import JsonOutput

if TYPE_CHECKING:  # DuckDB and scipy load when a command runs
    from rich.table import Table

    from harness.history import Index, Refreshed
    from harness.history.catches import CatchRates
    from harness.history.flaky import FlakyChecks
    from harness.history.moves import Moves
    from harness.history.series import Selection, Trend

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    help="Ask questions of many bundles. Each command first reads what is new in the folder. A result here "
    "is a reason to look, not a verdict.",
)

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Holds bundles, at any depth.")]
IndexFile = Annotated[
    Path | None, typer.Option("--index", help="Where the index lies; default: under out/cache.")
]
Metric = Annotated[list[str] | None, typer.Option("--metric", help="Only this figure; may be repeated.")]
CheckText = Annotated[str, typer.Option("--check", help="Only checks whose id holds this text.")]
PackText = Annotated[str, typer.Option("--pack", help="Only packs whose name holds this text.")]
MachineText = Annotated[str, typer.Option("--machine", help="Only machines whose name holds this text.")]
Last = Annotated[int, typer.Option("--last", help="Newest points of each series, at most 1000.")]
Svg = Annotated[Path | None, typer.Option("--svg", help="Write a drawing here.")]
SHOWN = 100


@app.command()
def index(
    folder: Folder,
    index_file: IndexFile = None,
    jobs: Annotated[int | None, typer.Option("--jobs", min=1, help="Processes that read.")] = None,
    json: JsonOutput = False,
) -> None:
    """Bring the index up to date, and say what is in it and what was refused."""
    from harness.cli.console import out, print_json

    with _opened(folder, index_file, jobs) as (_, refreshed):
        if json:
            print_json(refreshed)
            return
        out.print(
            f"{refreshed.bundles} bundles: {refreshed.new} read now, {refreshed.gone} gone, "
            f"{refreshed.copies} further copies, {refreshed.refused_count} refused; "
            f"{refreshed.scores} fault scores"
        )
        for refused in refreshed.refused:
            out.print(
                f"refused {_plain(refused.path)}: {_plain(refused.reason)}", markup=False, soft_wrap=True
            )


@app.command()
def trend(
    folder: Folder,
    metric: Metric = None,
    check: CheckText = "",
    pack: PackText = "",
    machine: MachineText = "",
    last: Last = 300,
    index_file: IndexFile = None,
    svg: Svg = None,
    json: JsonOutput = False,
) -> None:
    """A metric over time, for each check (so each cell) and machine."""
    from harness.cli.console import print_json
    from harness.history.plots import draw_trends
    from harness.history.series import trends

    with _opened(folder, index_file) as (opened, _):
        found = trends(opened, _selection(metric, check, pack, machine, last))
    _write(svg, lambda: draw_trends(found))
    if json:
        print_json({"schema_version": 1, "trends": [t.model_dump(mode="json") for t in found]})
    else:
        _show(_trend_table(found), len(found))


@app.command()
def regressions(
    folder: Folder,
    metric: Metric = None,
    check: CheckText = "",
    pack: PackText = "",
    machine: MachineText = "",
    last: Last = 300,
    min_change: Annotated[
        float, typer.Option("--min-change", min=0, help="Smallest relative change to report.")
    ] = 0.02,
    index_file: IndexFile = None,
    svg: Svg = None,
    json: JsonOutput = False,
) -> None:
    """Where metrics moved and which pull request moved them; improvements are listed after regressions."""
    from harness.cli.console import out, print_json
    from harness.history.moves import find_moves
    from harness.history.plots import draw_moves
    from harness.history.series import trends

    selection = _selection(metric, check, pack, machine, last)
    with _opened(folder, index_file) as (opened, _):
        found = find_moves(opened, selection, min_change)
        _write(svg, lambda: draw_moves(found, trends(opened, selection)))
    if json:
        print_json(found)
        return
    _show(_move_table(found), len(found.moves))
    out.print(
        f"{found.series} series, {found.too_short} of them too short to tell; at most 5 % of moves false"
    )


@app.command()
def flaky(
    folder: Folder,
    check: CheckText = "",
    pack: PackText = "",
    machine: MachineText = "",
    index_file: IndexFile = None,
    svg: Svg = None,
    json: JsonOutput = False,
) -> None:
    """Checks that gave two answers about the same commit, code and machine, the surest first."""
    from harness.cli.console import out, print_json
    from harness.history.flaky import find_flaky
    from harness.history.plots import draw_flaky

    with _opened(folder, index_file) as (opened, _):
        found = find_flaky(opened, _selection(None, check, pack, machine, 1))
    _write(svg, lambda: draw_flaky(found))
    if json:
        print_json(found)
        return
    _show(_flaky_table(found), len(found.checks))
    out.print(f"{found.repeated} checks were run more than once about the same thing")


@app.command("catch-rate")
def catch_rate(
    folder: Folder,
    period: Annotated[str, typer.Option("--per", help="day, week or month.")] = "week",
    check: CheckText = "",
    pack: PackText = "",
    machine: MachineText = "",
    index_file: IndexFile = None,
    svg: Svg = None,
    json: JsonOutput = False,
) -> None:
    """How often planted controls and faults were noticed, by stage and kind, over time.

    Faults are those of `fasttrack faults run --out NAME.faults.json`, kept in the folder.
    """
    from harness.cli.console import print_json
    from harness.domain.errors import InputError
    from harness.history.catches import catch_rates
    from harness.history.plots import draw_catches

    if period not in ("day", "week", "month"):
        raise InputError(f"--per {period!r} is no period; give day, week or month")
    with _opened(folder, index_file) as (opened, _):
        found = catch_rates(opened, _selection(None, check, pack, machine, 1), period)  # type: ignore[arg-type]  # looked at above
    _write(svg, lambda: draw_catches(found))
    if json:
        print_json(found)
    else:
        _show(_catch_table(found), len(found.rates))


@contextmanager
def _opened(folder: Path, file: Path | None, jobs: int | None = None) -> Iterator["tuple[Index, Refreshed]"]:
    """The index of a folder, up to date."""
    from harness.cli.console import err, progress_bar
    from harness.cli.finish import CACHE
    from harness.domain.record import sha256_hex
    from harness.history import open_index

    name = sha256_hex(str(folder.resolve()).encode("utf-8", "surrogateescape"))[:16]
    with open_index(file or CACHE / "history" / f"{name}.duckdb") as opened:
        with progress_bar() as show:
            refreshed = opened.refresh(
                folder, lambda done, total: show("reading bundles", done, total, None), jobs
            )
        if refreshed.refused_count:
            err.print(f"{refreshed.refused_count} bundles refused; `fasttrack history index` says why")
        yield opened, refreshed


def _selection(metrics: list[str] | None, check: str, pack: str, machine: str, last: int) -> "Selection":
    from harness.history.series import Selection

    return Selection(tuple(dict.fromkeys(metrics or ())), check, pack, machine, last)


def _write(svg: Path | None, draw: Any) -> None:
    from harness.cli.console import err

    if svg is not None:
        svg.write_text(draw(), encoding="utf-8")
        err.print(f"wrote {svg}", markup=False, soft_wrap=True)


def _table(*columns: str) -> "Table":
    from rich.table import Table

    table = Table(pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _show(table: "Table", count: int) -> None:
    from harness.cli.console import out

    if count:
        out.print(table)
    if count > SHOWN:
        out.print(f"and {count - SHOWN} more; narrow with --check, or take --json")
    if not count:
        out.print("nothing found")


def _trend_table(found: "tuple[Trend, ...]") -> "Table":
    from harness.report.text import number

    table = _table("check, and what of it", "points", "first", "last", "change", "course")
    for t in found[:SHOWN]:
        table.add_row(
            *_escaped(
                f"{t.key.check} · {t.key.metric}, {t.key.machine}",
                len(t.points), number(t.key.metric, t.median_first),
                number(t.key.metric, t.median_last), "-" if t.change is None else f"{t.change:+.1%}",
                _course([p.value for p in t.points]),
            )
        )  # fmt: skip
    return table


def _move_table(found: "Moves") -> "Table":
    from harness.report.text import number

    table = _table(
        "kind", "check", "metric", "before", "after", "change", "since", "moved by", "also changed"
    )
    for m in found.moves[:SHOWN]:
        names = [f"#{c.pr}" if c.pr is not None else c.head[:12] for c in (m.cause, *m.candidates)]
        first, *others = dict.fromkeys(names)
        alone = (
            f"{first} (or {', '.join(others[:4])}{', ...' if len(others) > 4 else ''})" if others else first
        )
        table.add_row(
            *_escaped(
                m.kind, m.key.check, m.key.metric, number(m.key.metric, m.before),
                number(m.key.metric, m.after), f"{m.change:+.1%}", _day(m.cause.created_us), alone,
                ", ".join(m.also_changed) or "-",
            )
        )  # fmt: skip
    return table


def _flaky_table(found: "FlakyChecks") -> "Table":
    table = _table("check", "disagreeing", "of pairs", "share", "95 % interval", "answers")
    for c in found.checks[:SHOWN]:
        answers = ", ".join(f"{count} {status}" for status, count in c.statuses)
        table.add_row(
            *_escaped(
                c.check, c.disagreeing, c.pairs, f"{c.share:.0%}", f"{c.low:.0%} to {c.high:.0%}", answers
            )
        )
    return table


def _catch_table(found: "CatchRates") -> "Table":
    table = _table("since", "stage", "control", "noticed", "runs", "share", "95 % interval")
    for r in found.rates[-SHOWN:]:
        interval = f"{r.low:.1%} to {r.high:.1%}"
        table.add_row(
            *_escaped(_day(r.start_us), r.stage, r.control, r.noticed, r.runs, f"{r.share:.1%}", interval)
        )
    return table


def _course(values: list[float]) -> str:
    """The series as a line of at most sixteen blocks, each a mean."""
    size = min(16, len(values))
    means = []
    for i in range(size):
        part = values[i * len(values) // size : (i + 1) * len(values) // size]
        means.append(sum(part) / len(part))
    low, spread = min(means), max(means) - min(means)
    return "".join("▁▂▃▄▅▆▇█"[int(7 * (m - low) / spread) if spread else 3] for m in means)


def _escaped(*values: object) -> list[str]:
    """Cells of a table: nothing in them acts on a terminal."""
    from rich.markup import escape

    return [escape(_plain(str(value))) for value in values]


def _plain(text: str) -> str:
    from harness.report.text import plain

    return plain(text, 300)


def _day(time_us: int) -> str:
    return datetime.fromtimestamp(time_us / 1e6, UTC).strftime("%Y-%m-%d")
