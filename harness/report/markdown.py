"""The report as Markdown for a pull request's comment: the verdict, what is missing, the matrix, and the
block that vLLM asks of AI-assisted pull requests.

Invariant: text of the bundle stands only inside code spans, where GitHub neither renders markup nor notifies
anybody nor links, and the whole stays under the limit of one comment.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from harness.report.view import ReportView, TableView

__all__ = ["COMMENT_LIMIT", "MARKER", "Disclosure", "render_markdown"]

COMMENT_LIMIT = 65_000
"""Characters. GitHub takes 65,536."""
MARKER = "<!-- fasttrack:report -->"
"""First line, by which a comment is found again."""
MAX_MISSING = 20
MAX_REASONS = 12
MAX_CHECKS = 60
MAX_ROWS = 20


@dataclass(frozen=True, slots=True)
class Disclosure:
    """What only the submitter can say; empty where nobody said it."""

    duplicates: str = ""
    """How earlier work was searched for, and what was found."""
    ai_use: str = ""
    reviewer: str = ""
    """The human who understands and reviewed every line."""


def render_markdown(view: ReportView, disclosure: Disclosure | None = None) -> str:
    """The comment."""
    parts = [
        MARKER,
        f"## fasttrack: {view.verdict.word.lower()}{_under(view)}",
        f"Claim {_code(view.title)}: {view.verdict.sentence if not view.verdict.answer else _sentence(view)}",
        " · ".join(f"{name} {_code(text, 120)}" for name, text, _ in view.subtitle),
        _bundles(view),
        _missing(view),
        _matrix(view),
        _headlines(view),
        _not_passed(view),
        _losses(view),
        _disclosure_block(view, disclosure or Disclosure()),
        _reproduce(view),
        f"<sub>{_code(view.footer, 200)}</sub>",
    ]
    return _shortened([part for part in parts if part])


def _under(view: ReportView) -> str:
    return f" under policy {_code(view.verdict.policy, 80)}" if view.verdict.policy else ""


def _bundles(view: ReportView) -> str:
    return "\n".join(f"- bundle {_code(line, 900)}" for line in view.verdict.bundles)


def _sentence(view: ReportView) -> str:
    met = sum(row.is_met is True for row in view.matrix)
    return f"{met} of {len(view.matrix)} proofs that this policy demands are met."


def _missing(view: ReportView) -> str:
    if not view.missing:
        if view.verdict.answer in ("admitted", ""):
            return ""
        lines = [f"- {_code(reason)}" for reason in view.verdict.reasons[:MAX_REASONS]]
        return "\n".join(["### Why", *lines])
    lines = ["### What is missing"]
    if view.verdict.worktree:
        lines.append(f"- before the commands, once in a clone: {_code(view.verdict.worktree)}")
    for item in view.missing[:MAX_MISSING]:
        lines.append(f"- **{item.proof}**: {_code(item.why)}")
        lines.append(f"  - make it on {_code(item.command.where)}: {_code(item.command.line)}")
    if len(view.missing) > MAX_MISSING:
        lines.append(f"- and {len(view.missing) - MAX_MISSING} more proofs")
    return "\n".join(lines)


def _matrix(view: ReportView) -> str:
    statuses = view.statuses
    head = ["proof", *(s.replace("_", " ") for s in statuses), "controls that failed", "tier", "met"]
    rows = []
    for row in view.matrix:
        counts = dict(row.counts)
        met = "-" if row.is_met is None else "yes" if row.is_met else "**no**"
        name = f"{row.stage} {_code(row.arch)}" if row.arch else row.stage
        rows.append([name, *(str(counts.get(s, "")) for s in statuses), row.controls or "-", row.tier, met])
    return "### Evidence\n" + _table(head, rows)


def _headlines(view: ReportView) -> str:
    if not view.headlines:
        return ""
    lines = []
    for item in view.headlines:
        interval = f" [{item.interval}]" if item.interval else ""
        lines.append(f"- **{item.value}**{interval} {item.label}. Conditions: {_code(item.conditions)}")
    return "\n".join(["### Numbers", *lines])


def _not_passed(view: ReportView) -> str:
    checks = [c for stage in view.stages for c in stage.checks if c.status != "PASS"]
    if not checks:
        return ""
    rows = [
        [
            c.status.replace("_", " ") or "no outcome",
            _code(c.id, 160),
            _code(c.summary, 240),
            _code(c.next_step, 200),
        ]
        for c in checks[:MAX_CHECKS]
    ]
    more = f"\n\nand {len(checks) - MAX_CHECKS} more" if len(checks) > MAX_CHECKS else ""
    body = _table(["status", "check", "what was seen", "next step"], rows) + more
    return _details(f"{len(checks)} checks that did not pass", body)


def _losses(view: ReportView) -> str:
    for stage in view.stages:
        for panel in stage.panels:
            if panel.title == "Where it loses" and panel.table is not None:
                return _details("Where it loses", _view_table(panel.table))
    return ""


def _disclosure_block(view: ReportView, disclosure: Disclosure) -> str:
    """What vLLM's rules for AI-assisted pull requests ask for."""
    tests = [
        f"  - {_code(stage.name)}: "
        + ", ".join(f"{count} {status.replace('_', ' ')}" for status, count in stage.counts)
        for stage in view.stages
        if stage.name != "evals"
    ]
    evals = [
        f"  - {_code(check.id, 160)}: {check.status.replace('_', ' ') or 'no outcome'}, "
        f"{_code(check.summary, 240)}"
        for stage in view.stages
        if stage.name == "evals"
        for check in stage.checks[:MAX_ROWS]
    ]
    command = view.reproduce[-1].line
    return "\n".join(
        [
            "### AI-assisted contribution",
            f"- Duplicate search: {_said(disclosure.duplicates)}",
            f"- Test command: {_code(command, 600)}",
            "- Test results:",
            *tests,
            "- Evals:",
            *(evals or ["  - none ran"]),
            f"- AI use: {_said(disclosure.ai_use)}",
            f"- Human who reviewed every line: {_said(disclosure.reviewer)}",
        ]
    )


def _said(text: str) -> str:
    return _code(text, 1000) if text.strip() else "**not stated; the submitter must say**"


def _reproduce(view: ReportView) -> str:
    lines = [f"- {c.where}: {_code(c.line, 900)}" for c in view.reproduce]
    if view.path == "BUNDLE":
        lines.insert(0, "`BUNDLE` is the folder or file of this bundle.\n")
    return _details("How to reproduce", "\n".join(lines))


def _view_table(table: TableView) -> str:
    rows = [[_code(value.text, 160) for value in row] for row in table.rows[:MAX_ROWS]]
    more = f"\n\nand {len(table.rows) - MAX_ROWS} more" if len(table.rows) > MAX_ROWS else ""
    return _table([c.title for c in table.columns], rows) + more


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = list(head)
    lines = [f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines)


def _details(title: str, body: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{body}\n\n</details>"


def _code(text: str, limit: int = 300) -> str:
    """Foreign text as a code span that also fits a table's cell: no backtick, bar or line break is left in
    it.
    """
    kept = " ".join(text.replace("`", "'").replace("|", "\u00a6").split())
    if len(kept) > limit:
        kept = kept[: limit - 1] + "…"
    return f"`{kept}`" if kept else "` `"


def _shortened(parts: list[str]) -> str:
    """All parts, or without the longest until the rest fits one comment; what was left out is said."""
    dropped = 0
    while len("\n\n".join(parts)) > COMMENT_LIMIT - 200 and len(parts) > 4:
        parts.remove(max(parts[3:], key=len))
        dropped += 1
    if dropped:
        parts.append(f"{dropped} sections did not fit into a comment; they are in the HTML report.")
    return "\n\n".join(parts) + "\n"
