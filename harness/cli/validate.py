"""`fasttrack validate`: every check of the policy that this machine can run, then bundle, report and what the
gate would say.
"""

from pathlib import Path

import typer

from harness.cli.selectors import (
    AllowDirty,
    Base,
    ClaimFile,
    Full,
    Head,
    JsonOutput,
    KeepGoing,
    Nonce,
    Out,
    PackName,
    PolicyName,
    Repo,
    Resume,
    Selection,
    StageOption,
    TierName,
)

__all__ = ["app"]

app = typer.Typer()


@app.command()
def validate(
    pack: PackName = "k3_decode",
    policy: PolicyName = "fast_track",
    repo: Repo = Path(),
    base: Base = "HEAD~1",
    head: Head = "HEAD",
    tier: TierName = "auto",
    stage: StageOption = None,
    out: Out = Path("out/validate"),
    resume: Resume = False,
    keep_going: KeepGoing = False,
    claim: ClaimFile = None,
    allow_dirty: AllowDirty = False,
    full: Full = False,
    nonce: Nonce = None,
    json: JsonOutput = False,
) -> None:
    """Run every check of the policy that this machine can run; write a bundle and its report.

    Exit code: 0 when every check planned for the tier passed, 1 when one did not, 2 when it could not be
    judged.
    """
    from harness.cli.finish import validate_selection

    selection = Selection(
        pack, policy, repo, base, head, tier, tuple(stage or ()), claim, allow_dirty, full, None, nonce
    )
    raise typer.Exit(validate_selection(selection, out, resume=resume, keep_going=keep_going, as_json=json))
