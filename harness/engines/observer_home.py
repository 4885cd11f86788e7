"""Puts the observer where a server that we start finds it: a folder that looks like an installed package.

vLLM finds plugins by their metadata, so files on `PYTHONPATH` are enough; nothing is installed into the
environment that serves, and nothing of ours beside the observer becomes importable there.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

__all__ = ["observer_environment"]

PACKAGE = "fasttrack_observer"


def observer_environment(home: Path, book: Path, given: Mapping[str, str]) -> dict[str, str]:
    """Variables that make a server load the observer and write to `book`, beside those `given` to it."""
    plugins = home / "plugins"
    source = Path(__file__).with_name("observer")
    shutil.copytree(
        source, plugins / PACKAGE, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
    )
    info = plugins / f"{PACKAGE}-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 1\n", encoding="utf-8")
    entry = f"[vllm.general_plugins]\n{PACKAGE} = {PACKAGE}.plugin:register\n"
    (info / "entry_points.txt").write_text(entry, encoding="utf-8")
    book.parent.mkdir(parents=True, exist_ok=True)
    paths = [str(plugins.resolve()), given.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))]
    found = {"FASTTRACK_OBSERVER": str(book.resolve()), "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    named = given.get("VLLM_PLUGINS", os.environ.get("VLLM_PLUGINS"))
    if named is not None:
        found["VLLM_PLUGINS"] = ",".join((*(name for name in named.split(",") if name), PACKAGE))
    return found
