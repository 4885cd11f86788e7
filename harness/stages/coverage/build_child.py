"""One build of the pack, opened and driven in a process of its own: `python -P -m ... JOB`.

The build's folder stands first on the path, so that the pack is the build's and the harness stays ours. What
is left as `seen.json`: where the pack came from, every file of it, the code that its loaded modules hold, and
every file that it left in its cache of compiled kernels.
"""

import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

from harness.domain.pack import Pack, SessionRequest
from harness.domain.record import Record, Whole, sha256_hex
from harness.executors.sandbox import limit_this_process

__all__ = ["SEEN", "BuildJob", "BuildSeen", "code_digest", "main"]

SEEN = "seen.json"
STEPS = 3
PROMPT = 24
PLAIN = (bool, int, float, str, bytes, tuple, frozenset, type(None))


class BuildJob(Record):
    """Which build to open, and what to drive."""

    pack: str
    root: str
    """Folder that must hold the pack's package."""
    folder: str
    """Where `seen.json` goes, and the cache of compiled kernels."""
    request: SessionRequest
    seed: Whole


class BuildSeen(Record):
    """What one build turned out to be."""

    is_own: bool
    """Whether the pack was loaded from the build's folder."""
    files: tuple[tuple[str, str], ...]
    """(path inside the pack, sha256) of every source and data file."""
    modules: tuple[tuple[str, str], ...]
    """(path inside the pack, digest of the code that is loaded)."""
    binaries: tuple[tuple[str, str], ...]
    """(path inside the cache, sha256) of what was compiled."""
    launches: Whole
    """Of optimised ops in the steps that were driven."""


def main(argv: list[str] | None = None) -> int:
    """Drive one build and leave what was seen."""
    (path,) = sys.argv[1:] if argv is None else argv
    job = BuildJob.from_json(Path(path).read_bytes())
    limit_this_process()
    (Path(job.folder) / SEEN).write_bytes(_seen(job).canonical())
    return 0


def _seen(job: BuildJob) -> BuildSeen:
    from harness.engines.packs import load_pack

    loaded: dict[str, str] = {}
    with _noted(Path(job.root).resolve(), loaded):
        return _driven(job, load_pack, loaded)


def _driven(job: BuildJob, load_pack: Callable[[str], Pack], loaded: dict[str, str]) -> BuildSeen:
    """What was seen while some steps ran; `loaded` fills meanwhile."""
    from harness.engines.in_process import force, open_session, random_texts

    pack = load_pack(job.pack)
    cache = Path(job.folder) / "cache"
    request = job.request.model_copy(update={"cache": str(cache) if job.request.cache else ""})
    with open_session(pack, request, None) as session:
        texts = random_texts(session.vocab_size, request.max_requests, PROMPT + STEPS, job.seed)
        force(session, [text[:PROMPT] for text in texts], [text[PROMPT:] for text in texts])
        launches = sum(session.launches().values())
    root = pack.root.resolve()
    return BuildSeen(
        is_own=root.is_relative_to(Path(job.root).resolve()), files=tuple(_files(root)),
        modules=tuple(sorted(_below(loaded, root))), binaries=tuple(_files(cache)), launches=launches,
    )  # fmt: skip


def _files(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            yield path.relative_to(folder).as_posix(), sha256_hex(path.read_bytes())


@contextmanager
def _noted(root: Path, loaded: dict[str, str]) -> Iterator[None]:
    """Inside the block, digests of modules below a folder as they are right after they were loaded: a kernel
    compiler rewrites the functions that it compiles, and not those whose binary it finds.
    """
    original = SourceFileLoader.exec_module

    def exec_module(loader: SourceFileLoader, module: ModuleType) -> None:
        original(loader, module)
        file = Path(str(vars(module).get("__file__"))).resolve()
        if file.is_relative_to(root):
            loaded[str(file)] = code_digest(module)

    SourceFileLoader.exec_module = exec_module  # type: ignore[assignment,method-assign]  # put back below
    try:
        yield
    finally:
        SourceFileLoader.exec_module = original  # type: ignore[method-assign]


def _below(loaded: dict[str, str], root: Path) -> Iterator[tuple[str, str]]:
    for file, digest in loaded.items():
        if Path(file).is_relative_to(root):
            yield Path(file).relative_to(root).as_posix(), digest


def code_digest(module: ModuleType) -> str:
    """Of the functions, methods and plain constants that a module defines, as they are loaded; line numbers,
    comments and documentation count for nothing.
    """
    total = hashlib.sha256()
    for text in _code_of(vars(module), module.__name__):
        total.update(text.encode() + b"\0")
    return total.hexdigest()


def _code_of(space: dict[str, object], module: str) -> Iterator[str]:
    for name in sorted(space):
        value = getattr(space[name], "__wrapped__", space[name])
        value = getattr(value, "__func__", value)
        if isinstance(value, FunctionType) and value.__module__ == module:
            yield f"{name}{_code_words(value.__code__, value.__doc__)}{value.__defaults__ is None}"
        elif isinstance(value, type) and value.__module__ == module:
            yield name
            yield from _code_of(dict(vars(value)), module)
        elif isinstance(value, PLAIN) and not name.startswith("__"):
            yield (
                f"{name}={value!r}"
                if not isinstance(value, frozenset)
                else f"{name}={sorted(map(repr, value))}"
            )


def _code_words(code: CodeType, doc: str | None) -> str:
    """Instructions, names and constants, of inner code objects too."""
    constants = [
        _code_words(c, None) if isinstance(c, CodeType)
        else repr(sorted(map(repr, c))) if isinstance(c, frozenset)
        else repr(c)
        for c in code.co_consts
        if doc is None or c != doc
    ]  # fmt: skip
    return f"{code.co_code.hex()}{code.co_names}{constants}"


if __name__ == "__main__":
    sys.exit(main())
