"""Submits what it was given, unchanged, again and again, whatever it is told."""

import asyncio
from typing import Any

from client import OP, in_session


async def work(session: Any) -> None:
    while True:
        await session.call_tool("submit_attempt", {"op": OP, "question": "again?", "predicted": "a pass"})
        await asyncio.sleep(0.01)


in_session(work)
