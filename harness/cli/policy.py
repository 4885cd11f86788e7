"""`fasttrack policy check|replay`: rules against their examples, and a policy edit against past changes."""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.selectors import ClaimFile, JsonOutput, PackName, PolicyName

if TYPE_CHECKING:  # the stage loads when a command runs
    from harness.stages.isolation.policy_check import PolicyReport
    from harness.stages.isolation.replay import ReplayReport

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Try the rules of a policy before anybody is judged by them.")


@app.command()
def check(
    policy: PolicyName = "smoke",
    repo: Annotated[
        Path | None, typer.Option("--repo", help="Also try the policy's zone map on this repository's files.")
    ] = None,
    head: Annotated[str, typer.Option("--head", help="The commit whose files are taken.")] = "HEAD",
    json: JsonOutput = False,
) -> None:
    """Every rule against its own examples: 0 all as written, 1 some not, 2 the policy cannot be read."""
    from harness.cli.console import print_json
    from harness.documents import load_policy_set
    from harness.stages.isolation.policy_check import check_policy

    loaded = load_policy_set(policy)
    paths = _paths(repo, head) if repo is not None else None
    report = check_policy(loaded.policy, loaded.zones, loaded.rules, paths, datetime.now(UTC).date())
    if json:
        print_json(report)
    else:
        _print_check(report)
    raise typer.Exit(0 if report.is_fit else 1)


@app.command()
def replay(
    repo: Annotated[Path, typer.Option("--repo", help="Git repository whose past changes are judged.")],
    last: Annotated[int, typer.Option("--last", min=1, max=1000, help="How many, from --head back.")] = 20,
    policy: PolicyName = "smoke",
    against: Annotated[
        str | None,
        typer.Option("--against", help="Policy to compare with, by name or file: the one before the edit."),
    ] = None,
    head: Annotated[str, typer.Option("--head", help="The newest change.")] = "HEAD",
    pack: PackName = "k3_decode",
    claim: ClaimFile = None,
    json: JsonOutput = False,
) -> None:
    """Judge past changes: 0 the policies agree (or one was given), 1 they differ, 2 cannot be judged."""
    from harness.cli.console import err, print_json
    from harness.documents import load_claim, load_policy_set
    from harness.engines.packs import load_pack
    from harness.measure.machine import read_machine
    from harness.repository import Limits, load_change, past_changes
    from harness.stages.isolation.replay import ReplayReport, Ruleset, Setting, replay_change

    judged = load_pack(pack)
    wanted = load_claim(claim or judged.claim_file())
    new = Ruleset(*load_policy_set(policy))
    old = Ruleset(*load_policy_set(against)) if against is not None else None
    setting = Setting(judged, wanted, read_machine(), datetime.now(UTC).date())
    limits = Limits(new.policy.max_changed_files, new.policy.max_diff_bytes)
    changes = []
    for base, commit in past_changes(repo, head, last):
        change, tree = load_change(repo, base, commit, limits)
        with tree:
            changes.append(replay_change(change, tree, new, old, setting))
        if not json:
            err.print(f"judged {commit[:12]}, {len(changes)} of at most {last}")
    report = ReplayReport(
        policy=new.policy.name, against=old.policy.name if old is not None else None, changes=tuple(changes)
    )
    if json:
        print_json(report)
    else:
        _print_replay(report)
    raise typer.Exit(1 if any(change.differs for change in changes) else 0)


def _paths(repo: Path, head: str) -> tuple[str, ...]:
    from harness.repository import load_change

    _, tree = load_change(repo, head, head)
    with tree:
        return tree.paths("head")


def _print_check(report: "PolicyReport") -> None:
    for rule in report.rules:
        for problem in rule.problems:
            typer.echo(f"WRONG {rule.rule}: {problem}")
    idle = [(rule.rule, pattern) for rule in report.rules for pattern in rule.unexercised]
    for name, pattern in idle:
        typer.echo(f"no example exercises {name}: {' '.join(pattern.split())[:100]}")
    for waiver in report.waivers:
        typer.echo(f"waiver {waiver}")
    if report.zones is not None:
        for path in report.zones.unknown:
            typer.echo(f"WRONG no zone of {report.zones.zone_map} covers {path}")
        for pattern in report.zones.idle:
            typer.echo(f"no file matches {pattern}")
        unknown = len(report.zones.unknown)
        typer.echo(f"zone map {report.zones.zone_map}: {report.zones.files} files, {unknown} unknown")
    examples = sum(rule.examples for rule in report.rules)
    wrong = sum(len(rule.problems) for rule in report.rules)
    typer.echo(
        f"policy {report.policy}: {len(report.rules)} rules, {examples} examples, {wrong} wrong, "
        f"{len(idle)} patterns without an example"
    )


def _print_replay(report: "ReplayReport") -> None:
    for change in report.changes:
        failed = [name for name, status in change.new if status != "PASS"]
        word = "DIFFERS" if change.differs else "passes" if not failed else "fails"
        before = ""
        if change.old is not None:
            before = f" (before: {', '.join(n for n, s in change.old if s != 'PASS') or 'passed'})"
        typer.echo(
            f"{change.head[:12]} {word:<8} {change.files:>4} files  {', '.join(failed) or 'all pass'}{before}"
        )
        for rule, path, line in change.findings[:5]:
            typer.echo(f"             {rule} {path}{f':{line}' if line else ''}")
    differing = sum(change.differs for change in report.changes)
    against = f", {differing} judged otherwise than under {report.against}" if report.against else ""
    typer.echo(f"policy {report.policy}: {len(report.changes)} past changes{against}")
