"""A pull request, a bundle about it and a verdict, for the forge's tests."""

from pathlib import Path
from typing import Any

from harness.domain.bundle import BundleState, ChangeReference, Manifest
from harness.domain.change import Change, ChangedFile, FileKind
from harness.domain.check import Finding, Outcome, Severity, Status
from harness.domain.machine import Tier
from harness.domain.verdict import Answer, Verdict
from harness.evidence.reader import open_bundle
from harness.forge.client import Access
from harness.forge.publish import Result
from harness.report.markdown import MARKER
from tests.evidence.example_run import BASE, HEAD, write_example
from tests.forge.github_server import FakeGitHub

__all__ = [
    "BASE", "BODY", "HEAD", "TIP", "TOKEN", "access_to", "change_of", "example_result", "finding", "github",
    "manifest_about", "outcome_with", "verdict_of",
]  # fmt: skip

TIP = "c" * 40
"""Where the branch is that the pull request is meant for."""
TOKEN = "ghp_s3cr3tT0kenOfSomebody"
BODY = f"{MARKER}\n\n## fasttrack: rejected\n"


def github(**changes: Any) -> FakeGitHub:
    """A pull request of the example bundle's change."""
    values: dict[str, Any] = {"base_tip": TIP, "merge_base": BASE, "head": HEAD}
    return FakeGitHub(**{**values, **changes})


def access_to(server: FakeGitHub, token: str | None = TOKEN) -> Access:
    """The way to the server."""
    return Access(server.url, token)


def verdict_of(answer: Answer = Answer.REJECTED) -> Verdict:
    """A verdict without grounds."""
    return Verdict(
        answer=answer, exit_code=answer.exit_code, policy="fast_track", claim="k3_decode", repository=None,
        pr=None, head=HEAD, reasons=("nothing was proved",), bundles=(),
    )  # fmt: skip


def change_of(*paths: str, **changes: Any) -> Change:
    """A change that adds files."""
    files = tuple(ChangedFile(path=p, status="added", kind=FileKind.TEXT, **changes) for p in paths)
    return Change(repository="o/r", base=BASE, head=HEAD, files=files)


def finding(path: str | None = "a.py", line: int | None = 3, **changes: Any) -> Finding:
    """An error at a line."""
    values: dict[str, Any] = {"rule": "monkey_patch", "severity": Severity.ERROR, "message": "patches torch"}
    return Finding(path=path, line=line, **{**values, **changes})


def outcome_with(*findings: Finding) -> Outcome:
    """A failed check."""
    return Outcome(
        check="isolation/reach", status=Status.FAIL, tier=Tier.SMOKE, summary="found something",
        next_step="mend it", findings=findings,
    )  # fmt: skip


def example_result(folder: Path, **changes: Any) -> Result:
    """A result about the example bundle, whose pull request is number 61867."""
    bundle = open_bundle(write_example(folder))
    values: dict[str, Any] = {
        "manifest": bundle.manifest, "digest": bundle.digest, "state": BundleState.VERIFIED,
        "change": bundle.plan.change, "outcomes": bundle.outcomes, "verdict": verdict_of(), "body": BODY,
    }  # fmt: skip
    return Result(**{**values, **changes})


def manifest_about(result: Result, **changes: Any) -> Manifest:
    """The result's manifest with another change reference."""
    assert result.manifest is not None
    reference = ChangeReference.model_validate({**result.manifest.change.model_dump(), **changes})
    return result.manifest.model_copy(update={"change": reference})
