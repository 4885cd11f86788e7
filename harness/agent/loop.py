"""Run a command-line agent against the server, with budgets, and leave the best attempt that was proved.

The agent is any command. It finds the server in FASTTRACK_MCP_URL and FASTTRACK_MCP_TOKEN (and in `mcp.json`
of its workspace, in the form that agents read), and its files in FASTTRACK_WORKSPACE. It runs confined: the
network is open, as it talks to its model, but it can write to its workspace only. The loop ends on a verdict
that reaches the target, on a budget, on a plateau, or with the agent; whatever it did, the record says how it
ended and the best proved files stand.
"""

import asyncio
import json
import os
import secrets
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from harness.agent.judge import Judge
from harness.agent.server import Judges, http_server, make_server
from harness.domain.errors import DeviceMissing
from harness.domain.journal import LoopEnding, LoopResult
from harness.engines.packs import harness_digest, pack_digest
from harness.evidence.journal import append_entry, load_journal
from harness.executors.confinement import Limits, confined
from harness.executors.sandbox import end_boxed

__all__ = ["Budgets", "optimize"]

FLOOD_BYTES = 32 * 2**20
"""Of an agent's own output; more ends it."""
KEPT_BYTES = 2**20
"""Of that, what its log keeps."""
GRACE_S = 3.0
"""For an agent to take its last answer and end by itself."""
POLL_S = 0.1
START_S = 20.0


@dataclass(frozen=True, slots=True)
class Budgets:
    """What ends a loop."""

    time_s: float = 3600.0
    gpu_s: float | None = None
    """Seconds of judging on a GPU."""
    plateau: int = 8
    """Attempts in a row of which none was accepted."""
    target: float | None = None
    """Times as fast as at the beginning that are enough; None: go on while there is budget."""
    memory_bytes: int = 16 * 2**30
    """Of the agent's process."""


class _End(NamedTuple):
    why: LoopEnding
    words: str


def optimize(
    judge: Judge,
    command: str,
    budgets: Budgets,
    out: Path,
    variables: dict[str, str],
    say: Callable[[str], None],
) -> LoopResult:
    """Run the agent to its end; leaves `best/`, `best.patch`, `agent.log` and `result.json` in `out`.

    `variables` are those of the environment that the agent gets beside the allowed ones.
    """
    begun = time.monotonic()
    before = (harness_digest(), pack_digest(judge.settings.pack))
    with _serving(judge) as (address, token):
        end = _run_agent(judge, command, budgets, out, variables | _places(judge, address, token), say)
        while judge.is_busy:  # an attempt in hand is finished: it was counted
            time.sleep(POLL_S)
    if (harness_digest(), pack_digest(judge.settings.pack)) != before:
        words = "harness or pack were changed while the loop ran: nothing that it found can be believed"
        append_entry(judge.journal, kind="fault", op=judge.op, words=words)
        judge.best, judge.best_files, judge.over_start = None, judge.start, 1.0
        end = _End("tampered", words)
    append_entry(judge.journal, kind="ended", op=judge.op, words=f"{end.why}: {end.words}"[:4000])
    judge.write_best(out / "best")
    spent = time.monotonic() - begun
    result = LoopResult(
        op=judge.op, ended=end.why, words=end.words[:4000], attempts=judge.attempts, accepted=judge.accepted,
        best=judge.best, over_start=judge.over_start, spent_s=round(spent, 1),
        gpu_s=round(judge.busy_s, 1) if judge.has_gpu else 0.0,
        journal_digest=load_journal(judge.journal)[-1].digest(),
    )  # fmt: skip
    (out / "result.json").write_bytes(result.canonical() + b"\n")
    return result


def _run_agent(
    judge: Judge,
    command: str,
    budgets: Budgets,
    out: Path,
    variables: dict[str, str],
    say: Callable[[str], None],
) -> _End:
    """Start it, watch it and the judge, and end it with everything that it started."""
    limits = Limits(memory_bytes=budgets.memory_bytes)
    workspace = judge.settings.workspace
    box = confined(shlex.split(command), workspace, limits, variables, has_network=True)
    say(f"agent: {box.words}")
    child = subprocess.Popen(
        box.argv, env=box.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True, cwd=workspace,
    )  # fmt: skip
    log = _Log(child, out / "agent.log")
    begun = time.monotonic()
    try:
        while True:
            end = _why(judge, budgets, child, log, time.monotonic() - begun)
            if end is not None:
                if end.why in ("verdict", "attempts"):
                    _let_end(child)
                return end
            time.sleep(POLL_S)
    finally:
        end_boxed(child)
        log.join()


def _why(
    judge: Judge, budgets: Budgets, child: "subprocess.Popen[bytes]", log: "_Log", spent_s: float
) -> _End | None:
    """Why the loop ends now; None while it goes on."""
    if log.seen > FLOOD_BYTES:
        return _End("agent_failed", f"it wrote more than {FLOOD_BYTES // 2**20} MiB of output")
    if spent_s > budgets.time_s:
        return _End("time", f"{budgets.time_s:.0f} s are spent")
    if not judge.is_busy:
        if budgets.target is not None and judge.best is not None and judge.over_start >= budgets.target:
            return _End(
                "verdict",
                f"attempt {judge.best} is {judge.over_start:.2f} times as fast, with a passing verdict",
            )
        budget = judge.settings.attempts
        if budget is not None and judge.attempts >= budget:
            return _End("attempts", f"all {budget} attempts are spent")
        if judge.since_accepted >= budgets.plateau:
            return _End("plateau", f"none of the last {judge.since_accepted} attempts was accepted")
        if judge.has_gpu and budgets.gpu_s is not None and judge.busy_s > budgets.gpu_s:
            return _End("gpu_time", f"{budgets.gpu_s:.0f} s of the GPU are spent")
    code = child.poll()
    if code is None:
        return None
    log.join()
    if code == 0:
        return _End("agent_ended", "the agent ended by itself")
    return _End("agent_failed", f"the agent ended with exit code {code}; its last words: {log.last_words()}")


def _let_end(child: "subprocess.Popen[bytes]") -> None:
    try:
        child.wait(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        return


class _Log:
    """Reads what the agent prints, keeps the beginning and the end of it, and counts the rest."""

    def __init__(self, child: "subprocess.Popen[bytes]", path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.seen = 0
        self._tail = b""
        self._child, self._path = child, path
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until everything was read."""
        self._thread.join(timeout=5)

    def last_words(self) -> str:
        """The last lines."""
        return " ".join(self._tail.decode("utf-8", "replace").split())[-600:]

    def _read(self) -> None:
        pipe = self._child.stdout
        if pipe is None:
            return
        with self._path.open("wb") as file, pipe:
            while block := os.read(pipe.fileno(), 65536):
                file.write(block[: max(0, KEPT_BYTES - self.seen)])
                self.seen += len(block)
                self._tail = (self._tail + block)[-2000:]
                if self.seen > FLOOD_BYTES:
                    return  # it blocks on its next write, until it is ended


@contextmanager
def _serving(judge: Judge) -> Iterator[tuple[str, str]]:
    """The server in a thread of its own, on loopback; gives its address and a token of this loop alone."""
    token = secrets.token_urlsafe(32)
    server: Any = make_server(Judges(judge.settings, judge))
    uvicorn, listening, address = http_server(server, token)
    thread = threading.Thread(target=lambda: asyncio.run(uvicorn.serve(sockets=[listening])), daemon=True)
    thread.start()
    begun = time.monotonic()
    while not uvicorn.started:
        if not thread.is_alive() or time.monotonic() - begun > START_S:
            raise DeviceMissing(f"the server did not start on {address}; is loopback closed here?")
        time.sleep(0.02)
    try:
        yield address, token
    finally:
        uvicorn.should_exit = True
        thread.join(timeout=3)
        uvicorn.force_exit = True  # a client that holds its stream open keeps nobody
        thread.join(timeout=10)
        listening.close()


def _places(judge: Judge, address: str, token: str) -> dict[str, str]:
    """Where an agent finds everything."""
    entry = {"type": "http", "url": address, "headers": {"Authorization": f"Bearer {token}"}}
    text = json.dumps({"mcpServers": {"fasttrack": entry}}, indent=1)
    workspace = judge.settings.workspace
    (workspace / "mcp.json").write_text(text, encoding="utf-8")
    return {
        "FASTTRACK_MCP_URL": address, "FASTTRACK_MCP_TOKEN": token, "FASTTRACK_OP": judge.op,
        "FASTTRACK_WORKSPACE": str(workspace),
    }  # fmt: skip
