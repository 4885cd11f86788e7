"""What the scripted agents share: a session over HTTP with the server that the loop named."""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client

ADDRESS, OP = os.environ["FASTTRACK_MCP_URL"], os.environ["FASTTRACK_OP"]
HERE = Path(os.environ["FASTTRACK_WORKSPACE"])


def in_session(work: Callable[[ClientSession], Awaitable[None]]) -> None:
    """Run `work` in one session."""

    async def run() -> None:
        headers = {"Authorization": f"Bearer {os.environ['FASTTRACK_MCP_TOKEN']}"}
        async with (
            httpx.AsyncClient(headers=headers, timeout=3600) as client,
            streamable_http_client(os.environ["FASTTRACK_MCP_URL"], http_client=client) as (
                reader,
                writer,
                _,
            ),
            ClientSession(reader, writer) as session,
        ):
            await session.initialize()
            await work(session)

    asyncio.run(run())


async def call(session: ClientSession, tool: str, **arguments: Any) -> dict[str, Any]:
    """A tool's record; the agent ends where the tool refuses."""
    result = await session.call_tool(tool, arguments)
    if result.isError:
        sys.exit(str(result.content))
    return dict(result.structuredContent or {})
