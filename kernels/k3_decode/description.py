"""What the pack says of its ops and kernels, kept as data: planning needs neither torch nor a compiler.

`python -m k3_decode.pack --write` makes `description.json` from the ops' dossiers and the kernels' variants.
Invariant: it counts only while its digest is that of the sources that it was made from; after any edit the
dossiers themselves are read, until it is written again. It holds no results, only names, roles and sizes.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["FILE", "load_description", "render_description", "source_digest"]

ROOT = Path(__file__).resolve().parent
FILE = ROOT / "description.json"
SHARED = ("op", "source", "architectures", "parameters", "limits_file")
"""Fields of a variant that are the same for many; they are kept once a group."""
SOURCES = (
    "ops/*.py", "cute/*.py", "cute/expected.json", "shapes.py", "compile.py", "tuned/*.py", "tuned/sm_*.json",
)  # fmt: skip
"""What descriptions are made from; how `pack.py` writes them down is held by a test."""
NAMED = ("cpu/*.py",)
"""Files that say by being there which ops have an implementation, whatever is in them."""


def source_digest(root: Path = ROOT) -> str:
    """sha256 over the paths and contents of the sources, and over the paths of what is only named."""
    total = hashlib.sha256()
    for path in _files(root, SOURCES):
        total.update(path.relative_to(root).as_posix().encode() + b"\0")
        total.update(hashlib.sha256(path.read_bytes()).digest())
    for path in _files(root, NAMED):
        total.update(path.relative_to(root).as_posix().encode() + b"\0")
    return total.hexdigest()


def load_description(file: Path = FILE) -> Mapping[str, Any] | None:
    """`ops` and `variants` as lists of plain records; None where the file is missing or of other sources."""
    if not file.is_file():
        return None
    content = json.loads(file.read_text(encoding="utf-8"))
    if content["sources"] != source_digest(file.parent):
        return None
    variants = [group["shared"] | kernel for group in content["kernels"] for kernel in group["variants"]]
    return {"ops": content["ops"], "variants": variants}


def render_description(ops: Iterable[dict[str, Any]], variants: Iterable[dict[str, Any]]) -> str:
    """The file's text, bound to the sources as they are now."""
    groups = [
        f'{{"shared": {json.dumps(group["shared"])}, "variants": [\n{_lines(group["variants"])}\n]}}'
        for group in _grouped(variants)
    ]
    kernels = ",\n".join(groups)
    return f'{{"sources": "{source_digest()}", "ops": [\n{_lines(ops)}\n], "kernels": [\n{kernels}\n]}}\n'


def _files(root: Path, patterns: Iterable[str]) -> list[Path]:
    return sorted(path for pattern in patterns for path in root.glob(pattern))


def _grouped(variants: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbours with equal shared fields as one group; order is kept."""
    groups: list[dict[str, Any]] = []
    for variant in variants:
        shared = {name: variant.pop(name) for name in SHARED}
        if not groups or groups[-1]["shared"] != shared:
            groups.append({"shared": shared, "variants": []})
        groups[-1]["variants"].append(variant)
    return groups


def _lines(records: Iterable[dict[str, Any]]) -> str:
    """A line for each record, so that a change shows as what it is."""
    return ",\n".join(json.dumps(record) for record in records)
