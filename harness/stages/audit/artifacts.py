"""Compiled kernels on disk: compile what is missing in child processes, keep what was compiled, by content.

An entry's key covers the variant's source and every module of the pack that it imports, the compiler's and
disassembler's versions and the architecture. Invariant: an entry appears whole or not at all; entries whose
compilation failed are not kept, so that the next run tries them again. At most two children run at once: each
holds a compiler of about 1 GiB.
"""

import ast
import fcntl
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from harness.domain.pack import KernelVariant, Pack
from harness.domain.record import canonical_bytes, sha256_hex
from harness.domain.stage import StageContext

__all__ = ["INSTALL", "Compiled", "compile_missing", "compiler_missing", "find_compiled", "one_at_a_time"]

INSTALL = "pip install 'fasttrack[gpu]'"
"""Command that brings the compiler and the disassembler."""
DISTRIBUTIONS = (
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-cu13",
    "nvidia-cuda-nvdisasm",
    "apache-tvm-ffi",
)
SUFFIXES = (".ptx", ".cubin", ".sass", ".json")
MAX_CHILDREN = 2
SMALL_JOB, LARGE_JOB = 6, 32
"""Variants a child compiles: importing the compiler takes about as long as compiling one."""
JOB_TIMEOUT_S = 1800.0
POLL_S = 0.2
COUNT_S = 2.0
"""Between two counts of what is compiled: looking through the folders took a twentieth of a core at each
poll.
"""
_TRIED: set[Path] = set()
"""Entries whose compile this process has begun. Of many kernels that do not compile, the check of each would
try all of them again.
"""


@dataclass(frozen=True, slots=True)
class Compiled:
    """One variant for one architecture: its files, or why there are none."""

    folder: Path | None
    name: str
    error: str | None = None

    def text(self, suffix: str) -> str | None:
        """A text file by suffix, None where the compile left none."""
        path = None if self.folder is None else self.folder / f"{self.name}{suffix}"
        return path.read_text() if path is not None and path.exists() else None

    def cubin(self) -> bytes:
        """The cubin's bytes."""
        if self.folder is None:
            raise AssertionError(f"{self.name} did not compile: {self.error}")
        return (self.folder / f"{self.name}.cubin").read_bytes()

    def record(self) -> dict[str, object]:
        """What the compiling process said of it."""
        text = self.text(".json")
        return {} if text is None else dict(json.loads(text))


class _Job(NamedTuple):
    architectures: tuple[str, ...]
    names: tuple[str, ...]
    folder: Path

    def pairs(self) -> list[tuple[str, str]]:
        """(name, architecture) of everything it compiles."""
        return [(name, architecture) for architecture in self.architectures for name in self.names]


def compiler_missing() -> str | None:
    """Why kernels cannot be compiled and read here, with the command that mends it; None when they can."""
    if importlib.util.find_spec("cutlass") is None:
        return f"the kernel compiler (nvidia-cutlass-dsl) is not installed; install it with: {INSTALL}"
    try:
        metadata.distribution("nvidia-cuda-nvdisasm")
    except metadata.PackageNotFoundError:
        return f"the disassembler (nvidia-cuda-nvdisasm) is not installed; install it with: {INSTALL}"
    return None


def find_compiled(context: StageContext, variant: KernelVariant, architecture: str) -> Compiled | None:
    """The variant's files where an earlier compile of the same content left them."""
    folder = _entry(context, variant, architecture)
    return Compiled(folder, variant.name) if folder.is_dir() else None


def compile_missing(
    context: StageContext, own: tuple[KernelVariant, str], others: Sequence[tuple[KernelVariant, str]] = ()
) -> dict[tuple[str, str], str]:
    """Compile a (variant, architecture), and others of which no compile was tried yet, where they have no
    entry; gives the errors of those that failed.
    """
    with one_at_a_time(context.cache / "audit"):
        for left in (context.cache / "audit").glob("building-*"):
            shutil.rmtree(left, ignore_errors=True)  # of a run that was killed: we hold the lock
        entries = {(v.name, a): _entry(context, v, a) for v, a in (own, *others)}
        first = entries[own[0].name, own[1]]
        missing = {key: e for key, e in entries.items() if not e.is_dir() and (e == first or e not in _TRIED)}
        if not missing:
            return {}
        _TRIED.update(missing.values())
        errors: dict[tuple[str, str], str] = {}
        with tempfile.TemporaryDirectory(dir=context.cache / "audit", prefix="building-") as place:
            for job, end in _run(context, _jobs(list(missing), Path(place))):
                for name, architecture in job.pairs():
                    error = _collect(job.folder / architecture, name, missing[name, architecture], end)
                    if error is not None:
                        errors[name, architecture] = error
        return errors


def _entry(context: StageContext, variant: KernelVariant, architecture: str) -> Path:
    key = {
        "format": 1,
        "variant": variant.name,
        "architecture": architecture,
        "sources": _source_digests(context.pack, variant),
        "compiler": {n: _version(n) for n in DISTRIBUTIONS},
        "python": sys.version_info[:2],
    }
    return context.cache / "audit" / architecture / f"{variant.name}-{sha256_hex(canonical_bytes(key))[:24]}"


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _source_digests(pack: Pack, variant: KernelVariant) -> dict[str, str]:
    """sha256 by path of the variant's module and of every module of the pack that it needs."""
    package = pack.root.name
    found: dict[str, str] = {}
    todo = [pack.root / variant.source.removeprefix(pack.repository_prefix), pack.root / "compile.py"]
    while todo:
        path = todo.pop()
        name = path.relative_to(pack.root).as_posix()
        if name in found or not path.is_file():
            continue
        status = path.stat()
        package_of = ".".join((package, *path.relative_to(pack.root).parent.parts))
        digest, imports = _source(path, package_of, status.st_mtime_ns, status.st_size)
        found[name] = digest
        for module in imports:
            if module.split(".")[0] == package:
                place = pack.root.joinpath(*module.split(".")[1:])
                todo += [place.with_suffix(".py"), place / "__init__.py"] if place != pack.root else []
    return found


@lru_cache(maxsize=4096)
def _source(path: Path, package: str, modified_ns: int, size: int) -> tuple[str, tuple[str, ...]]:
    """(sha256, imported modules) of a source file of a package; time and size are there to notice an edit."""
    content = path.read_bytes()
    return sha256_hex(content), tuple(_imports(content, package))


def _imports(content: bytes, package: str) -> Iterator[str]:
    """Absolute module names a source file of a package imports, names imported from packages included."""
    try:
        tree = ast.parse(content)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: max(0, package.count(".") + 2 - node.level)] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _jobs(missing: Sequence[tuple[str, str]], place: Path) -> list[_Job]:
    """(name, architecture) in jobs: names that lack the same architectures together, as a compiler may make
    one trace serve them all. Jobs get smaller towards the end, so that all children end at about the same
    time, and take names from everywhere, so that they are alike: neighbours by name are alike in size.
    """
    lacking: dict[str, tuple[str, ...]] = {}
    for name, architecture in missing:
        lacking[name] = (*lacking.get(name, ()), architecture)
    left = len(lacking)
    jobs: list[_Job] = []
    for architectures in dict.fromkeys(lacking.values()):
        names = [name for name, own in lacking.items() if own == architectures]
        while names:
            size = min(LARGE_JOB, max(SMALL_JOB, left // (2 * MAX_CHILDREN)))
            stride = max(1, len(names) // size)
            taken = names[::stride][:size]
            names = [name for name in names if name not in taken]
            left -= len(taken)
            jobs.append(_Job(architectures, tuple(taken), place / str(len(jobs))))
    return jobs


def _run(context: StageContext, jobs: list[_Job]) -> Iterator[tuple[_Job, str]]:
    """Run every job, two at a time; gives each as it ends, with how it ended: what is done is kept."""
    todo = list(jobs)
    running: list[tuple[_Job, subprocess.Popen[bytes], float]] = []
    total, finished, said, counted = sum(len(job.pairs()) for job in jobs), 0, -1, 0.0
    with (context.logs / "audit-compile.log").open("ab") as log:
        try:
            while todo or running:
                while todo and len(running) < MAX_CHILDREN:
                    job = todo.pop(0)
                    job.folder.mkdir(parents=True)
                    command = context.pack.compile_command(job.architectures, job.names, job.folder)
                    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
                    running.append((job, child, time.monotonic() + JOB_TIMEOUT_S))
                if time.monotonic() >= counted + COUNT_S:
                    counted = time.monotonic()
                    done = finished + sum(_begun(job) for job, _, _ in running)
                    if done != said:
                        context.progress(f"compiling kernels: {done} of {total}")
                        said = done
                time.sleep(POLL_S)
                for entry in list(running):
                    end = _ended(entry[1], entry[2])
                    if end is not None:
                        running.remove(entry)
                        finished += len(entry[0].pairs())
                        yield entry[0], end
        finally:
            for _, child, _ in running:
                child.kill()
                child.wait()


def _begun(job: _Job) -> int:
    """How much of a job is compiled: code, or a record where there is none."""
    return len({(p.parent, p.stem) for kind in ("cubin", "json") for p in job.folder.glob(f"*/*.{kind}")})


def _ended(child: subprocess.Popen[bytes], limit: float) -> str | None:
    """How a child ended, in words; None while it runs. One past its limit is stopped."""
    if child.poll() is not None:
        return f"ended with code {child.returncode}"
    if time.monotonic() <= limit:
        return None
    child.kill()
    child.wait()
    return f"was stopped after {JOB_TIMEOUT_S:.0f} s"


def _collect(folder: Path, name: str, entry: Path, end: str) -> str | None:
    """Move one variant's files to its entry; gives the error where it has none."""
    record = folder / f"{name}.json"
    if not record.exists():
        return f"the compiling process {end} before {name} was done; see audit-compile.log"
    error = json.loads(record.read_text()).get("error")
    if error is not None:
        return str(error)
    partial = entry.with_name(entry.name + ".part")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for suffix in SUFFIXES:
        path = folder / f"{name}{suffix}"
        if path.exists():
            shutil.move(path, partial / path.name)
    partial.rename(entry)
    return None


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """One process at a time in a folder, which is made where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
