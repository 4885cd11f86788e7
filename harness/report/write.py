"""Put a bundle's report on disk."""

from pathlib import Path
from typing import NamedTuple

from harness.domain.bundle import Verification
from harness.domain.errors import InputError
from harness.domain.verdict import Verdict
from harness.evidence.reader import open_bundle
from harness.report.build import build_view
from harness.report.html import render_html
from harness.report.markdown import Disclosure, render_markdown

__all__ = ["ReportFiles", "shown_path", "write_report"]


class ReportFiles(NamedTuple):
    """Where a report lies."""

    html: Path
    markdown: Path


def shown_path(bundle: Path) -> str:
    """A bundle's path as pages show it: as given, or its name alone where the path tells of a machine."""
    return bundle.name if bundle.is_absolute() else str(bundle)


def write_report(
    bundle: Path,
    folder: Path,
    verdict: Verdict | None = None,
    verification: Verification | None = None,
    disclosure: Disclosure | None = None,
) -> ReportFiles:
    """Write `report.html` and `report.md` about a bundle's folder; raises `InputError` for a folder inside
    the bundle, which would no longer verify.
    """
    if folder.resolve().is_relative_to(bundle.resolve()):
        raise InputError(
            f"{folder} lies inside the bundle, which holds evidence only; choose a folder outside"
        )
    view = build_view(open_bundle(bundle), verdict, verification, shown_path(bundle))
    folder.mkdir(parents=True, exist_ok=True)
    files = ReportFiles(folder / "report.html", folder / "report.md")
    files.html.write_text(render_html(view), encoding="utf-8")
    files.markdown.write_text(render_markdown(view, disclosure), encoding="utf-8")
    return files
