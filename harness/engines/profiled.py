"""What a server's own profiler saw: the kernels of a few decode steps, asked for over its endpoints.

vLLM 0.32 and 0.33 have `/start_profile` and `/stop_profile` where a server was started with
`--profiler-config`, and write a trace into a folder of the server's machine. One short request is answered in
between. Kernels are those of the device; a server without one tells the operators of its CPU, which name no
path. A profile that does not come about is a fact in words, and never a server's failure.
"""

import gzip
import json
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from harness.domain.errors import ServiceError
from harness.engines.server_client import Client
from harness.engines.serving import Ask

__all__ = ["KERNELS", "Profile", "profile_arguments", "profile_facts", "read_trace"]

KERNELS = "profile.kernels"
"""Fact: JSON rows (kernel, launches, microseconds in all), the most launched first."""
PROMPT, STEPS = "The quick brown fox", 12
LIMIT_S = 120.0
SETTLE_S = 10.0
"""For a trace to appear after the profiler said that it stopped."""
MOST_KINDS = 80
NAME = 120
"""Characters of a kernel's name that are kept."""
Fact = tuple[str, str]


class Profile(NamedTuple):
    """Launches and microseconds by kernel, and operators of the CPU by name."""

    kernels: Mapping[str, tuple[int, float]]
    operators: int


def profile_arguments(folder: Path) -> tuple[str, ...]:
    """What makes a server of ours offer its profiler."""
    settings = {
        "profiler": "torch", "torch_profiler_dir": str(folder.resolve()), "torch_profiler_with_stack": False,
        "ignore_frontend": True,
    }  # fmt: skip
    return (f"--profiler-config={json.dumps(settings, separators=(',', ':'))}",)


def profile_facts(client: Client, folder: Path) -> list[Fact]:
    """The kernels of one short answer, or why there are none."""
    known = _traces(folder)
    try:
        client.post("/start_profile", {}, LIMIT_S)
        try:
            answer = client.answer(Ask(item="profile", text=PROMPT, max_tokens=STEPS)).reply
        finally:
            client.post("/stop_profile", {}, LIMIT_S)
    except ServiceError as error:
        return [("profile", f"none: {error}")]
    profiles = [found for path in _new_traces(folder, known) if (found := read_trace(path)) is not None]
    if not profiles:
        return [("profile", "none: the profiler left no trace that can be read")]
    kernels: dict[str, tuple[int, float]] = {}
    for found in profiles:
        for name, (count, us) in found.kernels.items():
            before = kernels.get(name, (0, 0.0))
            kernels[name] = (before[0] + count, before[1] + us)
    told = f"{len(answer.tokens)} tokens"
    if not kernels:
        operators = sum(found.operators for found in profiles)
        return [("profile", f"{told}, {operators} operators of the CPU, no device kernel")]
    launches = sum(count for count, _ in kernels.values())
    ranked = sorted(kernels.items(), key=lambda pair: (-pair[1][0], pair[0]))[:MOST_KINDS]
    rows = [[name, count, round(us, 1)] for name, (count, us) in ranked]
    return [
        ("profile", f"{told}, {launches} launches of {len(kernels)} kernels"),
        (KERNELS, json.dumps(rows, separators=(",", ":"))),
    ]


def read_trace(path: Path) -> Profile | None:
    """A Chrome trace of torch's profiler; None for a file that is none, or not whole yet."""
    try:
        data = path.read_bytes()
        told = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
        events = told["traceEvents"]
        kernels: dict[str, tuple[int, float]] = {}
        operators = 0
        for event in events:
            kind = event.get("cat")
            operators += kind == "cpu_op"
            if kind == "kernel":
                count, us = kernels.get(name := str(event["name"])[:NAME], (0, 0.0))
                kernels[name] = (count + 1, us + float(event["dur"]))
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, RecursionError, zlib.error):
        return None
    return Profile(kernels, operators)


def _traces(folder: Path) -> dict[Path, int]:
    """Trace files and their sizes."""
    found: dict[Path, Any] = {path: path.stat().st_size for path in folder.rglob("*.json*") if path.is_file()}
    return found


def _new_traces(folder: Path, known: Mapping[Path, int]) -> tuple[Path, ...]:
    """Traces that came since, once they no longer grow."""
    limit, before = time.monotonic() + SETTLE_S, dict[Path, int]()
    while time.monotonic() < limit:
        now = {path: size for path, size in _traces(folder).items() if path not in known}
        if now and now == before:
            return tuple(sorted(now))
        before = now
        time.sleep(0.3)
    return tuple(sorted(before))
