"""Coverage: whose tokens came from the optimised path, kernel by kernel, what would notice each op being
wrong, where in the envelope the path was seen, and what declined.
"""

import math
from collections import Counter

from harness.domain.check import Check, Outcome, StageName
from harness.report.panels.envelope import KINDS, envelope_panel, source_name
from harness.report.panels.material import Material, cell_name, figure, status_cell, table, value
from harness.report.panels.timeline import timeline_panels
from harness.report.panels.tokens import tokens_by_path
from harness.report.text import anchor, compact, number, plain
from harness.report.view import CellView, Panel

__all__ = ["panels"]

MAX_REASONS = 2


def panels(material: Material) -> tuple[Panel, ...]:
    """Path shares, the causal matrix, the envelope, time lines and declines."""
    by_kind: dict[str, list[tuple[Check, Outcome]]] = {}
    for check, outcome in material.pairs:
        by_kind.setdefault(check.id.split("/")[1], []).append((check, outcome))
    return (
        _share_panel(material),
        _causal_panel(by_kind.get("poison", []), by_kind.get("causal", [])),
        envelope_panel(material),
        *timeline_panels(material, [*by_kind.get("layer", []), *by_kind.get("path", [])]),
        _cells_panel(material, by_kind.get("path", [])),
        _decline_panel([*by_kind.get("decline", []), *by_kind.get("uneven", [])]),
    )


def _share_panel(material: Material) -> Panel:
    """A row for each eval and sweep of the plan, and for each kind of coverage check that generates."""
    least = material.plan.policy.min_path_share
    tokens: dict[str, Counter[str]] = {}
    reasons: dict[str, Counter[str]] = {}
    links: dict[str, str] = {}
    checks = material.plan.checks
    others = [c for c in checks if c.stage in (StageName.EVALS, StageName.SWEEP)]
    ours = [c for c in checks if c.stage is StageName.COVERAGE and c.id.split("/")[1] in KINDS]
    for check in (*others, *ours):
        name = source_name(check)
        for flow in tokens_by_path(
            material, check, "on" if check.stage is StageName.COVERAGE else "optimised"
        ):
            links.setdefault(name, f"#{anchor(check.id)}")
            tokens.setdefault(name, Counter())[flow.path] += flow.tokens
            if flow.path != "optimised":
                reasons.setdefault(name, Counter())[flow.reason] += flow.tokens
    rows = [
        _share_row(
            name, paths, reasons.get(name, Counter()), material.plan.policy.min_path_share, links[name]
        )
        for name, paths in tokens.items()
    ]
    return Panel(
        "Path share of each eval, sweep and test",
        "Generated tokens that the optimised path produced, over all that the optimised arm generated. Below "
        f"the policy's {least:.0%} an eval is NO_EVIDENCE, whatever its score.",
        table("what generated | #share | #tokens on it | declined for", rows) if rows else None,
    )


def _share_row(
    name: str, paths: Counter[str], reasons: Counter[str], least: float, link: str
) -> tuple[CellView, ...]:
    total = sum(paths.values())
    share = paths["optimised"] / total
    told = [f"{plain(reason, 40)} ({count:,})" for reason, count in reasons.most_common(MAX_REASONS)]
    return (
        CellView(name),
        CellView(number("path_share", share), "warn" if share < least else "heat-9", link),
        CellView(f"{paths['optimised']:,} of {total:,}"),
        CellView("; ".join(told) or "-", "" if told else "none"),
    )


def _cells_panel(material: Material, pairs: list[tuple[Check, Outcome]]) -> Panel:
    """Path checks one by one: three witnesses, and the same work with the switch off."""
    rows = []
    for check, outcome in pairs:
        share, launches = value(outcome, "path_share"), value(outcome, "kernels_per_step")
        gap = value(outcome, "worst_kl_to_stock")
        off = tokens_by_path(material, check, "off")
        taken = sum(flow.tokens for flow in off if flow.path == "optimised")
        name = f"{cell_name(check)}{', long run' if check.subject == 'long_run' else ''}"
        rows.append(
            (
                CellView(name),
                status_cell(check, outcome),
                CellView("not measured" if share is None else number("path_share", share)),
                CellView("-" if launches is None else f"{launches:g}"),
                CellView("-" if gap is None else compact(gap)),
                CellView(f"{taken} of {sum(flow.tokens for flow in off)}" if off else "-"),
            )
        )
    return Panel(
        "Path checks by cell",
        "By ledger, launch counters and manifest. With the switch off the same work must take no token of "
        "the path.",
        table(
            "cell | status | #path share | #kernels a step | #worst KL to stock | #tokens when off",
            rows,
        ),
    )


def _causal_panel(pairs: list[tuple[Check, Outcome]], evals: list[tuple[Check, Outcome]]) -> Panel:
    """Ops down, evals across: how far drift moves, and how many answers of each eval change."""
    rows = [
        (
            CellView(plain(check.op or check.id, 60)),
            _moved_cell(check, outcome),
            *(_changed_cell(check.op or "", *pair) for pair in evals),
        )
        for check, outcome in pairs
    ]
    clean = sorted(found for _, o in pairs if (found := value(o, "clean_kl")) is not None)
    told = f" Drift unpoisoned: median KL to stock {compact(clean[-1])} at most." if clean else ""
    return Panel(
        "Causal matrix: op by eval",
        "Each op is made wrong by a visible amount; an eval that does not move is no evidence about that op. "
        f"Drift: by what factor its KL grows; other evals: answers that change.{told}",
        table("op | #drift" + "".join(f" | #{_words(check)}" for check, _ in evals), rows),
    )


def _words(check: Check) -> str:
    """An eval's name in words, which wrap."""
    return plain((check.subject or "").replace("_", " "), 40)


def _moved_cell(check: Check, outcome: Outcome) -> CellView:
    """By how much drift moves when an op is wrong, darker for a power of ten more; its status where it moved
    too little."""
    clean, poisoned = value(outcome, "clean_kl"), value(outcome, "poison_kl")
    link = f"#{anchor(check.id)}"
    if outcome.status.value != "PASS":
        return status_cell(check, outcome)
    if not clean or poisoned is None:
        return CellView("not finite", "heat-9", link)
    moved = poisoned / clean
    tone = f"heat-{min(9, max(0, round(math.log10(max(moved, 1.0)))))}"
    return CellView(f"{moved:,.0f}\u00d7" if moved < 1e7 else f"{moved:.0e}\u00d7", tone, link)


def _changed_cell(op: str, check: Check, outcome: Outcome) -> CellView:
    """How many answers of an eval an op changes when it is wrong, darker for more of them."""
    changed, noise = figure(outcome, f"changed_{op}"), value(outcome, "stock_changed") or 0.0
    if changed is None or changed.value is None:
        return CellView("never ran", "none", f"#{anchor(check.id)}")
    total = int("".join(filter(str.isdigit, changed.note)) or 0)
    tone = f"heat-{min(9, int(9 * changed.value / total))}" if total and changed.value > noise else "none"
    return CellView(f"{changed.value:g} of {total}", tone, f"#{anchor(check.id)}")


def _decline_panel(pairs: list[tuple[Check, Outcome]]) -> Panel:
    rows = []
    for check, outcome in pairs:
        steps = figure(outcome, "declined_steps")
        rows.append(
            (
                CellView(plain(steps.note if steps else "", 200) or "no reason"),
                CellView(plain((check.subject or check.id).replace("_", " "), 80)),
                CellView("-" if steps is None or steps.value is None else f"{steps.value:g}"),
                status_cell(check, outcome),
            )
        )
    return Panel(
        "Declines by reason",
        "Just outside the envelope: the step must be declined with a reason code and answer as stock does.",
        table("reason code | outside by | #steps declined | status", rows),
    )
