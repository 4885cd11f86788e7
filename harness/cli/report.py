"""`fasttrack report`: a bundle as a page and as a comment."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer()


@app.command()
def report(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="Folder or .tar.zst.")],
    html: Annotated[Path | None, typer.Option("--html", help="Write the page here.")] = None,
    md: Annotated[Path | None, typer.Option("--md", help="Write the comment here.")] = None,
    policy: Annotated[
        str | None, typer.Option("--policy", help="Policy of the verdict; default: the bundle's own.")
    ] = None,
    duplicates: Annotated[
        str, typer.Option("--duplicates", help="How earlier work was searched for, for the comment.")
    ] = "",
    ai_use: Annotated[str, typer.Option("--ai-use", help="How AI was used, for the comment.")] = "",
    reviewer: Annotated[str, typer.Option("--reviewer", help="The human who reviewed every line.")] = "",
) -> None:
    """Render a bundle as HTML and Markdown. Without --html and --md, the Markdown goes to standard output."""
    from harness.cli.gate import gate_submissions
    from harness.documents import load_policy_set
    from harness.evidence.pack import bundle_folder
    from harness.evidence.reader import open_bundle
    from harness.report import build_view, render_html
    from harness.report.markdown import Disclosure, render_markdown

    with bundle_folder(bundle) as folder:
        opened = open_bundle(folder)
        asked = load_policy_set(policy) if policy else opened.plan.policy
        verdict, submissions = gate_submissions([folder], asked)
        view = build_view(opened, verdict, submissions[0].verification)
    comment = render_markdown(view, Disclosure(duplicates, ai_use, reviewer))
    if html is not None:
        html.write_text(render_html(view), encoding="utf-8")
        typer.echo(html)
    if md is not None:
        md.write_text(comment, encoding="utf-8")
        typer.echo(md)
    if html is None and md is None:
        typer.echo(comment)
