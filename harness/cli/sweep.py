"""`fasttrack sweep run|compare`."""

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.evals import BundleA, BundleB
from harness.cli.selectors import (
    AllowDirty,
    Base,
    Full,
    Head,
    JsonOutput,
    PackName,
    PolicyName,
    Repo,
    Selection,
    TierName,
)

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True)


@app.command()
def run(
    name: Annotated[list[str] | None, typer.Argument(help="Which; all of the policy where none.")] = None,
    pack: PackName = "k3_decode",
    policy: PolicyName = "smoke",
    repo: Repo = Path(),
    base: Base = "HEAD~1",
    head: Head = "HEAD",
    tier: TierName = "auto",
    out: Annotated[Path, typer.Option("--out")] = Path("out/sweep"),
    allow_dirty: AllowDirty = False,
    full: Full = False,
    json: JsonOutput = False,
) -> None:
    """Time decode steps, stock against optimised, into a bundle."""
    from harness.cli.finish import validate_selection

    names = tuple(name or ())
    selection = Selection(
        pack, policy, repo, base, head, tier, ("sweep",), None, allow_dirty, full, None, None, names
    )
    raise typer.Exit(validate_selection(selection, out, resume=False, keep_going=True, as_json=json))


@app.command()
def compare(first: BundleA, second: BundleB, json: JsonOutput = False) -> None:
    """Compare the sweeps of two bundles: 0 alike, 1 not, 2 not comparable."""
    from harness.cli.compare import compare_stage
    from harness.domain.check import StageName

    raise typer.Exit(compare_stage(first, second, StageName.SWEEP, as_json=json))
