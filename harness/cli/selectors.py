"""What `validate`, `plan` and `run` share: the options that select pack, policy, change, tier and stages,
made into a plan.

Also the console: results go to standard output, progress to standard error, plain when that is no terminal.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from harness.domain.check import StageName
from harness.domain.errors import InputError

__all__ = [
    "AllowDirty", "Base", "ClaimFile", "Full", "Head", "JsonOutput", "KeepGoing", "MachineFile", "Nonce",
    "Out", "PackName", "PolicyName", "Repo", "Resume", "Selection", "StageOption", "TierName",
    "make_selected_plan", ]  # fmt: skip

PackName = Annotated[str, typer.Option("--pack", help="Kernel pack to judge.")]
PolicyName = Annotated[str, typer.Option("--policy", help="Policy by name (under policies/) or file.")]
Repo = Annotated[Path, typer.Option("--repo", help="Git repository of the change.")]
Base = Annotated[str, typer.Option("--base", help="Where the change starts: a git revision.")]
Head = Annotated[str, typer.Option("--head", help="Where the change ends.")]
TierName = Annotated[str, typer.Option("--tier", help="auto, smoke, rank, node or claim.")]
StageOption = Annotated[list[str] | None, typer.Option("--stage", help="Only this stage; may be repeated.")]
Out = Annotated[Path, typer.Option("--out", help="Folder of the run and its bundle.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with the run in --out; repeats no finished check.")
]
KeepGoing = Annotated[
    bool, typer.Option("--keep-going", help="Run later stages after an earlier one failed.")
]
JsonOutput = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
ClaimFile = Annotated[Path | None, typer.Option("--claim", help="Claim file; default: the pack's own.")]
AllowDirty = Annotated[
    bool, typer.Option("--allow-dirty", help="Run on uncommitted code; the gate refuses such a bundle.")
]
Full = Annotated[
    bool, typer.Option("--full", help="Every cell and item, not the subset sized for a quick run.")
]
MachineFile = Annotated[
    Path | None,
    typer.Option("--machine", help="Plan for the machine that `fasttrack doctor --json` described."),
]
Nonce = Annotated[
    str | None, typer.Option("--nonce", hidden=True, help="Fix the nonce (tests, reproduction).")
]


@dataclass(frozen=True, slots=True)
class Selection:
    """The selectors of one command line."""

    pack: str
    policy: str
    repo: Path
    base: str
    head: str
    tier: str
    stages: tuple[str, ...] = ()
    claim: Path | None = None
    allow_dirty: bool = False
    full: bool = False
    machine: Path | None = None
    nonce: str | None = None
    subjects: tuple[str, ...] = ()
    """Only checks about these subjects or ops; empty: all."""


def make_selected_plan(selection: Selection) -> Any:
    """The plan (`domain.plan.Plan`) that the selectors ask for; raises `InputError` on bad input."""
    from harness.documents import load_claim, load_policy_set
    from harness.domain.stage import PlanRequest
    from harness.engines.packs import harness_digest, load_pack, pack_digest
    from harness.planner import CodeDigests, make_nonce, make_plan, plan_seed, resolve_tier
    from harness.repository import Limits, load_change

    stages = _parse_stages(selection.stages)
    pack = load_pack(selection.pack)
    claim = load_claim(selection.claim or pack.claim_file())
    policy, zones, rules = load_policy_set(selection.policy)
    machine = _machine(selection.machine)
    tier = resolve_tier(selection.tier, machine)
    change, tree = load_change(
        selection.repo,
        selection.base,
        selection.head,
        Limits(policy.max_changed_files, policy.max_diff_bytes),
    )
    tree.close()
    if change.is_dirty and not selection.allow_dirty:
        raise InputError(
            f"{selection.repo}: the working tree differs from {selection.head} ({change.head[:12]}), so "
            "results "
            "would not be about that commit; commit the changes, or pass --allow-dirty (the gate refuses "
            "such a bundle)"
        )
    nonce = selection.nonce or make_nonce()
    request = PlanRequest(
        pack=pack, claim=claim, policy=policy, zones=zones, rules=rules,
        change=change, machine=machine, tier=tier, is_full=selection.full, seed=plan_seed(change.head, nonce),
    )  # fmt: skip
    digests = CodeDigests(harness_digest(), pack_digest(pack))
    return make_plan(request, digests, nonce, stages, selection.subjects)


def _parse_stages(names: tuple[str, ...]) -> tuple[StageName, ...]:
    known = [stage.value for stage in StageName]
    wrong = [name for name in names if name not in known]
    if wrong:
        raise InputError(f"--stage {wrong[0]!r} is no stage; the stages are {', '.join(known)}")
    return tuple(StageName(name) for name in known if name in names) or tuple(StageName)


def _machine(file: Path | None) -> Any:
    from pydantic import ValidationError

    from harness.domain.machine import Machine
    from harness.measure.machine import read_machine

    if file is None:
        return read_machine()
    try:
        return Machine.model_validate_json(file.read_bytes())
    except (OSError, ValidationError) as error:
        raise InputError(
            f"{file}: no machine description can be read here ({str(error).splitlines()[0]}); make one with "
            "`fasttrack doctor --json > FILE` on that machine"
        ) from error
