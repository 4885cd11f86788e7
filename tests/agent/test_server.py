"""The server as a real client sees it, over stdio and over HTTP on loopback with a token."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client

from harness.domain.claim import Claim
from harness.domain.pack import OpContract
from harness.domain.policy import Policy
from tests.agent.loops import FILE, OP, ROOT

TOOLS = [
    "audit_op", "benchmark_op", "list_claims", "list_ops", "read_contract", "read_journal", "read_verdict",
    "run_evidence", "submit_attempt", "test_op",
]  # fmt: skip
ENTRY = "import sys; from harness.cli.main import entry; entry(sys.argv[1:])"
TOKEN = "a-token-of-the-test"
CELL = "cpu.tp1.dcp1.b1.c65.d0.bf16.decode"
Work = Callable[[ClientSession], Awaitable[None]]


def command(folder: Path, *more: str) -> list[str]:
    words = [
        "mcp",
        "--repo",
        str(ROOT),
        "--workspace",
        str(folder / "workspace"),
        "--folder",
        str(folder / "judge"),
    ]
    return ["-c", ENTRY, *words, *more]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server over HTTP."""
    import os

    folder = tmp_path_factory.mktemp("http")
    server = subprocess.Popen(
        [sys.executable, *command(folder, "--http")], stderr=subprocess.PIPE, text=True, cwd=ROOT,
        env=os.environ | {"FASTTRACK_MCP_TOKEN": TOKEN},
    )  # fmt: skip
    assert server.stderr is not None
    yield server.stderr.readline().strip()
    server.terminate()
    server.wait(timeout=20)
    server.stderr.close()


def over_stdio(folder: Path, work: Work) -> None:
    async def run() -> None:
        parameters = StdioServerParameters(command=sys.executable, args=command(folder), cwd=str(ROOT))
        async with (
            stdio_client(parameters) as (reader, writer),
            ClientSession(reader, writer) as session,
        ):
            await session.initialize()
            await work(session)

    asyncio.run(run())


def over_http(address: str, work: Work) -> None:
    async def run() -> None:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with (
            httpx.AsyncClient(headers=headers, timeout=300) as client,
            streamable_http_client(address, http_client=client) as (reader, writer, _),
            ClientSession(reader, writer) as session,
        ):
            await session.initialize()
            await work(session)

    asyncio.run(run())


def test_a_client_over_stdio_finds_every_tool_and_reads_records(tmp_path: Path) -> None:
    found: dict[str, Any] = {}

    async def work(session: ClientSession) -> None:
        found["tools"] = sorted(tool.name for tool in (await session.list_tools()).tools)
        for name in ("claim", "policy", "facts"):
            read = await session.read_resource(f"fasttrack://{name}")  # type: ignore[arg-type]  # pydantic parses it
            found[name] = read.contents[0].text  # type: ignore[union-attr]  # all are text
        contract = await session.call_tool("read_contract", {"op": OP})
        found["contract"] = contract.structuredContent
        refused = await session.call_tool("read_contract", {"op": "no_such_op"})
        found["refused"] = (refused.isError, refused.content[0].text)  # type: ignore[union-attr]  # text

    over_stdio(tmp_path, work)
    assert found["tools"] == TOOLS
    assert Claim.from_json(found["claim"]).pack == "k3_decode"
    assert Policy.from_json(found["policy"]).name == "smoke"
    assert "H200" in found["facts"]
    assert OpContract.model_validate(found["contract"]["contract"]).name == OP
    assert found["contract"]["editable"] == [FILE]
    assert (tmp_path / "workspace" / FILE).read_text() == (ROOT / FILE).read_text()
    is_error, words = found["refused"]
    assert (is_error, "no op is called 'no_such_op'" in words) == (True, True)


def test_a_tool_over_http_gives_the_command_lines_record_and_its_progress(address: str) -> None:
    found: dict[str, Any] = {"progress": []}

    async def told(done: float, total: float | None, message: str | None) -> None:
        found["progress"].append((done, total, message))

    async def work(session: ClientSession) -> None:
        result = await session.call_tool("test_op", {"op": OP, "cells": [CELL]}, progress_callback=told)
        found["record"] = result.structuredContent
        journal = await session.call_tool("read_journal", {"op": OP})
        found["journal"] = [e["kind"] for e in (journal.structuredContent or {})["entries"]]

    over_http(address, work)
    check = f"kernels/{OP}/nano/{CELL}"
    assert [(o["check"], o["status"]) for o in found["record"]["outcomes"]] == [(check, "PASS")]
    assert found["progress"] == [(1.0, 1.0, f"[1/1] {check}")]
    assert found["journal"] == ["begun"]  # a test is no attempt


def test_a_call_that_is_cancelled_ends_what_it_ran(address: str) -> None:
    found: dict[str, Any] = {}

    async def work(session: ClientSession) -> None:
        call = asyncio.create_task(session.call_tool("benchmark_op", {"op": OP, "blocks": 5000}))
        for _ in range(200):
            await asyncio.sleep(0.1)
            if running() and not call.done():
                break
        found["ran"] = running()
        call.cancel()
        # The protocol's own word: the SDK's client sends none when its task is cancelled.
        from mcp import types

        number = session._request_id - 1
        params = types.CancelledNotificationParams(requestId=number, reason="test")
        await session.send_notification(types.ClientNotification(types.CancelledNotification(
            method="notifications/cancelled", params=params)))  # fmt: skip
        for _ in range(100):
            await asyncio.sleep(0.1)
            if not running():
                break

    def running() -> bool:
        seen = subprocess.run(
            ("pgrep", "-f", "kernels bench .*--blocks 5000"), capture_output=True, check=False
        )
        return bool(seen.stdout)

    over_http(address, work)
    assert (found["ran"], running()) == (True, False)


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}], ids=["no_token", "wrong_token"])
def test_without_its_token_the_server_answers_nothing(address: str, headers: dict[str, str]) -> None:
    request = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    answer = httpx.post(address, content=json.dumps(request), headers=headers)
    assert (answer.status_code, answer.text) == (401, "a token is needed")
