"""What a report shows, as plain values: built once from a bundle, rendered as HTML or Markdown.

Every text in here went through `plain`; renderers escape, and decide nothing. `svg` is markup that `plots`
made, the one value that a renderer may pass through.
"""

from dataclasses import dataclass

from markupsafe import Markup

__all__ = [
    "CellView", "CheckView", "ColumnView", "Command", "FigureView", "FindingView", "Headline", "MatrixRow",
    "MissingView", "Panel", "ReportView", "StageView", "TableView", "VerdictView",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class FigureView:
    """One number with its conditions."""

    label: str
    text: str
    note: str
    is_missing: bool


@dataclass(frozen=True, slots=True)
class FindingView:
    """Something found at a place."""

    rule: str
    severity: str
    message: str
    place: str
    link: str | None
    excerpt: str
    remedy: str
    waived: str


@dataclass(frozen=True, slots=True)
class CheckView:
    """One check and what it gave; `status` is empty for one without an outcome."""

    id: str
    anchor: str
    status: str
    mark: str
    proves: str
    summary: str
    next_step: str
    control: str
    """What was done and seen; empty where there is none."""
    has_failing_control: bool
    tier: str
    cell: str
    is_required: bool
    figures: tuple[FigureView, ...]
    findings: tuple[FindingView, ...]
    thresholds: tuple[tuple[str, str], ...]
    rerun: str
    """The command that runs this check alone again; empty where it has no outcome."""


@dataclass(frozen=True, slots=True)
class ColumnView:
    """A column of a table; numbers are set to the right."""

    title: str
    is_number: bool = False


@dataclass(frozen=True, slots=True)
class CellView:
    """One cell of a table: text, a tone (`PASS`, `FAIL`, `heat-0` to `heat-9`, ...) and a link."""

    text: str
    tone: str = ""
    link: str = ""


@dataclass(frozen=True, slots=True)
class TableView:
    """A table whose first column names its rows."""

    columns: tuple[ColumnView, ...]
    rows: tuple[tuple[CellView, ...], ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """One exhibit of a stage: a table, a plot or findings, with how to read it."""

    title: str
    note: str = ""
    table: TableView | None = None
    svg: Markup | None = None
    findings: tuple[FindingView, ...] = ()


@dataclass(frozen=True, slots=True)
class StageView:
    """One stage's part of the page."""

    name: str
    title: str
    question: str
    counts: tuple[tuple[str, int], ...]
    """(status, checks), statuses without checks left out."""
    bar: Markup
    controls: int
    checks: tuple[CheckView, ...]
    panels: tuple[Panel, ...]

    @property
    def passed(self) -> int:
        """Checks that passed."""
        return dict(self.counts).get("PASS", 0)

    @property
    def passed_checks(self) -> tuple[CheckView, ...]:
        """Checks that passed, in plan order."""
        return tuple(c for c in self.checks if c.status == "PASS")

    @property
    def open_checks(self) -> tuple[CheckView, ...]:
        """Checks with another outcome."""
        return tuple(c for c in self.checks if c.status not in ("", "PASS"))

    @property
    def unfinished_checks(self) -> tuple[CheckView, ...]:
        """Checks without an outcome."""
        return tuple(c for c in self.checks if c.status == "")


@dataclass(frozen=True, slots=True)
class Headline:
    """A number that people will repeat, and what must be repeated with it."""

    label: str
    value: str
    interval: str
    conditions: str
    status: str
    link: str


@dataclass(frozen=True, slots=True)
class MatrixRow:
    """One proof of the evidence matrix."""

    stage: str
    arch: str
    counts: tuple[tuple[str, int], ...]
    bar: Markup
    controls: str
    tier: str
    is_met: bool | None
    why: str

    @property
    def passed(self) -> int:
        """Checks that passed."""
        return dict(self.counts).get("PASS", 0)

    @property
    def total(self) -> int:
        """Checks with an outcome."""
        return sum(count for _, count in self.counts)


@dataclass(frozen=True, slots=True)
class Command:
    """A command line to paste, and where it runs."""

    line: str
    where: str = ""


@dataclass(frozen=True, slots=True)
class MissingView:
    """A proof that is missing, why, and the command that makes it."""

    proof: str
    why: str
    checks: tuple[tuple[str, str], ...]
    """(check, anchor)."""
    more: int
    command: Command


@dataclass(frozen=True, slots=True)
class VerdictView:
    """The gate's word; `answer` is empty where the report was made without a verdict."""

    answer: str
    word: str
    policy: str
    """Under which policy the answer holds; empty without an answer."""
    tone: str
    sentence: str
    reasons: tuple[str, ...]
    waivers: tuple[str, ...]
    worktree: str
    """The command that must run before those that make what is missing; empty where nothing is."""
    bundles: tuple[str, ...]
    """Each bundle in one line: whose it is, and what of it counts."""


@dataclass(frozen=True, slots=True)
class ReportView:
    """The whole report."""

    title: str
    subtitle: tuple[tuple[str, str, str], ...]
    """(label, text, link)."""
    verdict: VerdictView
    missing: tuple[MissingView, ...]
    matrix: tuple[MatrixRow, ...]
    statuses: tuple[str, ...]
    """Statuses that occur, in order."""
    headlines: tuple[Headline, ...]
    stages: tuple[StageView, ...]
    environment: tuple[tuple[str, TableView], ...]
    path: str
    """Where the reader has the bundle; `BUNDLE` where that is not known."""
    reproduce: tuple[Command, ...]
    verification: tuple[str, ...]
    footer: str
