"""One thing to prove, and what it gave.

Invariant: an outcome of status `PASS` carries a control that failed as it should. Nobody can build another
one.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from harness.domain.cell import Cell
from harness.domain.machine import Tier
from harness.domain.record import Number, Record, Scalar, Setting, Whole

__all__ = [
    "Check", "CheckId", "Control", "Figure", "Finding", "Outcome", "SampleTable", "Samples", "Severity",
    "StageName",
    "Status", "Threshold", "judged",
]  # fmt: skip

CheckId = Annotated[str, Field(pattern=r"^[a-z]+(/[A-Za-z0-9_.:+-]{1,120}){1,4}$")]
"""`stage/subject/cell` and the like; stable between runs of one plan; safe as a file name once `/` is
replaced.
"""


class StageName(StrEnum):
    """The six stages, cheapest first."""

    ISOLATION = "isolation"
    AUDIT = "audit"
    KERNELS = "kernels"
    COVERAGE = "coverage"
    EVALS = "evals"
    SWEEP = "sweep"


class Status(StrEnum):
    """What a check gave. Only `PASS` counts for a claim."""

    PASS = "PASS"
    FAIL = "FAIL"
    NO_EVIDENCE = "NO_EVIDENCE"
    INVALID = "INVALID"
    INCONCLUSIVE = "INCONCLUSIVE"
    SKIPPED = "SKIPPED"


class Severity(StrEnum):
    """How a finding counts."""

    ERROR = "error"
    """Fails its check."""
    WARNING = "warning"
    """Shown; fails nothing."""
    NOTE = "note"


class Threshold(Record):
    """A limit that the policy sets, resolved at plan time so that judging needs nothing but the check."""

    name: str
    value: Setting


class Check(Record):
    """One thing to prove in one cell or in the whole change."""

    id: CheckId
    stage: StageName
    proves: str
    """One sentence: what a PASS says."""
    cell: Cell | None = None
    op: str | None = None
    subject: str | None = None
    """What the check is about where it is no op: an eval's name, a rule, a kernel variant."""
    thresholds: tuple[Threshold, ...] = ()
    parameters: tuple[tuple[str, Scalar], ...] = ()
    """What `sample` needs to run the check, such as seeds and sizes."""
    tier: Tier = Tier.SMOKE
    """Weakest tier whose evidence proves this."""
    is_required: bool = True
    cost_s: float = Field(ge=0)
    """Estimated seconds on the planning machine."""
    unavailable: str | None = None
    """Why this machine cannot run it; such a check is SKIPPED with this reason."""

    def threshold(self, name: str) -> float | int | str | bool:
        """A threshold by name; raises `KeyError` when the plan did not set it."""
        return {t.name: t.value for t in self.thresholds}[name]

    def number(self, name: str) -> float:
        """A numeric threshold by name; raises `KeyError`, or `TypeError` for text."""
        value = self.threshold(name)
        if isinstance(value, str):
            raise TypeError(f"threshold {name!r} of {self.id} is the text {value!r}, not a number")
        return float(value)

    def parameter(self, name: str) -> Scalar:
        """A parameter by name; raises `KeyError` when the plan did not set it."""
        return dict(self.parameters)[name]


class Figure(Record):
    """One number with its conditions. Not measured is None plus a reason, never 0 or NaN."""

    name: str
    """Unit in the name: `latency_us`, `relative_l2`, `path_share`."""
    value: Number | None
    missing: str | None = None
    low: float | None = None
    """Interval, where there is one."""
    high: float | None = None
    note: str = ""

    @model_validator(mode="after")
    def _missing_has_a_reason(self) -> Self:
        if (self.value is None) != (self.missing is not None):
            raise ValueError(f"figure {self.name!r}: a value or a reason why it is missing, and not both")
        return self


class Finding(Record):
    """Something found at a place: a rule's match in a diff, a load above a wait in a kernel."""

    rule: str
    severity: Severity
    message: str
    path: str | None = None
    line: Whole | None = None
    excerpt: str = Field(default="", max_length=400)
    remedy: str = ""
    waived: str | None = None
    """Owner, reason and expiry of the waiver that covers it."""


class Control(Record):
    """The run that shows the check can fail."""

    kind: Literal["switch_off", "poison", "planted", "a_vs_a", "twin"]
    description: str
    """What was done, such as `kda_step output multiplied by 1.05`."""
    failed: bool
    """Whether the check noticed. False makes the check NO_EVIDENCE."""
    observed: str
    """What the check saw under the control, with its number."""


class Outcome(Record):
    """What one check found in one cell. Written once, never edited."""

    check: CheckId
    status: Status
    tier: Tier
    """Tier of the machine that ran it."""
    summary: str
    """One sentence with the number that decided."""
    next_step: str = ""
    """What the reader should do now; empty only for `PASS`."""
    control: Control | None = None
    figures: tuple[Figure, ...] = ()
    findings: tuple[Finding, ...] = ()

    @model_validator(mode="after")
    def _pass_carries_its_control(self) -> Self:
        if self.status is Status.PASS and (self.control is None or not self.control.failed):
            raise ValueError("PASS needs a control that failed; without one the status is NO_EVIDENCE")
        if (self.status is Status.PASS) != (self.next_step == ""):
            raise ValueError(f"{self.check}: every status but PASS says what to do next, and PASS does not")
        return self


class SampleTable(Record):
    """Raw observations: one table, every row kept."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    columns: tuple[str, ...] = Field(min_length=1)
    rows: tuple[tuple[Scalar, ...], ...]

    @model_validator(mode="after")
    def _rows_fit_columns(self) -> Self:
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError(f"table {self.name!r} has a row whose length is not {len(self.columns)}")
        return self

    def records(self) -> tuple[dict[str, Scalar], ...]:
        """Rows as dictionaries by column."""
        return tuple(dict(zip(self.columns, row, strict=True)) for row in self.rows)


class Samples(Record):
    """What `sample` saw in one check: raw, unjudged."""

    check: CheckId
    tier: Tier
    ended: Literal["ran", "crashed", "timed_out"] = "ran"
    """How the candidate ended. A harness fault raises instead and leaves no samples."""
    detail: str = ""
    """Signal or last words of a candidate that crashed."""
    tables: tuple[SampleTable, ...] = ()
    findings: tuple[Finding, ...] = ()
    duration_s: float = Field(default=0.0, ge=0)

    def table(self, name: str) -> SampleTable | None:
        """A table by name."""
        return next((t for t in self.tables if t.name == name), None)


def judged(
    check: Check,
    samples: Samples,
    status: Status,
    summary: str,
    next_steps: Mapping[Status, str],
    control: Control | None,
    figures: tuple[Figure, ...] = (),
    findings: tuple[Finding, ...] = (),
) -> Outcome:
    """The outcome of a check, in which a PASS whose control did not fail has become NO_EVIDENCE.

    `next_steps` says what to do for every status but PASS; raises `KeyError` where it lacks one.
    """
    if status is Status.PASS and (control is None or not control.failed):
        status = Status.NO_EVIDENCE
        seen = "there is none" if control is None else control.observed
        summary = f"{summary}; but the control did not fail ({seen})"
    return Outcome(
        check=check.id,
        status=status,
        tier=samples.tier,
        summary=summary,
        next_step="" if status is Status.PASS else next_steps[status],
        control=control,
        figures=figures,
        findings=findings,
    )
