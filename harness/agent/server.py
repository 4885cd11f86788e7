"""The judge as an MCP server: tools that answer with the records of the command line, and what can be read.

Long calls report progress and can be cancelled; what they run ends with them. One heavy tool runs at a time,
as times are compared. An agent edits files of its workspace by its own means; no tool writes there but
`read_contract`, which lays them out.
"""

import hmac
import socket
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel
from mcp.server.fastmcp import Context, FastMCP
from mcp.server.fastmcp.exceptions import ToolError

from harness.agent.commands import run_command
from harness.agent.judge import Judge, Progress, Said, Settings
from harness.documents import load_claim, load_policy_set
from harness.domain.errors import FasttrackError, InputError

__all__ = ["Judges", "http_server", "make_server"]

INSTRUCTIONS = (
    "fasttrack judges changes to GPU and CPU kernels. Read an op's contract, edit its files in the "
    "workspace, test and benchmark freely, and submit attempts sparingly: they are counted, tried on inputs "
    "that you cannot see, and many of them make each interval stricter. Only an accepted attempt counts."
)
TOOL_S = 1800.0
Scope = dict[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]


class Judges:
    """A judge for each op that was asked for, under one set of settings."""

    def __init__(self, settings: Settings, only: Judge | None = None) -> None:
        self.settings = settings
        self._by_op: dict[str, Judge] = {} if only is None else {only.op: only}
        self._only = only
        self._lock = threading.Lock()

    def of(self, op: str) -> Judge:
        """The op's judge; opened when first asked for, unless the loop is about one op."""
        with self._lock:
            if op not in self._by_op:
                if self._only is not None:
                    raise InputError(f"this loop is about {self._only.op}; {op} is not its subject")
                self._by_op[op] = Judge.of(self.settings, op)
            return self._by_op[op]

    def known(self) -> tuple[Judge, ...]:
        """Judges that were opened."""
        return tuple(self._by_op.values())


def make_server(judges: Judges) -> "FastMCP[Any]":
    """The server with its tools and resources."""
    server: FastMCP[Any] = FastMCP("fasttrack", instructions=INSTRUCTIONS, log_level="CRITICAL")
    one_at_a_time = anyio.Lock()

    async def heavy(
        context: "Context[Any, Any, Any]", work: Callable[[Progress, threading.Event], Any]
    ) -> Any:
        stop, token = threading.Event(), anyio.lowlevel.current_token()

        def tell(done: int, total: int, text: str) -> None:
            if not stop.is_set():
                report = partial(context.report_progress, float(done), float(total), text)
                anyio.from_thread.run(report, token=token)

        async with one_at_a_time:
            try:
                return await anyio.to_thread.run_sync(partial(work, tell, stop), abandon_on_cancel=True)
            except FasttrackError as error:
                raise ToolError(str(error)) from error
            finally:
                stop.set()

    _add_reading(server, judges)
    _add_trying(server, judges, heavy)
    _add_submitting(server, judges, heavy)
    _add_resources(server, judges)
    return server


def _add_reading(server: "FastMCP[Any]", judges: Judges) -> None:
    @server.tool()
    def list_claims() -> dict[str, Any]:
        """What changes of this pack claim: envelope, features, state, files and promised speed."""
        pack = judges.settings.pack
        files = [pack.claim_file(), *sorted((pack.root / "claims").glob("*.yaml"))]
        return {"claims": [{"file": f.name, "claim": load_claim(f).model_dump(mode="json")} for f in files]}

    @server.tool()
    def read_contract(op: str) -> dict[str, Any]:
        """An op's contract and dossier, and the files of the workspace that may be edited (laid out now)."""
        judge = _judge(judges, op)
        contract = next(o for o in judge.settings.pack.ops() if o.name == op)
        rest = [f for f in contract.files if f not in judge.start]
        texts = {f: (judge.settings.repo / f).read_text(encoding="utf-8") for f in rest if f.endswith(".py")}
        return {
            "contract": contract.model_dump(mode="json"), "implementation": judge.implementation,
            "workspace": str(judge.settings.workspace), "editable": list(judge.start), "dossier": texts,
            "cells": [c.cell.label() for c in judge.checks if c.cell is not None],
            "timed_cell": judge.timed_check.id, "attempts_left": _left(judge),
        }  # fmt: skip


def _add_trying(server: "FastMCP[Any]", judges: Judges, heavy: Any) -> None:
    @server.tool()
    async def list_ops(context: Context[Any, Any, Any]) -> dict[str, Any]:
        """Ops with their parameters, regimes, implementations and compiled variants."""
        return dict(await heavy(context, partial(_over_installed, judges, ("kernels", "list"))))

    @server.tool()
    async def test_op(
        context: Context[Any, Any, Any], op: str, cells: list[str] | None = None
    ) -> dict[str, Any]:
        """Try the workspace's version against the oracle in public cells.

        `cells`: texts, one of which a cell's label must hold; none: all cells.
        """
        more = ("--policy", judges.settings.policy, *_cells(cells))
        return dict(
            await heavy(context, partial(_over_candidate, judges, op, ("kernels", "test", op, *more)))
        )

    @server.tool()
    async def benchmark_op(
        context: Context[Any, Any, Any], op: str, cells: list[str] | None = None, blocks: int = 8
    ) -> dict[str, Any]:
        """Time the workspace's version against stock, with the rate that it reaches and the ceiling."""
        more = ("--policy", judges.settings.policy, "--blocks", str(blocks), *_cells(cells))
        return dict(await heavy(context, partial(_benchmarked, judges, op, ("kernels", "bench", op, *more))))

    @server.tool()
    async def audit_op(context: Context[Any, Any, Any], op: str) -> dict[str, Any]:
        """Compile the op's kernels for every claimed architecture, with no GPU, and audit them."""
        return dict(await heavy(context, partial(_staged, judges, op, "audit", "smoke", (op,))))

    @server.tool()
    async def run_evidence(
        context: Context[Any, Any, Any],
        op: str,
        stage: str,
        tier: str = "auto",
        only: list[str] | None = None,
    ) -> dict[str, Any]:
        """Run `coverage`, `evals` or another stage over the workspace's version, at a tier."""
        return dict(await heavy(context, partial(_staged, judges, op, stage, tier, tuple(only or ()))))


def _add_submitting(server: "FastMCP[Any]", judges: Judges, heavy: Any) -> None:
    @server.tool()
    async def submit_attempt(
        context: Context[Any, Any, Any], op: str, question: str, predicted: str, next: str = ""
    ) -> dict[str, Any]:
        """One counted attempt: public and held-out tests, a race against the best so far, the verdict.

        `question`: what you want to know; `predicted`: the effect you expect; `next`: what you will do then.
        """
        judge = _judge(judges, op)
        said = Said(question, predicted, next)
        result = await heavy(context, lambda tell, stop: judge.submit(said, tell, stop))
        return dict(result.model_dump(mode="json"))

    @server.tool()
    def read_verdict(op: str) -> dict[str, Any]:
        """The gate's last verdict on this op, with all its grounds, as `fasttrack gate --json` gives it."""
        asked = _judge(judges, op).verdict
        if asked is None or asked.verdict is None:
            raise ToolError(f"no verdict on {op} yet: {asked.words if asked else 'no attempt got that far'}")
        return dict(asked.verdict.model_dump(mode="json"))

    @server.tool()
    def read_journal(op: str) -> dict[str, Any]:
        """Every attempt so far, with what came of it."""
        return {"entries": [e.model_dump(mode="json") for e in _judge(judges, op).entries()]}


def _add_resources(server: "FastMCP[Any]", judges: Judges) -> None:
    pack = judges.settings.pack

    @server.resource("fasttrack://claim", mime_type="application/json")
    def claim() -> str:
        """The claim that the kernels are judged by."""
        return load_claim(pack.claim_file()).canonical().decode()

    @server.resource("fasttrack://policy", mime_type="application/json")
    def policy() -> str:
        """The policy of this judge: proofs, thresholds, zones it allows."""
        return load_policy_set(judges.settings.policy)[0].canonical().decode()

    @server.resource("fasttrack://facts", mime_type="text/markdown")
    def facts() -> str:
        """What is known of these kernels: measured figures, targets missed and why."""
        pages = sorted(pack.root.glob("*.md"))
        return "\n\n".join(page.read_text(encoding="utf-8") for page in pages)

    @server.resource("fasttrack://machine", mime_type="application/json")
    def machine() -> str:
        """This machine, as evidence records it."""
        from harness.measure.machine import read_machine

        return read_machine().canonical().decode()


def _over_installed(judges: Judges, arguments: tuple[str, ...], tell: Progress, stop: threading.Event) -> Any:
    pack = judges.settings.pack
    scratch = _scratch(judges, "tools")
    asked = (*arguments, "--pack", pack.name)
    return run_command(
        asked, pack.root.parent, scratch, limit_s=TOOL_S, on_progress=tell, cancelled=stop
    ).document


def _over_candidate(
    judges: Judges, op: str, arguments: tuple[str, ...], tell: Progress, stop: threading.Event
) -> Any:
    judge = judges.of(op)
    tree = judge.candidate_tree(judge.change(), "tools")
    asked = (*arguments, "--pack", judge.settings.pack.name)
    return run_command(
        asked, tree, _scratch(judges, "tools"), limit_s=TOOL_S, has_gpu=judge.has_gpu, on_progress=tell,
        cancelled=stop,
    ).document  # fmt: skip


def _benchmarked(
    judges: Judges, op: str, arguments: tuple[str, ...], tell: Progress, stop: threading.Event
) -> dict[str, Any]:
    """The timings of `kernels bench --json`, and the rate that they stand beside."""
    from harness.measure.configured import read_ceiling_gb_per_s

    found = dict(_over_candidate(judges, op, arguments, tell, stop))
    arch = judges.of(op).request.machine.arch
    return found | {"ceiling_gb_per_s": read_ceiling_gb_per_s(arch)}


def _staged(
    judges: Judges,
    op: str,
    stage: str,
    tier: str,
    only: tuple[str, ...],
    tell: Progress,
    stop: threading.Event,
) -> Any:
    judge = judges.of(op)
    return judge.desk.run_stage(judge.change().files, stage, tier, only, tell, stop).document


def _judge(judges: Judges, op: str) -> Judge:
    try:
        return judges.of(op)
    except FasttrackError as error:
        raise ToolError(str(error)) from error


def _left(judge: Judge) -> int | None:
    budget = judge.settings.attempts
    return None if budget is None else budget - judge.attempts


def _cells(cells: list[str] | None) -> tuple[str, ...]:
    return tuple(word for cell in cells or () for word in ("--cell", cell))


def _scratch(judges: Judges, name: str) -> Path:
    place = judges.settings.folder / name / "scratch"
    place.mkdir(parents=True, exist_ok=True)
    return place


def http_server(server: "FastMCP[Any]", token: str, port: int = 0) -> tuple[Any, socket.socket, str]:
    """(a uvicorn server, its listening socket, the address): loopback only, and only with the token."""
    import uvicorn

    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", port))
    address = f"http://127.0.0.1:{listening.getsockname()[1]}/mcp"
    app = _with_token(server.streamable_http_app(), token)
    config = uvicorn.Config(app, log_level="critical", log_config=None)
    return uvicorn.Server(config), listening, address


def _with_token(app: Any, token: str) -> App:
    """The application, behind a bearer token; anything else learns nothing."""
    wanted = f"Bearer {token}".encode()

    async def guarded(scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, wanted):
                await send({"type": "http.response.start", "status": 401, "headers": []})
                await send({"type": "http.response.body", "body": b"a token is needed"})
                return
        await app(scope, receive, send)

    return guarded
