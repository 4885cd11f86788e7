"""Find kernel packs and say exactly which code they are.

Packs register a factory under the entry-point group `fasttrack.packs`; this module holds the only import made
from a string. A digest covers every source and data file of a folder as it lies on disk, so that edited code
is other code.
"""

import hashlib
import sys
import tomllib
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import cast

from harness.domain.errors import InputError
from harness.domain.pack import Pack

__all__ = [
    "entry_points_of",
    "files_digest",
    "harness_digest",
    "installed_packs",
    "load_pack",
    "loaded_digest",
    "pack_digest",
    "pack_package",
    "source_digest",
]

GROUP = "fasttrack.packs"
IGNORED_PARTS = {"__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache"}


def installed_packs() -> tuple[str, ...]:
    """Names of the packs that are installed here, sorted."""
    return tuple(sorted({entry.name for entry in entry_points_of(GROUP)}))


def load_pack(name: str) -> Pack:
    """The pack registered under `name`; raises `InputError` when there is none or it does not load."""
    entries = [entry for entry in entry_points_of(GROUP) if entry.name == name]
    if not entries:
        known = ", ".join(installed_packs()) or "none"
        raise InputError(
            f"no kernel pack is called {name!r} (installed: {known}); install the package that registers it "
            "under "
            f"the entry-point group {GROUP!r}, or choose another with --pack"
        )
    try:
        factory = entries[0].load()
    except ImportError as error:
        raise InputError(
            f"pack {name!r} does not load from {entries[0].value}: {error}; reinstall the package that "
            "brings it"
        ) from error
    return cast("Pack", factory())


def pack_package(name: str) -> str:
    """Import name of the package that a pack comes from, found without importing it."""
    entry = next((entry for entry in entry_points_of(GROUP) if entry.name == name), None)
    return "" if entry is None else entry.value.partition(":")[0].partition(".")[0]


def entry_points_of(group: str) -> tuple[metadata.EntryPoint, ...]:
    """Installed entry points of a group; on a bare machine that only has a checkout on its path, those it
    declares.
    """
    found = tuple(metadata.entry_points(group=group))
    declared = Path(__file__).resolve().parents[2] / "pyproject.toml"
    if found or not declared.is_file():
        return found
    table = tomllib.loads(declared.read_text(encoding="utf-8"))["project"].get("entry-points", {})
    return tuple(metadata.EntryPoint(name, value, group) for name, value in table.get(group, {}).items())


def source_digest(folder: Path) -> str:
    """sha256 over relative paths and contents of every file below `folder`, in path order, without caches."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return files_digest({path.relative_to(folder).as_posix(): path.read_bytes for path in paths})


def files_digest(files: Mapping[str, Callable[[], bytes]]) -> str:
    """`source_digest` of files by relative path, wherever their contents come from."""
    total = hashlib.sha256()
    for name in sorted(files):
        path = PurePosixPath(name)
        if not IGNORED_PARTS.intersection(path.parts) and path.suffix != ".pyc":
            total.update(name.encode() + b"\0")
            total.update(hashlib.sha256(files[name]()).digest())
    return total.hexdigest()


def pack_digest(pack: Pack) -> str:
    """`source_digest` of a pack's folder."""
    return source_digest(pack.root)


def loaded_digest(pack: Pack) -> str:
    """Digest of the pack's sources, and of which compiled code objects its loaded modules hold: two builds
    differ in it, and so do two arms of which one was patched.
    """
    total = hashlib.sha256(pack_digest(pack).encode())
    roots = (str(pack.root), str(pack.root.resolve()))
    for name, module in sorted(sys.modules.items()):
        if str(vars(module).get("__file__", "")).startswith(roots):
            total.update(name.encode() + b"\0")
            for key, value in sorted(vars(module).items()):
                code = getattr(value, "__code__", None)
                if code is not None:
                    total.update(key.encode() + b"\0" + code.co_code)
    return total.hexdigest()


def harness_digest() -> str:
    """`source_digest` of the harness package itself."""
    return source_digest(Path(__file__).resolve().parent.parent)
