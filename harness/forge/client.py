"""The one door to GitHub: a token from the environment, bounded waits, errors in words.

Invariant: the token appears in the `Authorization` header of requests to the API's own host and nowhere else,
in no message, log or record. Redirects are not followed, as a redirect could carry it elsewhere. A request
that may have taken effect is not sent twice: only refusals for a rate limit, and reads, are tried again.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from harness import __version__
from harness.domain.errors import DeviceMissing, InputError, ServiceError
from harness.forge.requests import ApiRequest
from harness.report.text import plain

if TYPE_CHECKING:  # loaded when a client is opened, as it takes a second
    from githubkit import GitHub, Response
    from githubkit.exception import GitHubException
    from githubkit.retry import RetryOption

__all__ = [
    "API_VERSION", "Access", "Answer", "Client", "Refused", "open_client", "read_access",
    "request_headers",
]  # fmt: skip

API_VERSION = "2022-11-28"
TOKEN_VARIABLES = ("GITHUB_TOKEN", "GH_TOKEN")
DEFAULT_API = "https://api.github.com"
TRIES = 3
MAX_ANSWER_BYTES = 64 * 2**20
"""A page of 100 comments of the greatest length stays under it."""
_TOKEN = re.compile(r"[!-~]{1,1024}")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_T = TypeVar("_T")


class Answer(BaseModel):
    """Base of what is read out of GitHub's answers: the fields that are used, whatever else there is."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class Refused(ServiceError):
    """GitHub answered that it does not do this."""

    def __init__(self, words: str, status: int) -> None:
        super().__init__(words)
        self.status = status


@dataclass(frozen=True, slots=True, repr=False)
class Access:
    """Where the API is, and the token for it. Its `repr` does not show the token."""

    api: str
    token: str | None

    def __repr__(self) -> str:
        return f"Access(api={self.api!r}, token={'set' if self.token else 'none'})"


def read_access(variables: Mapping[str, str] | None = None) -> Access:
    """Token and address from the environment; raises `InputError` for ones that cannot be used."""
    values = os.environ if variables is None else variables
    name = next((n for n in TOKEN_VARIABLES if values.get(n)), None)
    token = None if name is None else values[name].strip()
    if token is not None and not _TOKEN.fullmatch(token):
        raise InputError(f"{name} holds something that is no token (blanks or odd characters); set it anew")
    api = values.get("GITHUB_API_URL") or DEFAULT_API
    parts = urlsplit(api)
    is_local = parts.scheme == "http" and parts.hostname in _LOOPBACK
    if not parts.hostname or parts.username or (parts.scheme != "https" and not is_local):
        raise InputError("GITHUB_API_URL is no https address without credentials; correct or unset it")
    return Access(api.rstrip("/"), token)


def request_headers(access: Access) -> dict[str, str]:
    """Headers of every request that matter to GitHub, without the token."""
    headers = {
        "Accept": "application/vnd.github+json",
        "User-Agent": f"fasttrack/{__version__}",
        "X-GitHub-Api-Version": API_VERSION,
    }
    return headers if access.token is None else {**headers, "Authorization": "token (from the environment)"}


class Client:
    """Requests over one connection. Made by `open_client`, which closes it."""

    def __init__(self, github: "GitHub[Any]", access: Access) -> None:
        self._github = github
        self.access = access

    def read(self, path: str, kind: type[_T], **parameters: str | int) -> _T:
        """The answer to a GET; raises `ServiceError`."""
        response = self._ask("GET", path, params=dict(parameters))
        return self._parse(response, kind, f"GET {path}")

    def send(self, request: ApiRequest, kind: type[_T]) -> _T:
        """The answer to a request that changes something; raises `ServiceError`."""
        response = self._ask(request.method, request.path, json=request.json_body())
        return self._parse(response, kind, f"{request.method} {request.path}")

    def _ask(self, method: str, path: str, **content: Any) -> "Response[Any]":
        from githubkit.exception import GitHubException, RequestFailed

        what = f"{method} {path}"
        try:
            response = self._github.request(
                method, path, headers={"X-GitHub-Api-Version": API_VERSION}, **content
            )
        except RequestFailed as error:
            raise _refusal(what, error) from None  # its chain holds the request with its headers
        except GitHubException as error:
            cause = getattr(error, "exc", error)
            raise ServiceError(
                f"{self.access.api}: no answer to {what} ({type(cause).__name__}); check the network and "
                "proxy settings, then run the command again"
            ) from None
        except ValueError:  # a header that is no number
            raise ServiceError(
                f"{self.access.api}: the answer to {what} cannot be read; try again later"
            ) from None
        if response.status_code >= 300:
            raise ServiceError(
                f"{self.access.api}: {what} was answered with a redirect, which is not followed; the "
                "repository may have been renamed, so use its present name"
            )
        return response

    def _parse(self, response: "Response[Any]", kind: type[_T], what: str) -> _T:
        content = response.content
        try:
            if len(content) > MAX_ANSWER_BYTES:
                raise ValueError("too long")
            return TypeAdapter(kind).validate_json(content)
        except (ValidationError, ValueError):
            raise ServiceError(
                f"{self.access.api}: the answer to {what} is not what GitHub documents; check GITHUB_API_URL"
            ) from None


@contextmanager
def open_client(
    access: Access, say: Callable[[str], None], max_wait_s: float = 120.0, timeout_s: float = 30.0
) -> Iterator[Client]:
    """A client; `say` is told why it waits. Raises `DeviceMissing` where githubkit is not installed."""
    try:
        from githubkit import GitHub
    except ImportError as error:
        raise DeviceMissing(
            f"GitHub cannot be asked: {error}; install the extra: pip install 'fasttrack[publish]'"
        ) from error
    github = GitHub(
        access.token,
        base_url=access.api,
        user_agent=f"fasttrack/{__version__}",
        follow_redirects=False,
        http_cache=False,
        timeout=timeout_s,
        auto_retry=_retry(say, max_wait_s),
    )
    with github:
        yield Client(github, access)


def _retry(say: Callable[[str], None], max_wait_s: float) -> "Callable[[GitHubException, int], RetryOption]":
    from githubkit.exception import RateLimitExceeded, RequestFailed, RequestTimeout
    from githubkit.retry import RetryOption

    def decide(error: "GitHubException", count: int) -> RetryOption:
        if count >= TRIES:
            return RetryOption(False)
        if isinstance(error, RateLimitExceeded):
            wait_s = error.retry_after.total_seconds()
            if wait_s > max_wait_s:
                return RetryOption(False)
            say(f"GitHub's rate limit is reached; going on in {wait_s:.0f} s")
            # No wait at all would be taken for the library's default of a minute.
            return RetryOption(True, timedelta(seconds=max(wait_s, 0.01)))
        is_outage = isinstance(error, RequestFailed) and error.response.status_code >= 500
        is_read = isinstance(error, RequestFailed | RequestTimeout) and error.request.method == "GET"
        if is_read and (is_outage or isinstance(error, RequestTimeout)):
            say("GitHub did not answer; asking again")
            return RetryOption(True, timedelta(seconds=0.25 * 4**count))
        return RetryOption(False)

    return decide


class _Message(Answer):
    message: str = ""


def _refusal(what: str, error: Any) -> Refused:
    """A refused request in words."""
    from githubkit.exception import RateLimitExceeded

    status = error.response.status_code
    try:
        said = _Message.model_validate_json(error.response.content[:MAX_ANSWER_BYTES]).message
    except ValidationError:
        said = ""
    words = f": {plain(said, 200)}" if said else ""
    if isinstance(error, RateLimitExceeded):
        wait_s = error.retry_after.total_seconds()
        return Refused(
            f"GitHub refused {what} for its rate limit ({status}{words}); run the command again in "
            f"{wait_s:.0f} s",
            status,
        )
    return Refused(f"GitHub refused {what} ({status}{words}); {_advice(status)}", status)


def _advice(status: int) -> str:
    return {
        401: "the token in GITHUB_TOKEN or GH_TOKEN is not valid, so make a new one",
        403: "the token may not do this: comments need `pull-requests: write`, check runs `checks: write` "
        "and a token of a GitHub App, such as the one of GitHub Actions",
        404: "correct the name, or use a token that can see it",
        410: "it is gone or its conversation is locked",
        422: "this is a fault of fasttrack if the bundle is a sound one; please report it",
    }.get(status, "try again later")
