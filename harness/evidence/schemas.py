"""JSON Schemas of everything in a bundle, generated from the records, and whether the committed ones still
fit.
"""

import json
import sys
from pathlib import Path

from pydantic import BaseModel

from harness.domain.bundle import BUNDLE_SCHEMA, Environment, Manifest, SamplesHeader, Verification
from harness.domain.check import Outcome
from harness.domain.faults import FaultScore
from harness.domain.plan import Plan
from harness.domain.replication import Replication
from harness.domain.resources import data_folder
from harness.domain.verdict import Verdict
from harness.evidence.attestation import Envelope, Statement
from harness.evidence.diff import BundleDiff

__all__ = ["check_schemas", "render_schemas", "write_schemas"]

SCHEMAS: dict[str, type[BaseModel]] = {
    "manifest": Manifest,
    "plan": Plan,
    "outcome": Outcome,
    "samples": SamplesHeader,
    "environment": Environment,
    "attestation": Envelope,
    "statement": Statement,
    "verification": Verification,
    "verdict": Verdict,
    "diff": BundleDiff,
    "replication": Replication,
    "faults": FaultScore,
}


def render_schemas() -> dict[str, str]:
    """Schema text by file name, for the schema version that this harness writes."""
    rendered = {}
    for name, kind in SCHEMAS.items():
        schema = kind.model_json_schema(by_alias=True, mode="serialization")
        schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
        schema["$id"] = f"fasttrack:bundle:v{BUNDLE_SCHEMA}:{name}"
        rendered[f"{name}.v{BUNDLE_SCHEMA}.json"] = json.dumps(schema, indent=1, sort_keys=True) + "\n"
    return rendered


def check_schemas(folder: Path) -> tuple[str, ...]:
    """Committed schemas that differ from the records, with what to do; empty where all fit."""
    found = []
    for name, text in render_schemas().items():
        path = folder / name
        committed = path.read_text(encoding="utf-8") if path.is_file() else None
        if committed != text:
            how = "is missing" if committed is None else "differs from the record"
            found.append(
                f"{name} {how}; run `fasttrack bundle schema --write`, and raise the version if readers break"
            )
    return tuple(found)


def write_schemas(folder: Path) -> tuple[Path, ...]:
    """Write every schema into `folder`."""
    paths = []
    for name, text in render_schemas().items():
        path = folder / name
        path.write_text(text, encoding="utf-8")
        paths.append(path)
    return tuple(paths)


def _main(argv: list[str]) -> int | str:
    """`python -m harness.evidence.schemas --check|--write`: for make, where no console script may exist
    yet.
    """
    folder = data_folder("bundles") / "schema"
    if argv == ["--write"]:
        write_schemas(folder)
        return 0
    if argv == ["--check"]:
        return "\n".join(check_schemas(folder)) or 0
    return "give --check or --write"


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
