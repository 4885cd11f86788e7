"""Publish a verdict to the pull request that it is about, and to no other.

Steps, in order:
1. refuse a bundle that is broken, unfinished or of uncommitted code
2. read the pull request; refuse unless its head is the bundle's and its merge base the bundle's base
3. find our own comment
4. send the comment, then the check run; or, in a dry run, send nothing

Same head and same base is the same change, as a commit's id covers its content and its history; so the name
of the repository, which differs between forks, is not compared.
"""

from dataclasses import dataclass
from typing import Literal

from harness.domain.bundle import BundleState, Manifest
from harness.domain.change import Change
from harness.domain.check import Outcome
from harness.domain.errors import EvidenceError, InputError, ServiceError
from harness.domain.record import Digest, Record
from harness.domain.verdict import Verdict
from harness.forge.check_run import annotations_of, check_run_requests
from harness.forge.client import Answer, Client, Refused
from harness.forge.comment import PER_PAGE, Comment, comment_requests, comments_path, own_comments
from harness.forge.pull_request import PullRequest, PullRequestName, read_pull_request
from harness.forge.requests import CHECK_RUN_ID, ApiRequest

__all__ = ["MAX_PAGES", "Publication", "Result", "Wanted", "publish", "require_same_change"]

MAX_PAGES = 50
"""Of comments: 5,000. Past them ours cannot be found, and a second one must not be made."""


@dataclass(frozen=True, slots=True)
class Result:
    """What is published: a verified bundle, what the gate says of it, and the comment that renders it."""

    manifest: Manifest | None
    digest: str | None
    state: BundleState
    change: Change
    outcomes: tuple[Outcome, ...]
    verdict: Verdict
    body: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked for."""

    comment: bool = True
    check_run: bool = True
    is_dry_run: bool = False
    login: str | None = None
    """Account whose comments are ours; None asks GitHub whose token this is."""


class Publication(Record):
    """What was sent, or in a dry run would be."""

    schema_version: Literal[1] = 1
    pull_request: PullRequest
    bundle: Digest
    is_dry_run: bool
    requests: tuple[ApiRequest, ...]
    addresses: tuple[str, ...] = ()
    """Web pages of what was written."""
    notes: tuple[str, ...] = ()


class _Written(Answer):
    id: int
    html_url: str | None = None


def publish(client: Client | None, name: PullRequestName, result: Result, wanted: Wanted) -> Publication:
    """Publish; raises `EvidenceError` for a bundle of another change, `InputError`, `ServiceError`. Only an
    offline dry run has no client.
    """
    manifest, digest = _require_finished(result)
    requests: tuple[ApiRequest, ...] = ()
    notes: list[str] = []
    pull = _unread(name, manifest, notes) if client is None else read_pull_request(client, name)
    require_same_change(pull, manifest)
    if wanted.comment:
        own = () if client is None else own_comments(_comments(client, name), _login(client, wanted, notes))
        requests += comment_requests(name, result.body, own)
        if not requests:
            notes.append("our comment says this already")
    if wanted.check_run:
        found = annotations_of(result.change, result.outcomes)
        requests += check_run_requests(pull, result.verdict, result.body, digest, found)
    sent = Publication(
        pull_request=pull,
        bundle=digest,
        is_dry_run=wanted.is_dry_run or client is None,
        requests=requests,
        notes=tuple(notes),
    )
    return sent if wanted.is_dry_run or client is None else _send(client, sent)


def _unread(name: PullRequestName, manifest: Manifest, notes: list[str]) -> PullRequest:
    """The pull request as the bundle would have it."""
    notes.append(
        "offline: nothing was read from GitHub, so head and base are the bundle's own, and a comment of ours "
        "that is there already would be edited where these requests write a new one"
    )
    change = manifest.change
    return PullRequest(
        owner=name.owner, repo=name.repo, number=name.number, base=change.base, head=change.head
    )


def require_same_change(pull: PullRequest, manifest: Manifest) -> None:
    """Raise `EvidenceError` unless the bundle is about exactly what the pull request asks to merge."""
    of_bundle = manifest.change
    faults = []
    if of_bundle.pr is not None and of_bundle.pr != pull.number:
        faults.append(f"it was made for pull request {of_bundle.pr}")
    if of_bundle.head != pull.head:
        faults.append(f"its head is {of_bundle.head[:12]}, the pull request's is {pull.head[:12]}")
    if of_bundle.base != pull.base:
        faults.append(f"its base is {of_bundle.base[:12]}, the pull request starts from {pull.base[:12]}")
    if of_bundle.is_dirty:
        faults.append("it was made with uncommitted code")
    if faults:
        raise EvidenceError(
            f"the bundle is not about {pull.name}: {'; '.join(faults)}. Run "
            f"`fasttrack validate --pr {pull.name}` on the present head, and publish that bundle"
        )


def _require_finished(result: Result) -> tuple[Manifest, str]:
    """Step 1."""
    if result.manifest is None or result.digest is None:
        raise EvidenceError("the run has not finished, so there is nothing to publish; go on with --resume")
    if result.state is BundleState.BROKEN:
        raise EvidenceError(
            "the bundle does not verify, so nothing of it is published; `fasttrack bundle verify` says why"
        )
    return result.manifest, result.digest


def _comments(client: Client, name: PullRequestName) -> list[Comment]:
    found: list[Comment] = []
    for page in range(1, MAX_PAGES + 1):
        part = client.read(comments_path(name), list[Comment], per_page=PER_PAGE, page=page)
        found += part
        if len(part) < PER_PAGE:
            return found
    raise InputError(
        f"{name} has over {MAX_PAGES * PER_PAGE} comments, so ours cannot be told from a missing one; "
        "publish the check run alone (--no-comment)"
    )


def _login(client: Client, wanted: Wanted, notes: list[str]) -> str | None:
    """Whose comments are ours."""
    if wanted.login is not None:
        return wanted.login
    if client.access.token is None:
        notes.append("without a token, an earlier comment of ours is not looked for")
        return None
    try:
        return client.read("/user", _User).login
    except Refused as error:
        if error.status != 403:
            raise
        raise InputError(
            "this token belongs to a GitHub App, which GitHub does not name; say whose comments are its own "
            "with --as, like --as 'github-actions[bot]'"
        ) from None


class _User(Answer):
    login: str


def _send(client: Client, planned: Publication) -> Publication:
    """Step 4. Where a request fails, the error says what was written before it."""
    addresses: list[str] = []
    check_run = ""
    for request in planned.requests:
        filled = request.model_copy(update={"path": request.path.replace(CHECK_RUN_ID, check_run)})
        try:
            written = client.send(filled, _Written)
        except ServiceError as error:
            done = f" (already written: {', '.join(addresses)})" if addresses else ""
            raise ServiceError(f"{error}{done}") from error
        if request.method == "POST" and request.path.endswith("/check-runs"):
            check_run = str(written.id)
        if written.html_url is not None and written.html_url not in addresses:
            addresses.append(written.html_url)
    return planned.model_copy(update={"addresses": tuple(addresses)})
