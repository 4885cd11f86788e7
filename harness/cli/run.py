"""`fasttrack run STAGE`: one stage of a validation, with the same selectors, bundle and exit codes."""

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.selectors import (
    AllowDirty,
    Base,
    ClaimFile,
    Full,
    Head,
    JsonOutput,
    Nonce,
    PackName,
    PolicyName,
    Repo,
    Resume,
    Selection,
    TierName,
)

__all__ = ["app"]

app = typer.Typer()


@app.command()
def run(
    stage: Annotated[str, typer.Argument(help="isolation, audit, kernels, coverage, evals or sweep.")],
    pack: PackName = "k3_decode",
    policy: PolicyName = "fast_track",
    repo: Repo = Path(),
    base: Base = "HEAD~1",
    head: Head = "HEAD",
    tier: TierName = "auto",
    out: Annotated[Path | None, typer.Option("--out", help="Default: out/STAGE.")] = None,
    resume: Resume = False,
    claim: ClaimFile = None,
    allow_dirty: AllowDirty = False,
    full: Full = False,
    nonce: Nonce = None,
    json: JsonOutput = False,
) -> None:
    """Run one stage; the gate still asks for the others."""
    from harness.cli.finish import validate_selection

    selection = Selection(
        pack, policy, repo, base, head, tier, (stage,), claim, allow_dirty, full, None, nonce
    )
    folder = out or Path("out") / stage
    raise typer.Exit(validate_selection(selection, folder, resume=resume, keep_going=True, as_json=json))
