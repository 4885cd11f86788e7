"""Evals: both arms on the same items, how answers went, whose tokens took which path, and what flipped."""

from harness.report.findings import finding_view
from harness.report.panels.material import Material, figure, figure_cell, status_cell, table
from harness.report.panels.tokens import loads_of, tokens_by_path
from harness.report.text import figure_text, label, number, plain
from harness.report.view import CellView, Panel

__all__ = ["panels"]

MAX_COLUMNS = 7


def panels(material: Material) -> tuple[Panel, ...]:
    """One table for each set of figures, as drift and tasks measure different things; then flipped items."""
    groups: dict[tuple[str, ...], list[tuple[CellView, ...]]] = {}
    for check, outcome in material.pairs:
        if not outcome.figures:
            continue
        names = tuple(f.name for f in outcome.figures)[:MAX_COLUMNS]
        groups.setdefault(names, []).append(
            (
                CellView(plain(check.subject or check.id, 60)),
                status_cell(check, outcome),
                *(figure_cell(outcome, name) for name in names),
            )
        )
    tables = [
        Panel(*_heading(names), table("eval | status" + "".join(f" | #{label(n)}" for n in names), rows))
        for names, rows in groups.items()
    ]
    flipped = tuple(finding_view(f, material.plan) for _, o in material.pairs for f in o.findings)
    return (
        *tables,
        _conduct_panel(material),
        _path_panel(material),
        _batch_panel(material),
        Panel(
            "Flipped items",
            "Better with stock than with the change: where the answers part, how near a tie, which step.",
            findings=flipped,
        ),
    )


def _heading(names: tuple[str, ...]) -> tuple[str, str]:
    """Title and explanation of a table, by the figures that it shows."""
    if "score_difference" in names:
        return (
            "Stock against optimised, paired",
            "The same items, seeds and decoding in both arms; the interval is of the paired difference.",
        )
    if "stock_mean_kl" in names:
        return "Along a text", "Teacher-forced log-probabilities against the float64 oracle."
    return "Features at work", "Each beside a run that must fail, which is its control."


def _conduct_panel(material: Material) -> Panel:
    """How answers went beside their scores: a row for each eval and arm in which one did not end by itself,
    and scores under other rules."""
    rows = []
    for check, outcome in material.pairs:
        if figure(outcome, "score_difference") is None:
            continue
        for arm in ("stock", "optimised"):
            ended = figure(outcome, f"{arm}_not_ended")
            best = next((f for f in outcome.figures if f.name.startswith(f"{arm}_pass_at_")), None)
            rows.append(
                (
                    CellView(plain(check.subject or check.id, 60)),
                    CellView(arm),
                    CellView("-" if ended is None else plain(ended.note or "all ended by themselves", 120)),
                    CellView("-" if best is None else f"{plain(figure_text(best), 40)} ({label(best.name)})"),
                    figure_cell(outcome, f"{arm}_lm_eval_score"),
                )
            )
    return Panel(
        "How answers went",
        "Answers that were cut off, ran in circles, held no answer or never came are no wrong answers.",
        table("eval | arm | did not end | #best of several | #lm-eval's score", rows) if rows else None,
    )


def _batch_panel(material: Material) -> Panel:
    """How many requests decoded together, as the ledger has it: small-batch kernels are graded at small
    batch.
    """
    rows = []
    for check, _ in material.pairs:
        counts = loads_of(material, check, "optimised")
        total = sum(tokens for _, tokens in counts)
        rows += [
            (
                CellView(plain(check.subject or check.id, 60)),
                CellView(f"{requests:,}"),
                CellView(f"{tokens:,}"),
                CellView(number("batch_share", tokens / total), f"heat-{min(9, int(10 * tokens / total))}"),
            )
            for requests, tokens in counts
        ]
    return Panel(
        "Batches that were reached",
        "Generated tokens of the optimised arm by how many requests shared their step.",
        table("eval | #requests in the step | #tokens | #share", rows) if rows else None,
    )


def _path_panel(material: Material) -> Panel:
    """A row for each eval, path and reason: an eval is evidence only for the path that its tokens took."""
    rows = []
    for check, _ in material.pairs:
        flows = tokens_by_path(material, check, "optimised")
        total = sum(flow.tokens for flow in flows)
        for flow in flows:
            share = flow.tokens / total
            rows.append(
                (
                    CellView(plain(check.subject or check.id, 60)),
                    CellView(flow.phase),
                    CellView(flow.path),
                    CellView(flow.reason),
                    CellView(f"{flow.tokens:,}"),
                    CellView(number("path_share", share), f"heat-{min(9, int(share * 10))}"),
                )
            )
    return Panel(
        "Tokens by path",
        "Generated tokens of the optimised arm by the path that produced them, and why.",
        table("eval | phase | path | reason | #tokens | #share", rows) if rows else None,
    )
