"""`fasttrack report`: a bundle as a page, as a comment, and as the files that other tools read."""

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer()


class Form(StrEnum):
    """What a bundle can be rendered as."""

    MARKDOWN = "markdown"
    HTML = "html"
    JUNIT = "junit"
    SARIF = "sarif"


@app.command()
def report(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="Folder or .tar.zst.")],
    html: Annotated[Path | None, typer.Option("--html", help="Write the page here.")] = None,
    md: Annotated[Path | None, typer.Option("--md", help="Write the comment here.")] = None,
    junit: Annotated[Path | None, typer.Option("--junit", help="Write JUnit XML here.")] = None,
    sarif: Annotated[Path | None, typer.Option("--sarif", help="Write SARIF here.")] = None,
    form: Annotated[
        Form | None, typer.Option("--format", help="Put this on standard output; default: markdown.")
    ] = None,
    policy: Annotated[
        str | None, typer.Option("--policy", help="Policy of the verdict; default: the bundle's own.")
    ] = None,
    duplicates: Annotated[
        str, typer.Option("--duplicates", help="How earlier work was searched for, for the comment.")
    ] = "",
    ai_use: Annotated[str, typer.Option("--ai-use", help="How AI was used, for the comment.")] = "",
    reviewer: Annotated[str, typer.Option("--reviewer", help="The human who reviewed every line.")] = "",
) -> None:
    """Render a bundle as HTML, Markdown, JUnit XML or SARIF. With no file named, one of them goes to standard
    output.
    """
    from harness.cli.gate import gate_submissions
    from harness.documents import load_policy_set
    from harness.domain.errors import InputError
    from harness.evidence.pack import bundle_folder
    from harness.evidence.reader import open_bundle
    from harness.report import build_view, render_html
    from harness.report.junit import render_junit, sampling_times
    from harness.report.markdown import Disclosure, render_markdown
    from harness.report.sarif import render_sarif
    from harness.report.write import shown_path

    files = {Form.HTML: html, Form.MARKDOWN: md, Form.JUNIT: junit, Form.SARIF: sarif}
    for asked_for in filter(None, files.values()):
        if not asked_for.parent.is_dir():
            raise InputError(
                f"{asked_for} cannot be written: there is no folder {asked_for.parent}; make it first"
            )
    with bundle_folder(bundle) as folder:
        opened = open_bundle(folder)
        asked = load_policy_set(policy) if policy else opened.plan.policy
        verdict, submissions = gate_submissions([folder], asked)
        view = build_view(opened, verdict, submissions[0].verification, shown_path(bundle))
        times = sampling_times(opened)
    judged = submissions[0].outcomes
    renderers: dict[Form, Callable[[], str]] = {
        Form.HTML: lambda: render_html(view),
        Form.MARKDOWN: lambda: render_markdown(view, Disclosure(duplicates, ai_use, reviewer)),
        Form.JUNIT: lambda: render_junit(opened, judged, verdict, times),
        Form.SARIF: lambda: render_sarif(opened, judged, verdict),
    }
    for kind, path in files.items():
        if path is not None:
            path.write_text(renderers[kind](), encoding="utf-8")
            typer.echo(path, err=form is not None)
    if form is not None or not any(files.values()):
        typer.echo(renderers[form or Form.MARKDOWN]())
