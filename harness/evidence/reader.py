"""Read access to one bundle or unfinished run, lazily: a bundle of gigabytes costs the memory of its plan.

Reading is strict but checks no digests; `verify` does. Nothing here follows a path that the bundle names.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.domain.bundle import Environment, Manifest
from harness.domain.check import Check, Outcome, Samples
from harness.domain.errors import EvidenceError, InputError
from harness.domain.plan import Plan
from harness.domain.record import sha256_hex
from harness.evidence.names import ENVIRONMENT, MANIFEST, OUTCOMES, PLAN, SAMPLES_HEADER, samples_folder
from harness.evidence.run_folder import MAX_OUTCOME_BYTES, MAX_PLAN_BYTES
from harness.evidence.samples import read_samples
from harness.evidence.strict_json import load_record, open_regular, parse_record, read_bounded

__all__ = ["MAX_MANIFEST_BYTES", "Bundle", "iterate_outcomes", "open_bundle"]

MAX_MANIFEST_BYTES = 64 * 2**20
MAX_ENVIRONMENT_BYTES = 2**20
MAX_OUTCOMES_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class Bundle:
    """What a bundle says. `manifest` is None for a run that has not finished."""

    folder: Path
    manifest: Manifest | None
    digest: str | None
    """sha256 of the manifest's bytes: the bundle's name."""
    plan: Plan
    environment: Environment | None
    outcomes: tuple[Outcome, ...]
    """In plan order."""

    def outcome(self, check: str) -> Outcome | None:
        """Outcome of a check by id."""
        return next((o for o in self.outcomes if o.check == check), None)

    def check(self, check: str) -> Check:
        """Planned check by id; raises `KeyError`."""
        return {c.id: c for c in self.plan.checks}[check]

    def samples(self, check: str) -> Samples | None:
        """Samples of a check, read now; None where the bundle has none; raises `EvidenceError`."""
        if not (self.folder / samples_folder(check) / SAMPLES_HEADER).is_file():
            return None
        return read_samples(self.folder, check)


def open_bundle(folder: Path) -> Bundle:
    """A bundle or unfinished run; raises `InputError` for a folder that is neither, `EvidenceError`."""
    if not (folder / PLAN).is_file():
        raise InputError(
            f"{folder}: no bundle lies here ({PLAN} is missing); give the folder or the .tar.zst"
        )
    plan = load_record(folder / PLAN, Plan, MAX_PLAN_BYTES)
    manifest, digest = None, None
    if (folder / MANIFEST).exists():
        raw = read_bounded(folder / MANIFEST, MAX_MANIFEST_BYTES)
        manifest, digest = parse_record(raw, Manifest), sha256_hex(raw)
    environment = None
    if (folder / ENVIRONMENT).exists():
        environment = load_record(folder / ENVIRONMENT, Environment, MAX_ENVIRONMENT_BYTES)
    outcomes = {}
    if (folder / OUTCOMES).exists():
        outcomes = {o.check: o for o in iterate_outcomes(folder, is_finished=manifest is not None)}
    ordered = tuple(outcomes[c.id] for c in plan.checks if c.id in outcomes)
    return Bundle(folder, manifest, digest, plan, environment, ordered)


def iterate_outcomes(folder: Path, is_finished: bool) -> Iterator[Outcome]:
    """Outcomes line by line; raises `EvidenceError` that names the line. A torn last line ends an unfinished
    run quietly and is an error in a finished one.
    """
    path = folder / OUTCOMES
    read_bytes = 0
    with os.fdopen(open_regular(path), "rb") as file:
        for number in range(1, 10**9):
            line = file.readline(MAX_OUTCOME_BYTES + 1)
            read_bytes += len(line)
            if not line or (not line.endswith(b"\n") and not is_finished):
                return
            if not line.endswith(b"\n") or read_bytes > MAX_OUTCOMES_BYTES:
                raise EvidenceError(f"{OUTCOMES}, line {number}: is cut off or over the size limit")
            try:
                yield parse_record(line[:-1], Outcome)
            except EvidenceError as error:
                raise EvidenceError(f"{OUTCOMES}, line {number}: {error}") from error
