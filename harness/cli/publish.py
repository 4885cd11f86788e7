"""`fasttrack publish`: the gate's verdict on a bundle, as a comment and a check run on its pull request."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.selectors import JsonOutput

if TYPE_CHECKING:  # GitHub's client loads when a command runs
    from harness.forge.client import Access
    from harness.forge.publish import Publication, Result
    from harness.report.markdown import Disclosure

__all__ = ["app"]

app = typer.Typer()


@app.command()
def publish(
    bundles: Annotated[
        list[Path],
        typer.Argument(
            metavar="BUNDLE...", help="Folders or .tar.zst; the first is shown, all count for the verdict."
        ),
    ],
    pr: Annotated[str, typer.Option("--pr", metavar="OWNER/REPO#N", help="The pull request.")],
    policy: Annotated[
        str | None, typer.Option("--policy", help="Policy of the verdict; default: the first bundle's own.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Read the pull request, print the exact requests, send none.")
    ] = False,
    offline: Annotated[
        bool,
        typer.Option(
            "--offline", help="With --dry-run: read nothing either; head and base are the bundle's."
        ),
    ] = False,
    comment: Annotated[bool, typer.Option("--comment/--no-comment", help="Write the comment.")] = True,
    check_run: Annotated[
        bool, typer.Option("--check-run/--no-check-run", help="Write the check run (needs an App's token).")
    ] = True,
    login: Annotated[
        str | None,
        typer.Option("--as", help="Account whose comments are our own; needed with an App's token."),
    ] = None,
    max_wait: Annotated[float, typer.Option("--max-wait", help="Longest wait for a rate limit, in s.")] = 120,
    duplicates: Annotated[
        str, typer.Option("--duplicates", help="How earlier work was searched for, for the comment.")
    ] = "",
    ai_use: Annotated[str, typer.Option("--ai-use", help="How AI was used, for the comment.")] = "",
    reviewer: Annotated[str, typer.Option("--reviewer", help="The human who reviewed every line.")] = "",
    json: JsonOutput = False,
) -> None:
    """Publish what the gate says of a bundle: one comment, updated in place, and a check run.

    The token comes from GITHUB_TOKEN or GH_TOKEN. Exit code 0: published, whatever the verdict is; 2: not.
    """
    from harness.cli.console import err, print_json
    from harness.domain.errors import InputError
    from harness.forge.client import open_client, read_access
    from harness.forge.publish import Wanted
    from harness.forge.publish import publish as publish_result
    from harness.forge.pull_request import parse_pull_request
    from harness.report.markdown import Disclosure

    name = parse_pull_request(pr)
    access = read_access()
    if offline and not dry_run:
        raise InputError(
            "--offline sends and reads nothing, so it goes with --dry-run alone; add it, or drop it"
        )
    if access.token is None and not dry_run:
        raise InputError(
            "publishing needs a token; set GITHUB_TOKEN or GH_TOKEN, or look first with --dry-run"
        )
    result = _result(bundles, policy, Disclosure(duplicates, ai_use, reviewer))
    wanted = Wanted(comment, check_run, dry_run, login)
    if offline:
        publication = publish_result(None, name, result, wanted)
    else:
        with open_client(access, lambda words: err.print(words, markup=False), max_wait) as client:
            publication = publish_result(client, name, result, wanted)
    if json:
        print_json(publication)
    else:
        _print(publication, access)


def _result(bundles: list[Path], policy: str | None, disclosure: "Disclosure") -> "Result":
    """What to publish: the bundles verified, gated and rendered."""
    from harness.cli.gate import Judged, gate_submissions
    from harness.documents import load_policy_set
    from harness.evidence.pack import bundle_folder
    from harness.evidence.reader import open_bundle
    from harness.forge.publish import Result
    from harness.report import build_view
    from harness.report.markdown import render_markdown

    with bundle_folder(bundles[0]) as folder:
        opened = open_bundle(folder)
        asked = load_policy_set(policy) if policy else opened.plan.policy
        # The first bundle's head is the pull request's, or nothing is published; what is of another is stale.
        verdict, submissions = gate_submissions(
            [folder, *bundles[1:]], asked, Judged(opened.plan.change.head)
        )
        view = build_view(opened, verdict, submissions[0].verification)
        return Result(
            manifest=opened.manifest,
            digest=opened.digest,
            state=submissions[0].verification.state,
            change=opened.plan.change,
            outcomes=submissions[0].outcomes,
            verdict=verdict,
            body=render_markdown(view, disclosure),
        )


def _print(publication: "Publication", access: "Access") -> None:
    from json import dumps

    from harness.cli.console import out
    from harness.forge.client import request_headers
    from harness.report.text import plain

    def say(text: str) -> None:
        out.print(text, markup=False, soft_wrap=True)

    if publication.is_dry_run:
        for request in publication.requests:
            say(f"{request.method} {access.api}{request.path}")
            for header, value in request_headers(access).items():
                say(f"{header}: {value}")
            say(dumps(request.json_body(), indent=2))  # ASCII: nothing of a bundle acts on a terminal
    for note in publication.notes:
        say(note)
    for address in publication.addresses:
        say(f"written: {plain(address, 300)}")
    if publication.is_dry_run:
        say(
            f"{len(publication.requests)} requests would be sent to {publication.pull_request.name}; none was"
        )
