"""`fasttrack plan`: what would run, what cannot run here and why, and how long it takes."""

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
    MachineFile,
    Nonce,
    PackName,
    PolicyName,
    Repo,
    Selection,
    StageOption,
    TierName,
    make_selected_plan,
)

__all__ = ["app"]

app = typer.Typer()


@app.command()
def plan(
    pack: PackName = "k3_decode",
    policy: PolicyName = "fast_track",
    repo: Repo = Path(),
    base: Base = "HEAD~1",
    head: Head = "HEAD",
    tier: TierName = "auto",
    stage: StageOption = None,
    claim: ClaimFile = None,
    allow_dirty: AllowDirty = False,
    full: Full = False,
    machine: MachineFile = None,
    nonce: Nonce = None,
    save: Annotated[
        Path | None, typer.Option("--save", help="Write the plan here, for `fasttrack worker`.")
    ] = None,
    json: JsonOutput = False,
) -> None:
    """Show what would run, what cannot run here and why, and how long it takes. Runs nothing."""
    from harness.cli.console import out, outcome_table, print_json
    from harness.planner import estimate_costs

    made = make_selected_plan(
        Selection(
            pack, policy, repo, base, head, tier, tuple(stage or ()), claim, allow_dirty, full, machine, nonce
        )
    )
    if save is not None:
        save.parent.mkdir(parents=True, exist_ok=True)
        save.write_bytes(made.canonical())
    if json:
        print_json(made)
        return
    out.print(
        f"{made.change.base[:12]}..{made.change.head[:12]} of {made.change.repository}: "
        f"{len(made.change.files)} "
        f"files, {made.change.added_lines} lines added; policy {made.policy.name}, tier {made.tier.value}",
        markup=False,
    )
    for cost in estimate_costs(made):
        gone = f", {cost.unavailable} cannot run here" if cost.unavailable else ""
        out.print(f"  {cost.stage.value}: {cost.checks} checks, about {cost.seconds:.0f} s{gone}")
    rows = [
        ("SKIPPED" if check.unavailable else "will run", check.id, check.unavailable or check.proves)
        for check in made.checks
    ]
    out.print(outcome_table(f"plan {made.digest()[:12]}", rows))
