"""`fasttrack run STAGE`: one stage of a validation, with the same selectors, bundle and exit codes."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.selectors import Address, ExecutorName, JsonOutput, Resume, Selection, selecting

__all__ = ["app"]

app = typer.Typer()


@app.command()
@selecting(without=("stage", "machine"))
def run(
    selection: Selection,
    stage: Annotated[str, typer.Argument(help="isolation, audit, kernels, coverage, evals or sweep.")],
    out: Annotated[Path | None, typer.Option("--out", help="Default: out/STAGE.")] = None,
    resume: Resume = False,
    executor: ExecutorName = "local",
    address: Address = None,
    json: JsonOutput = False,
) -> None:
    """Run one stage; the gate still asks for the others."""
    from harness.cli.finish import RunOptions, cluster_of, validate_selection

    chosen = replace(selection, stages=(stage,))
    folder = out or Path("out") / stage
    how = RunOptions(resume, True, json, cluster_of(executor, address))
    raise typer.Exit(validate_selection(chosen, folder, how))
