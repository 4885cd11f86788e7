"""From a bundle to what a report shows. Pure but for reading samples, which panels may ask for.

The report reads the bundle and, where somebody judged it, a verdict; it judges nothing itself.
"""

from collections import Counter
from collections.abc import Sequence

from harness.domain.bundle import Verification
from harness.domain.check import Check, Outcome, StageName, Status
from harness.domain.verdict import Verdict
from harness.evidence.reader import Bundle
from harness.report.findings import finding_view
from harness.report.headlines import headlines
from harness.report.panels import panels_of
from harness.report.panels.material import Material, cell_name
from harness.report.plots import status_bar
from harness.report.provenance import (
    check_command,
    environment_tables,
    reproduce_commands,
    subtitle,
    verification_words,
)
from harness.report.text import STATUS_MARKS, anchor, figure_text, label, plain
from harness.report.verdict import matrix_rows, missing_views, verdict_view
from harness.report.view import CheckView, FigureView, ReportView, StageView

__all__ = ["build_view"]

QUESTIONS = {
    StageName.ISOLATION: "Does the change stay inside what it may touch?",
    StageName.AUDIT: "Is the compiled code what the source says, on every claimed architecture?",
    StageName.KERNELS: "Is each op as exact as stock, over the claimed cells and hostile inputs?",
    StageName.COVERAGE: "Did the optimised path really run, and would we notice if it were wrong?",
    StageName.EVALS: "Does the whole path keep the model's answers?",
    StageName.SWEEP: "Is it faster, where, and where not?",
}


def build_view(
    bundle: Bundle,
    verdict: Verdict | None = None,
    verification: Verification | None = None,
    path: str = "BUNDLE",
) -> ReportView:
    """The view of one bundle; `path` is where its reader has it, for the commands."""
    outcomes = {o.check: o for o in bundle.outcomes}
    plan = bundle.plan
    stages = tuple(_stage(bundle, stage, outcomes, path) for stage in StageName if plan.of_stage(stage))
    seen = {status for stage in stages for status, _ in stage.counts}
    return ReportView(
        title=plain(plan.claim.name, 80),
        subtitle=subtitle(bundle),
        verdict=verdict_view(bundle, verdict),
        missing=missing_views(verdict) if verdict else (),
        matrix=matrix_rows(bundle, verdict),
        statuses=tuple(s.value for s in Status if s.value in seen),
        headlines=headlines(bundle),
        stages=stages,
        environment=environment_tables(bundle),
        path=plain(path, 300),
        reproduce=reproduce_commands(bundle, path),
        verification=verification_words(verification),
        footer=f"bundle {bundle.digest or 'not finished'}, plan {plan.digest()}",
    )


def _stage(bundle: Bundle, stage: StageName, outcomes: dict[str, Outcome], path: str) -> StageView:
    checks = bundle.plan.of_stage(stage)
    pairs = tuple((c, outcomes[c.id]) for c in checks if c.id in outcomes)
    counts = _counts([o for _, o in pairs])
    material = Material(bundle.plan, pairs, bundle.samples)
    return StageView(
        name=stage.value,
        title=stage.value.capitalize(),
        question=QUESTIONS[stage],
        counts=counts,
        bar=status_bar(counts, ", ".join(f"{n} {s}" for s, n in counts) or "nothing ran", len(checks)),
        controls=sum(o.control is not None and o.control.failed for _, o in pairs),
        checks=tuple(_check(c, outcomes.get(c.id), bundle, path) for c in checks),
        panels=panels_of(stage, material),
    )


def _counts(outcomes: Sequence[Outcome]) -> tuple[tuple[str, int], ...]:
    found = Counter(o.status for o in outcomes)
    return tuple((s.value, found[s]) for s in Status if found[s])


def _check(check: Check, outcome: Outcome | None, bundle: Bundle, path: str) -> CheckView:
    control = outcome.control if outcome else None
    status = outcome.status.value if outcome else ""
    return CheckView(
        id=check.id,
        anchor=anchor(check.id),
        status=status,
        mark=STATUS_MARKS.get(status, "?"),
        proves=plain(check.proves),
        summary=plain(outcome.summary) if outcome else "this check has no outcome: the run did not finish",
        next_step=plain(outcome.next_step) if outcome else "go on with the run: fasttrack validate --resume",
        control="" if control is None else f"{plain(control.description)}: {plain(control.observed)}",
        has_failing_control=control is not None and control.failed,
        tier=outcome.tier.value if outcome else "",
        cell=cell_name(check),
        is_required=check.is_required,
        figures=tuple(
            FigureView(
                label(f.name), plain(figure_text(f), 160), plain(f.note or f.missing or ""), f.value is None
            )
            for f in (outcome.figures if outcome else ())
        ),
        findings=tuple(finding_view(f, bundle.plan) for f in (outcome.findings if outcome else ())),
        thresholds=tuple((label(t.name), plain(str(t.value), 160)) for t in check.thresholds),
        rerun=plain(check_command(path, check), 700) if outcome else "",
    )
