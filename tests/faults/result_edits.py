"""Ways in which somebody changes a finished bundle and makes its digests fit again."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from harness.domain.bundle import ChangeReference, Manifest
from harness.domain.faults import Sighting
from harness.domain.machine import Machine
from harness.domain.plan import Plan
from harness.evidence.diff import diff_bundles
from harness.evidence.names import MANIFEST, PLAN
from harness.evidence.reader import open_bundle
from harness.evidence.strict_json import parse_record
from harness.faults.bench import Bench
from tests.evidence.tampering import rehash

__all__ = ["differing", "edit_plan", "rewrite_table"]


def differing(bench: Bench, edit: Callable[[Machine], Machine]) -> Iterator[Sighting]:
    """Conditions in which two bundles differ, the second made on the machine that `edit` gives."""
    first, second = bench.bundle(), bench.bundle()
    try:
        manifest = parse_record((second / MANIFEST).read_bytes(), Manifest)
        edited = manifest.model_copy(update={"machine": edit(manifest.machine)})
        (second / MANIFEST).write_bytes(edited.canonical())
        edit_plan(second, lambda plan: plan.model_copy(update={"machine": edit(plan.machine)}))
        found = diff_bundles(open_bundle(first), open_bundle(second)).conditions
        words = "; ".join(f"{d.about}: {d.first} | {d.second}" for d in found)
        yield Sighting(
            column="bundle",
            subject="diff",
            status="REFUSED" if found else "PASS",
            words=words or "no condition",
        )
    finally:
        for folder in (first, second):
            shutil.rmtree(folder.parent)


def edit_plan(folder: Path, edit: Callable[[Plan], Plan], *, binds: bool = True) -> None:
    """Another plan under the same outcomes; with `binds`, the manifest is made to name it."""
    plan = edit(parse_record((folder / PLAN).read_bytes(), Plan))
    (folder / PLAN).write_bytes(plan.canonical())
    if binds:
        manifest = parse_record((folder / MANIFEST).read_bytes(), Manifest)
        bound = {"plan_digest": plan.digest(), "change": ChangeReference.of(plan.change)}
        (folder / MANIFEST).write_bytes(manifest.model_copy(update=bound).canonical())
    rehash(folder)


def rewrite_table(folder: Path, check: str, table: str, edit: Callable[[Any], Any]) -> None:
    """A sample table of the first check whose folder begins with `check`, rewritten as `edit` gives it."""
    path = next((folder / "samples").glob(f"{check}*/{table}.parquet"))
    before = pq.read_table(path)
    after = pa.Table.from_pandas(edit(before), schema=before.schema, preserve_index=False)
    pq.write_table(after.replace_schema_metadata(before.schema.metadata), path)
    rehash(folder)
