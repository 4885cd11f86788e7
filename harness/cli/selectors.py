"""Which pack, policy, change, tier and stages: the options that commands share, said once, made into a plan.

`selecting` gives a command those options; the command gets a `Selection` in their place. Nothing that a plan
needs is imported before one is made, so that `--help` stays quick.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec

import typer

from harness.domain.check import StageName
from harness.domain.errors import InputError

__all__ = [
    "Address", "ClaimFile", "ExecutorName", "Full", "JsonOutput", "KeepGoing", "Out", "PackName",
    "PolicyName", "Resume", "Selection", "make_selected_plan", "selecting",
]  # fmt: skip

P = ParamSpec("P")
PackName = Annotated[str, typer.Option("--pack", help="Kernel pack to judge.")]
PolicyName = Annotated[str, typer.Option("--policy", help="Policy by name (under policies/) or file.")]
ClaimFile = Annotated[Path | None, typer.Option("--claim", help="Claim file; default: the pack's own.")]
Full = Annotated[
    bool, typer.Option("--full", help="Every cell and item, not the subset sized for a quick run.")
]
Out = Annotated[Path, typer.Option("--out", help="Folder of the run and its bundle.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with the run in --out; repeats no finished check.")
]
KeepGoing = Annotated[
    bool, typer.Option("--keep-going", help="Run later stages after an earlier one failed.")
]
ExecutorName = Annotated[
    str, typer.Option("--executor", help="local: children of this process; ray: lanes of a Ray cluster.")
]
Address = Annotated[
    str | None,
    typer.Option("--address", help="Of the Ray cluster; without one, a cluster is started on this machine."),
]
JsonOutput = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
SELECTORS: dict[str, tuple[Any, object]] = {
    "pack": (PackName, "k3_decode"),
    "policy": (PolicyName, "fast_track"),
    "repo": (Annotated[Path, typer.Option("--repo", help="Git repository of the change.")], Path()),
    "base": (
        Annotated[str, typer.Option("--base", help="Where the change starts: a git revision.")],
        "HEAD~1",
    ),
    "head": (Annotated[str, typer.Option("--head", help="Where the change ends.")], "HEAD"),
    "pr": (
        Annotated[
            str | None,
            typer.Option("--pr", metavar="OWNER/REPO#N", help="Take base and head of this pull request."),
        ],
        None,
    ),
    "tier": (Annotated[str, typer.Option("--tier", help="auto, smoke, rank, node or claim.")], "auto"),
    "stage": (
        Annotated[list[str] | None, typer.Option("--stage", help="Only this stage; may be repeated.")],
        None,
    ),
    "only": (
        Annotated[
            list[str] | None,
            typer.Option("--only", help="Only checks of this op, subject, cell or id; may be repeated."),
        ],
        None,
    ),
    "claim": (ClaimFile, None),
    "allow_dirty": (
        Annotated[
            bool,
            typer.Option("--allow-dirty", help="Run on uncommitted code; the gate refuses such a bundle."),
        ],
        False,
    ),
    "full": (Full, False),
    "machine": (
        Annotated[
            Path | None,
            typer.Option("--machine", help="Plan for the machine that `fasttrack doctor --json` described."),
        ],
        None,
    ),
    "nonce": (
        Annotated[
            str | None, typer.Option("--nonce", hidden=True, help="Fix the nonce (tests, reproduction).")
        ],
        None,
    ),
}
"""(annotation, default) of each option, in the order of the help."""


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
    only: tuple[str, ...] = ()
    """Only checks that one of these words names: check id, op, subject or cell; empty: all."""
    pr: str | None = None
    """Pull request whose base and head are taken; its commits must be in `repo`."""


def selecting(
    without: tuple[str, ...] = (), **defaults: object
) -> Callable[[Callable[Concatenate[Selection, P], None]], Callable[..., None]]:
    """Decorator of a command that takes a `Selection` first: it gets the selectors as options, those named in
    `without` left out; `defaults` replace the table's.
    """

    def decorate(command: Callable[Concatenate[Selection, P], None]) -> Callable[..., None]:
        shared = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(name, default), annotation=kind
            )
            for name, (kind, default) in SELECTORS.items()
            if name not in without
        ]
        own = list(inspect.signature(command).parameters.values())[1:]
        options = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]

        @wraps(command)
        def run(**given: Any) -> None:
            chosen: dict[str, Any] = {name: default for name, (_, default) in SELECTORS.items()}
            chosen |= {p.name: given.pop(p.name) for p in shared}
            stages, only = (tuple(chosen.pop(name) or ()) for name in ("stage", "only"))
            selection = Selection(stages=stages, only=only, **chosen)
            command(selection, **given)  # type: ignore[call-arg]  # typer gives what the signature asks for

        signature = inspect.Signature([*shared, *options])
        run.__signature__ = signature  # type: ignore[attr-defined]  # what typer reads
        run.__annotations__ = {p.name: p.annotation for p in (*shared, *options)}
        return run

    return decorate


def make_selected_plan(selection: Selection) -> Any:
    """The plan (`domain.plan.Plan`) that the selectors ask for; raises `InputError` on bad input."""
    from harness.documents import load_claim, load_policy_set
    from harness.domain.stage import PlanRequest
    from harness.engines.packs import harness_digest, load_pack, pack_digest
    from harness.evidence.commands import pack_path, worktree_command, worktree_folder
    from harness.planner import CodeDigests, make_nonce, make_plan, plan_seed, resolve_tier
    from harness.repository import Limits

    stages = _parse_stages(selection.stages)
    pack = load_pack(selection.pack)
    claim = load_claim(selection.claim or pack.claim_file())
    policy, zones, rules = load_policy_set(selection.policy)
    machine = _machine(selection.machine)
    tier = resolve_tier(selection.tier, machine, claim)
    digests = CodeDigests(harness_digest(), pack_digest(pack))
    limits = Limits(policy.max_changed_files, policy.max_diff_bytes)
    change, at_head = _change(selection, limits, pack, digests.pack)
    if change.is_dirty and not selection.allow_dirty:
        folder = worktree_folder(change.head)
        raise InputError(
            f"{selection.repo}: the working tree differs from {selection.head} ({change.head[:12]}), so "
            "results would not be about that commit; commit the changes, judge that commit in a folder of "
            f"its own (`{worktree_command(change.head, str(selection.repo))}`, then --repo {folder}), or "
            "pass --allow-dirty (the gate refuses such a bundle)"
        )
    if at_head and not change.is_dirty:
        raise InputError(
            f"{selection.repo}: pack {pack.name} has other files at {change.head[:12]} ({at_head[:12]}) than "
            f"the one that is installed here ({digests.pack[:12]}), so results would not be about that "
            f"commit; run with its own: `{pack_path(pack, str(selection.repo))} fasttrack ...`"
        )
    if not change.files:
        typer.echo(
            f"fasttrack: {selection.base}..{selection.head} changes no file, so isolation has no evidence "
            "and no gate can admit; name a base and a head that differ",
            err=True,
        )
    nonce = selection.nonce or make_nonce()
    request = PlanRequest(
        pack=pack, claim=claim, policy=policy, zones=zones, rules=rules,
        change=change, machine=machine, tier=tier, is_full=selection.full, seed=plan_seed(change.head, nonce),
    )  # fmt: skip
    return make_plan(request, digests, nonce, stages, selection.only)


def _change(selection: Selection, limits: Any, pack: Any, digest: str) -> tuple[Any, str]:
    """The change between base and head, which are the pull request's where one is named; and the digest of
    the pack's files at head, where the repository holds other ones than are installed.
    """
    from harness.gate.replan import other_pack
    from harness.repository import load_change

    if selection.pr is None:
        change, tree = load_change(selection.repo, selection.base, selection.head, limits)
        with tree:
            return change, other_pack(pack, digest, tree)
    from harness.forge.client import read_access
    from harness.forge.pull_request import fetch_command, selected_pull_request

    if (selection.base, selection.head) != (SELECTORS["base"][1], SELECTORS["head"][1]):
        raise InputError("--pr names base and head itself; leave out --base and --head, or --pr")
    pull = selected_pull_request(selection.pr)
    try:
        change, tree = load_change(selection.repo, pull.base, pull.head, limits, pull.number)
    except InputError as error:
        bring = fetch_command(read_access().api, pull.name)
        raise InputError(f"{error}; to bring {pull.name} into {selection.repo}: {bring}") from error
    with tree:
        return change, other_pack(pack, digest, tree)


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
