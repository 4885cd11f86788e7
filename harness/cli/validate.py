"""`fasttrack validate`: every check of the policy that this machine can run, then bundle, report and what the
gate would say.
"""

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.selectors import (
    Address,
    ExecutorName,
    JsonOutput,
    KeepGoing,
    Out,
    Resume,
    Selection,
    selecting,
)

__all__ = ["app"]

app = typer.Typer()


@app.command()
@selecting(without=("machine",))
def validate(
    selection: Selection,
    out: Out = Path("out/validate"),
    resume: Resume = False,
    keep_going: KeepGoing = False,
    journal: Annotated[
        Path | None, typer.Option("--journal", help="An agent's journal, to travel in the bundle.")
    ] = None,
    executor: ExecutorName = "local",
    address: Address = None,
    json: JsonOutput = False,
) -> None:
    """Run every check of the policy that this machine can run; write a bundle and its report.

    Exit code: 0 when every check planned for the tier passed, 1 when one did not, 2 when it could not be
    judged.
    """
    from harness.cli.finish import RunOptions, cluster_of, validate_selection

    how = RunOptions(resume, keep_going, json, cluster_of(executor, address), journal)
    raise typer.Exit(validate_selection(selection, out, how))
