"""`fasttrack sweep run|compare`."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.evals import BundleA, BundleB
from harness.cli.selectors import Address, ExecutorName, JsonOutput, Out, Resume, Selection, selecting

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True)


@app.command()
@selecting(without=("stage", "machine"), policy="smoke")
def run(
    selection: Selection,
    name: Annotated[list[str] | None, typer.Argument(help="Which; all of the policy where none.")] = None,
    out: Out = Path("out/sweep"),
    resume: Resume = False,
    executor: ExecutorName = "local",
    address: Address = None,
    json: JsonOutput = False,
) -> None:
    """Time decode steps, stock against optimised, into a bundle."""
    from harness.cli.finish import RunOptions, cluster_of, validate_selection

    chosen = replace(selection, stages=("sweep",), only=tuple(name or selection.only))
    how = RunOptions(resume, True, json, cluster_of(executor, address))
    raise typer.Exit(validate_selection(chosen, out, how))


@app.command()
def compare(first: BundleA, second: BundleB, json: JsonOutput = False) -> None:
    """Compare the sweeps of two bundles: 0 alike, 1 not, 2 not comparable."""
    from harness.cli.compare import compare_stage
    from harness.domain.check import StageName

    raise typer.Exit(compare_stage(first, second, StageName.SWEEP, as_json=json))
