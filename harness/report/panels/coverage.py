"""Coverage: where the optimised path ran, kernel by kernel, what would notice each op being wrong, and what
declined.
"""

import math

from harness.domain.check import Check, Outcome, StageName, Status
from harness.report.panels.material import Material, cell_name, figure, status_cell, table, value
from harness.report.panels.timeline import timeline_panels
from harness.report.panels.tokens import tokens_by_path
from harness.report.text import anchor, compact, number, plain
from harness.report.view import CellView, Panel

__all__ = ["panels"]

FEATURES = {"prefix": "prefix hit", "reuse": "used slot", "verify": "drafts rejected"}
"""What kinds of check are about beside their cell."""


def panels(material: Material) -> tuple[Panel, ...]:
    """Path shares, the causal matrix, the envelope, time lines and declines."""
    by_kind: dict[str, list[tuple[Check, Outcome]]] = {}
    for check, outcome in material.pairs:
        by_kind.setdefault(check.id.split("/")[1], []).append((check, outcome))
    return (
        _share_panel(by_kind.get("path", [])),
        _causal_panel(by_kind.get("poison", []), by_kind.get("causal", [])),
        _envelope_panel(
            material, [pair for kind in ("path", "feature", *FEATURES) for pair in by_kind.get(kind, [])]
        ),
        *timeline_panels(material, [*by_kind.get("layer", []), *by_kind.get("path", [])]),
        _decline_panel([*by_kind.get("decline", []), *by_kind.get("uneven", [])]),
    )


def _share_panel(pairs: list[tuple[Check, Outcome]]) -> Panel:
    rows = []
    for check, outcome in pairs:
        share, launches = value(outcome, "path_share"), value(outcome, "kernels_per_step")
        gap = value(outcome, "worst_kl_to_stock")
        rows.append(
            (
                CellView(cell_name(check)),
                status_cell(check, outcome),
                CellView("not measured" if share is None else number("path_share", share)),
                CellView("-" if launches is None else f"{launches:g}"),
                CellView("-" if gap is None else compact(gap)),
                CellView(plain(outcome.control.observed, 160) if outcome.control else "-", "small"),
            )
        )
    return Panel(
        "Path share",
        "Generated tokens that the optimised path produced, by ledger, launch counters and manifest.",
        table(
            "cell | status | #path share | #kernels a step | #worst KL to stock | with the switch off", rows
        ),
    )


def _causal_panel(pairs: list[tuple[Check, Outcome]], evals: list[tuple[Check, Outcome]]) -> Panel:
    """Ops down, evals across: how far drift moves, and how many answers of each eval change."""
    rows = []
    for check, outcome in pairs:
        clean, poisoned = value(outcome, "clean_kl"), value(outcome, "poison_kl")
        moved = None if not clean or poisoned is None else poisoned / clean
        tone = "" if moved is None else f"heat-{min(9, max(0, round(math.log10(max(moved, 1.0)))))}"
        rows.append(
            (
                CellView(plain(check.op or check.id, 60)),
                status_cell(check, outcome),
                CellView("not finite" if poisoned is None else compact(poisoned), tone),
                CellView("-" if clean is None else compact(clean)),
                CellView(
                    "-" if moved is None else f"{moved:,.0f}\u00d7" if moved < 1e7 else f"{moved:.0e}\u00d7"
                ),
                *(_changed_cell(check.op or "", *pair) for pair in evals),
            )
        )
    return Panel(
        "Causal matrix: op by eval",
        "Each op is made wrong by a visible amount; an eval that does not move is no evidence about that op.",
        table(
            "op | noticed | #drift, op poisoned (KL) | #drift, clean (KL) | #moved by"
            + "".join(f" | #{plain(check.subject or '', 40)}, answers changed" for check, _ in evals),
            rows,
        ),
    )


def _changed_cell(op: str, check: Check, outcome: Outcome) -> CellView:
    """How many answers of an eval an op changes when it is wrong, darker for more of them."""
    changed, noise = figure(outcome, f"changed_{op}"), value(outcome, "stock_changed") or 0.0
    if changed is None or changed.value is None:
        return CellView("never ran", "none", f"#{anchor(check.id)}")
    total = int("".join(filter(str.isdigit, changed.note)) or 0)
    tone = f"heat-{min(9, int(9 * changed.value / total))}" if total and changed.value > noise else "none"
    return CellView(f"{changed.value:g} of {total}", tone, f"#{anchor(check.id)}")


def _envelope_panel(material: Material, pairs: list[tuple[Check, Outcome]]) -> Panel:
    """Batch by phase, context, drafts, ranks and feature: tokens that the optimised path produced there, for
    the checks of this stage, and for each eval and sweep of the same plan.
    """
    cells = {}
    for check, outcome in pairs:
        if check.cell is not None:
            cells[check.cell.batch, _place(check)] = _cell_of_envelope(material, check, outcome)
    for check in material.plan.checks:
        if check.stage in (StageName.EVALS, StageName.SWEEP) and check.cell is not None:
            cell = _tokens_cell(material, check, "optimised")
            if cell is not None:
                name = f"{check.stage.value} {plain(check.subject or '', 40)}".strip()
                cells[check.cell.batch, f"{name}: {_place(check)}"] = cell
    batches = sorted({batch for batch, _ in cells})
    rest = list(dict.fromkeys(other for _, other in cells))
    rows = [
        (CellView(other), *(cells.get((batch, other), CellView("-", "none")) for batch in batches))
        for other in rest
    ]
    return Panel(
        "Where in the envelope the path was seen",
        "Tokens that the optimised path produced in each cell, darker for a larger share of those made "
        "there; a dash is a cell that this run did not try, and a required one that is empty shows its "
        "status.",
        table("cell | " + " | ".join(f"#batch {b}" for b in batches), rows) if batches else None,
    )


def _place(check: Check) -> str:
    """A cell without its batch, with the feature that the check is about."""
    cell = check.cell
    if cell is None:
        return ""
    count = cell.drafts
    words = [cell.phase, f"context {cell.context}"]
    words += [f"{count} draft{'' if count == 1 else 's'}"] if count else []
    words += [f"{name} {n}" for name, n in (("tp", cell.tp), ("dcp", cell.dcp)) if n != 1]
    kind = check.id.split("/")[1]
    words += [plain(FEATURES.get(kind) or str(check.subject), 40)] if kind in (*FEATURES, "feature") else []
    words += ["long run"] if check.subject == "long_run" else []
    return ", ".join(words)


def _cell_of_envelope(material: Material, check: Check, outcome: Outcome) -> CellView:
    """Optimised tokens where the check passed, else its status."""
    cell = _tokens_cell(material, check, "on")
    if outcome.status is not Status.PASS or cell is None:
        return status_cell(check, outcome)
    return CellView(cell.text, cell.tone, status_cell(check, outcome).link)


def _tokens_cell(material: Material, check: Check, arm: str) -> CellView | None:
    """Tokens of the optimised path, toned by their share; None where nothing was generated."""
    flows = tokens_by_path(material, check, arm)
    total = sum(flow.tokens for flow in flows)
    if not total:
        return None
    optimised = sum(flow.tokens for flow in flows if flow.path == "optimised")
    return CellView(f"{optimised:,}", f"heat-{min(9, int(10 * optimised / total))}", f"#{anchor(check.id)}")


def _decline_panel(pairs: list[tuple[Check, Outcome]]) -> Panel:
    rows = []
    for check, outcome in pairs:
        steps = figure(outcome, "declined_steps")
        rows.append(
            (
                CellView(plain((check.subject or check.id).replace("_", " "), 80)),
                status_cell(check, outcome),
                CellView("-" if steps is None or steps.value is None else f"{steps.value:g}"),
                CellView(plain(steps.note if steps else "", 200) or "-"),
            )
        )
    return Panel(
        "Declines by reason",
        "Just outside the envelope: the step must be declined with a reason code and answer as stock does.",
        table("outside by | status | #steps declined | reason code", rows),
    )
