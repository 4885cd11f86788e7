"""`fasttrack plan`: what would run, what cannot run here and why, and how long it takes."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.selectors import JsonOutput, Selection, make_selected_plan, selecting

if TYPE_CHECKING:  # the planner loads when a command runs
    from rich.table import Table

    from harness.domain.plan import Plan
    from harness.planner import CheckGroup

__all__ = ["app"]

app = typer.Typer()
FEW = 3
"""Checks of a group up to which all are named without --all."""


@app.command()
@selecting()
def plan(
    selection: Selection,
    save: Annotated[
        Path | None, typer.Option("--save", help="Write the plan here, for `fasttrack worker`.")
    ] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Name every check.")] = False,
    json: JsonOutput = False,
) -> None:
    """Show what would run, what cannot run here and why, and how long it takes. Runs nothing."""
    from harness.cli.console import err, print_json
    from harness.domain.errors import InputError

    made = make_selected_plan(selection)
    if save is not None:
        if not save.parent.is_dir():
            raise InputError(f"--save {save}: there is no folder {save.parent}; make it first")
        save.write_bytes(made.canonical())
        err.print(f"wrote {save}", markup=False, soft_wrap=True)
    if json:
        print_json(made)
    else:
        _print_plan(made, show_all=show_all)


def _print_plan(plan: "Plan", *, show_all: bool) -> None:
    from harness.cli.console import out
    from harness.gate.demands import out_of_reach
    from harness.planner import skipped_by_reason, stated_once

    change, machine = plan.change, plan.machine
    gpus = ", ".join(gpu.name for gpu in machine.gpus) or "no GPU"
    facts = {
        f"plan {plan.digest()[:12]}": "nothing has run yet",
        "change": f"{change.base[:12]}..{change.head[:12]} of {change.repository}: "
        f"{_count(len(change.files), 'file')}, {_count(change.added_lines, 'line')} added",
        "claim": f"{plan.claim.name} of pack {plan.pack}",
        "policy": f"{plan.policy.name}, at tier {plan.tier.value}{', every cell' if plan.is_full else ''}",
        "machine": f"{machine.cpu_model}, {machine.cpu_count} cores, {gpus}",
    }
    for name, words in facts.items():
        out.print(f"{name:<18} {words}", markup=False, soft_wrap=True)
    out.print(_cost_table(plan))
    if out_of_reach(plan):
        out.print(
            f"Evidence from here is of tier {plan.tier.value} on {plan.machine.arch}; policy "
            f"{plan.policy.name} also asks for what the column `still needed elsewhere` names, and the gate "
            "rejects without it.",
            markup=False,
        )
    out.print(_group_table("what would run", "proves", stated_once(plan), show_all=show_all))
    skipped = skipped_by_reason(plan)
    if skipped:
        out.print(_group_table("what cannot run here", "why", skipped, show_all=show_all))


def _cost_table(plan: "Plan") -> "Table":
    from rich.table import Table

    from harness.domain.check import StageName
    from harness.gate.demands import out_of_reach
    from harness.planner import estimate_costs

    elsewhere = out_of_reach(plan)
    costs = estimate_costs(plan)
    table = Table(pad_edge=False, caption_justify="left", show_footer=True)
    table.add_column("stage", "in all")
    table.add_column("will run", str(sum(cost.checks for cost in costs)), justify="right")
    table.add_column("cannot run here", str(sum(cost.unavailable for cost in costs)), justify="right")
    table.add_column("still needed elsewhere")
    table.add_column("about", _minutes(sum(cost.seconds for cost in costs)), justify="right")
    if any(cost.stage is StageName.AUDIT for cost in costs):
        table.caption = "audit: as in a first run; compiled kernels are kept for later ones"
    for cost in costs:
        gone = str(cost.unavailable) if cost.unavailable else "-"
        mine = [d for d in elsewhere if d.stage is cost.stage]
        lacking = ", ".join(f"{d.arch} at {d.tier.value}" if d.arch else f"at {d.tier.value}" for d in mine)
        table.add_row(cost.stage.value, str(cost.checks), gone, lacking or "-", _minutes(cost.seconds))
    return table


def _group_table(title: str, second: str, groups: "tuple[CheckGroup, ...]", *, show_all: bool) -> "Table":
    """A row for each sentence: how many checks of which stages, an example or all of them, the sentence."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", pad_edge=False)
    table.add_column("checks", overflow="fold", ratio=1)
    table.add_column(second, overflow="fold", ratio=1)
    for group in groups:
        names = [escape(check.id) for check in group.checks]
        counts = Counter(check.stage.value for check in group.checks)
        words = "[bold]" + ", ".join(f"{count} of {stage}" for stage, count in counts.items()) + "[/]"
        if len(names) > FEW and not show_all:
            names = [f"{words}, such as", names[0]]
        elif len(names) > 1:
            names.insert(0, words)
        table.add_row("\n".join(names), escape(group.words))
    return table


def _minutes(seconds: float) -> str:
    """`9 s`, `1 min 48 s`."""
    whole = max(1, round(seconds))
    return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60:02d} s"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
