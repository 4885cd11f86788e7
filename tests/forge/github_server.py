"""A GitHub of one pull request on this machine: keeps comments and check runs, and holds both sides to the
published description.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.forge.description import answer_faults, example_answer, find_operation, request_faults

__all__ = ["Fault", "FakeGitHub", "Seen", "serve_github"]


@dataclass(frozen=True)
class Seen:
    """A request that arrived."""

    method: str
    path: str
    body: Any
    authorization: str | None


@dataclass(frozen=True)
class Fault:
    """An answer that GitHub may give instead of the wanted one."""

    status: int
    headers: tuple[tuple[str, str], ...] = ()
    message: str = "refused"
    raw: bytes | None = None
    only: str = ""
    """Only for requests whose method and path hold this text."""


@dataclass
class FakeGitHub:
    """State, and what went wrong."""

    base_tip: str
    merge_base: str
    head: str
    login: str | None = "octocat"
    """Whose token it is; None for an App's."""
    comments: list[dict[str, Any]] = field(default_factory=list)
    check_runs: dict[int, dict[str, Any]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    """Given one after another, each once."""
    seen: list[Seen] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    """What one of both sides did against the description."""
    url: str = ""

    @property
    def writes(self) -> list[Seen]:
        """Requests that change something."""
        return [s for s in self.seen if s.method != "GET"]

    def add_comment(self, login: str, body: str) -> int:
        """A comment that somebody wrote."""
        number = 100 + len(self.comments)
        operation = find_operation("POST", "/repos/o/r/issues/1/comments")
        assert operation is not None
        comment = example_answer(operation, 201)
        user = {**_user(), "login": login}
        page = f"https://github.example/o/r/pull/1#{number}"
        self.comments.append({**comment, "id": number, "user": user, "body": body, "html_url": page})
        return number

    def answer(self, method: str, path: str, query: str, body: Any) -> tuple[int, Any]:
        """What GitHub would answer, and the change of state."""
        if path == "/user":
            return (403, {"message": "no"}) if self.login is None else (200, {**_user(), "login": self.login})
        if "/pulls/" in path:
            operation = find_operation(method, path)
            assert operation is not None
            pull = example_answer(operation, 200)
            pull["base"]["sha"], pull["head"]["sha"] = self.base_tip, self.head
            return 200, pull
        if "/compare/" in path:
            return self._compare(method, path)
        if "/check-runs" in path:
            return self._check_run(method, path, body)
        if method == "GET":
            asked = parse_qs(query)
            size, page = int(asked["per_page"][0]), int(asked["page"][0])
            return 200, self.comments[(page - 1) * size : page * size]
        if method == "POST":
            number = self.add_comment(self.login or "github-actions[bot]", body["body"])
            return 201, next(c for c in self.comments if c["id"] == number)
        number = int(path.rsplit("/", 1)[1])
        comment = next(c for c in self.comments if c["id"] == number)
        comment["body"] = body["body"]
        return 200, comment

    def _compare(self, method: str, path: str) -> tuple[int, Any]:
        assert path.endswith(f"/{self.base_tip}...{self.head}")
        operation = find_operation(method, path)
        assert operation is not None
        compared = example_answer(operation, 200)
        compared["merge_base_commit"]["sha"] = self.merge_base
        return 200, compared

    def _check_run(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        number = 7 if method == "POST" else int(path.rsplit("/", 1)[1])
        run = self.check_runs.setdefault(number, {"annotations": []})
        run["annotations"] += body["output"].get("annotations", [])
        run.update({k: v for k, v in body.items() if k != "output"}, summary=body["output"]["summary"])
        operation = find_operation("POST", "/repos/o/r/check-runs")
        assert operation is not None
        answer = {**example_answer(operation, 201), "id": number}
        return (201 if method == "POST" else 200), {**answer, "html_url": "https://github.example/o/r/runs/7"}


def _user() -> dict[str, Any]:
    operation = find_operation("GET", "/user")
    assert operation is not None
    user: dict[str, Any] = example_answer(operation, 200)
    return user


class _Handler(BaseHTTPRequestHandler):
    github: FakeGitHub

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = json.loads(raw) if raw else None
        self.github.seen.append(Seen(self.command, parts.path, body, self.headers.get("Authorization")))
        faults = self.github.faults
        if faults and faults[0].only in f"{self.command} {parts.path}":
            fault = faults.pop(0)
            content = json.dumps({"message": fault.message}).encode() if fault.raw is None else fault.raw
            self._send(fault.status, content, fault.headers)
            return
        operation = find_operation(self.command, parts.path)
        if operation is None:
            self.github.violations.append(f"GitHub has no {self.command} {parts.path}")
            self._send(404, b"{}", ())
            return
        if wrong := request_faults(operation, parts.query, raw):
            self.github.violations += wrong
            self._send(422, b"{}", ())
            return
        status, answer = self.github.answer(self.command, parts.path, parts.query, body)
        self.github.violations += answer_faults(operation, status, answer)
        self._send(status, json.dumps(answer).encode(), ())

    do_GET = do_POST = do_PATCH = _serve  # noqa: N815  # names of the standard library

    def _send(self, status: int, content: bytes, headers: tuple[tuple[str, str], ...]) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""


@contextmanager
def serve_github(github: FakeGitHub) -> Iterator[FakeGitHub]:
    """Serve on the loopback interface until the end of the block."""
    handler = type("Handler", (_Handler,), {"github": github})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    github.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield github
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
