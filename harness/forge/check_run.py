"""The check run: the verdict on one commit, with findings at the lines that they are about. Pure.

Invariant: only an admission gives a conclusion that lets a pull request pass. `neutral` and `skipped` count
as passed where a check is required, so what could not be judged is `action_required`. A run whose annotations
take several requests is in progress until the last one, so that a crash in between leaves no verdict.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from harness.domain.change import Change
from harness.domain.check import Finding, Outcome, Severity
from harness.domain.verdict import Answer, Verdict
from harness.forge.pull_request import PullRequest
from harness.forge.requests import (
    CHECK_RUN_ID,
    MAX_ANNOTATIONS,
    MAX_BODY,
    Annotation,
    ApiRequest,
    CheckOutput,
    CheckRun,
    CheckRunUpdate,
    Conclusion,
)
from harness.report.text import plain

__all__ = ["CHECK_NAME", "Annotations", "annotations_of", "check_run_requests"]

CHECK_NAME = "fasttrack"
MAX_SHOWN = 200
"""Annotations in all: four requests. Nobody reads more, and the report has every finding."""
CONCLUSIONS: dict[Answer, Conclusion] = {
    Answer.ADMITTED: "success",
    Answer.REJECTED: "failure",
    Answer.COULD_NOT_JUDGE: "action_required",
}


class Annotations(NamedTuple):
    """What is shown at lines, and how many findings are not."""

    shown: tuple[Annotation, ...]
    left_out: int


def annotations_of(change: Change, outcomes: Sequence[Outcome]) -> Annotations:
    """Findings in files of the change that exist at its head, worst first, each once."""
    places = {f.path for f in change.files if f.status != "deleted" and plain(f.path, 1024) == f.path}
    findings = dict.fromkeys(f for outcome in outcomes for f in outcome.findings)
    inside = [f for f in findings if f.path in places]
    inside.sort(key=lambda f: (_LEVELS.index(_level(f)), f.path or "", f.line or 0, f.rule))
    shown = tuple(_annotation(f) for f in inside[:MAX_SHOWN])
    return Annotations(shown, len(findings) - len(shown))


def check_run_requests(
    pull: PullRequest, verdict: Verdict, body: str, bundle_digest: str, annotations: Annotations
) -> tuple[ApiRequest, ...]:
    """One request for each fifty annotations, the first of which creates the run; `body` is the comment."""
    pieces = [
        annotations.shown[i : i + MAX_ANNOTATIONS] for i in range(0, len(annotations.shown), MAX_ANNOTATIONS)
    ] or [()]
    title = f"{verdict.answer.value.replace('_', ' ')} under policy {verdict.policy}"
    summary = _summary(body, annotations)
    path = f"{pull.name.path}/check-runs"
    requests = []
    for number, piece in enumerate(pieces):
        output = CheckOutput(title=title, summary=summary, annotations=piece)
        is_last = number == len(pieces) - 1
        conclusion = CONCLUSIONS[verdict.answer] if is_last else None
        if number:
            update = CheckRunUpdate(status=_status(is_last), conclusion=conclusion, output=output)
            requests.append(ApiRequest(method="PATCH", path=f"{path}/{CHECK_RUN_ID}", body=update))
        else:
            run = CheckRun(
                name=CHECK_NAME, head_sha=pull.head, external_id=f"bundle {bundle_digest}",
                status=_status(is_last), conclusion=conclusion, output=output,
            )  # fmt: skip
            requests.append(ApiRequest(method="POST", path=path, body=run))
    return tuple(requests)


_LEVELS = ("failure", "warning", "notice")


def _level(finding: Finding) -> str:
    if finding.waived is not None:
        return "notice"
    return {Severity.ERROR: "failure", Severity.WARNING: "warning", Severity.NOTE: "notice"}[finding.severity]


def _annotation(finding: Finding) -> Annotation:
    words = [finding.message, finding.remedy and f"To do: {finding.remedy}"]
    words += [f"Waived: {finding.waived}" if finding.waived is not None else ""]
    line = max(1, finding.line or 1)
    return Annotation.model_validate(
        {
            "path": finding.path,
            "start_line": line,
            "end_line": line,
            "annotation_level": _level(finding),
            "title": plain(finding.rule, 200) or "finding",
            "message": "\n".join(plain(w, 2000) for w in words if w) or "no message",
        }
    )


def _status(is_last: bool) -> Literal["in_progress", "completed"]:
    return "completed" if is_last else "in_progress"


def _summary(body: str, annotations: Annotations) -> str:
    more = ""
    if annotations.left_out:
        more = f"\n\nFindings that are not shown at lines: {annotations.left_out}; the report has all.\n"
    return body[: MAX_BODY - len(more)] + more
