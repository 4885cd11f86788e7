"""What the index keeps of one bundle, read from its manifest and its outcomes.

Invariant: the outcomes that are read are the bytes that the manifest binds. A bundle that cannot be read
gives a reason and never stops the others. Only the fields that the index keeps are parsed: whole records
would take four times as long (15 ms instead of 4 for the 150 outcomes and 976 files of a smoke run).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pyarrow as pa
from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import from_json, to_json
from typing_extensions import TypedDict  # pydantic asks for this one before Python 3.12

from harness.domain.bundle import Manifest
from harness.domain.check import CheckId
from harness.domain.errors import EvidenceError
from harness.domain.faults import FaultScore
from harness.domain.machine import Machine
from harness.domain.record import canonical_bytes, sha256_hex
from harness.evidence.names import MANIFEST, OUTCOMES
from harness.evidence.pack import read_packed
from harness.evidence.reader import MAX_MANIFEST_BYTES
from harness.evidence.strict_json import read_bounded
from harness.history.scan import SCORE, Source

__all__ = ["BUNDLE_COLUMNS", "FAULT_COLUMNS", "Batch", "BundleRow", "FaultRow", "Refusal", "read_batch"]

MAX_OUTCOMES_BYTES = 64 * 2**20
"""A full run has under 1 MB of outcomes."""
MAX_SCORE_BYTES = 16 * 2**20
Number = Annotated[float, Field(allow_inf_nan=False)]
Word = Annotated[str, Field(max_length=200)]


class BundleRow(NamedTuple):
    """One bundle; the columns of the index's table, after its number."""

    digest: str
    created_us: int
    """Microseconds since 1970, UTC."""
    repository: str
    pr: int | None
    base: str
    head: str
    is_dirty: bool
    tier: str
    pack: str
    pack_digest: str
    harness_digest: str
    policy_digest: str
    machine: str
    """What timings depend on first: the GPUs, or the processor."""
    driver: str
    libraries: str
    """JSON list of [distribution, version]."""


BUNDLE_COLUMNS = BundleRow._fields


class FaultRow(NamedTuple):
    """One planted fault of one run of the fault suite; the columns of the index's table."""

    digest: str
    """Of the score's file."""
    created_us: int
    pack: str
    machine: str
    tier: str
    stage: str
    """Column that is expected to notice it."""
    fault: str
    noticed: bool


FAULT_COLUMNS = FaultRow._fields


class Refusal(NamedTuple):
    """A source that could not be read, and why."""

    place: int
    reason: str


@dataclass(frozen=True, slots=True)
class Batch:
    """What was read of several sources. `place` counts within the batch."""

    places: tuple[int, ...]
    """Place of each bundle, as in `bundles`."""
    bundles: tuple[BundleRow, ...]
    refusals: tuple[Refusal, ...]
    scores: tuple[tuple[int, tuple[FaultRow, ...]], ...]
    """(place, its faults) of each fault score."""
    outcomes: pa.Table
    figures: pa.Table


def read_batch(folder: str, sources: Sequence[Source]) -> Batch:
    """Read several bundles; runs in a process of its own where there are many."""
    places, bundles, refusals, scores = [], [], [], []
    columns = _Columns()
    for place, source in enumerate(sources):
        try:
            if source.path.endswith(SCORE):
                scores.append((place, _score(Path(folder) / source.path)))
                continue
            row, outcomes = _read(Path(folder), source)
        except EvidenceError as error:
            refusals.append(Refusal(place, str(error)[:500]))
            continue
        places.append(place)
        bundles.append(row)
        for outcome in outcomes:
            columns.add(place, outcome)
    tables = columns.tables()
    return Batch(tuple(places), tuple(bundles), tuple(refusals), tuple(scores), *tables)


class _Figure(TypedDict):
    name: Word
    value: Number | None
    low: Number | None
    high: Number | None


class _Control(TypedDict):
    kind: Word
    failed: bool


class _Outcome(TypedDict):
    check: CheckId
    status: Word
    tier: Word
    control: _Control | None
    figures: list[_Figure]


_PARSER = TypeAdapter(_Outcome)


@dataclass(slots=True)
class _Columns:
    """Columns of both tables as they grow; the way from rows to columns would cost more than reading."""

    outcomes: tuple[list[Any], ...] = field(default_factory=lambda: tuple([] for _ in range(6)))
    figures: tuple[list[Any], ...] = field(default_factory=lambda: tuple([] for _ in range(6)))

    def add(self, place: int, outcome: _Outcome) -> None:
        check, control = outcome["check"], outcome["control"]
        row = (
            place, check, outcome["status"], outcome["tier"],
            control and control["kind"], control and control["failed"],
        )  # fmt: skip
        for column, value in zip(self.outcomes, row, strict=True):
            column.append(value)
        measured = [f for f in outcome["figures"] if f["value"] is not None]
        places, checks, names, values, lows, highs = self.figures
        places += [place] * len(measured)
        checks += [check] * len(measured)
        names += [f["name"] for f in measured]
        values += [f["value"] for f in measured]
        lows += [f["low"] for f in measured]
        highs += [f["high"] for f in measured]

    def tables(self) -> tuple[pa.Table, pa.Table]:
        """Outcomes and figures."""
        text, number = pa.string(), pa.float64()
        outcomes = {"place": pa.int32(), "check_id": text, "status": text, "tier": text, "control": text}
        figures = {"place": pa.int32(), "check_id": text, "metric": text, "value": number, "low": number}
        return (
            _table({**outcomes, "noticed": pa.bool_()}, self.outcomes),
            _table({**figures, "high": number}, self.figures),
        )


def _table(types: dict[str, Any], columns: tuple[list[Any], ...]) -> pa.Table:
    arrays = [pa.array(c, t) for c, t in zip(columns, types.values(), strict=True)]
    return pa.table(arrays, names=list(types))


def _read(folder: Path, source: Source) -> tuple[BundleRow, list[_Outcome]]:
    raw_manifest, raw_outcomes = _files(folder / source.path)
    manifest = _manifest(raw_manifest)
    if [f.sha256 for f in manifest.files] != [sha256_hex(raw_outcomes)]:
        raise EvidenceError(f"{OUTCOMES} is not the file that the manifest lists")
    outcomes = []
    for number, line in enumerate(raw_outcomes.splitlines(), 1):
        try:
            outcomes.append(_PARSER.validate_json(line, strict=True))
        except ValidationError as error:
            raise EvidenceError(f"{OUTCOMES}, line {number}: is no outcome: {_first(error)}") from None
    return _row(manifest, sha256_hex(raw_manifest)), outcomes


def _manifest(raw: bytes) -> Manifest:
    """The manifest with the entry of the outcomes alone, as parsing all files takes most of the time."""
    try:
        content = from_json(raw, allow_inf_nan=False)
        files = content["files"]
        content["files"] = [f for f in files if f["path"] == OUTCOMES]
        return Manifest.model_validate_json(to_json(content), strict=True)
    except ValidationError as error:
        raise EvidenceError(f"its manifest is none: {_first(error)}") from None
    except (ValueError, TypeError, KeyError) as error:
        raise EvidenceError(f"its manifest is none: {str(error)[:200]}") from None


def _score(path: Path) -> tuple[FaultRow, ...]:
    raw = read_bounded(path, MAX_SCORE_BYTES)
    try:
        score = FaultScore.model_validate_json(raw, strict=True)
    except ValidationError as error:
        raise EvidenceError(f"is no fault score: {_first(error)}") from None
    machine = f"{len(score.gpus)} x {score.gpus[0]}" if score.gpus else score.cpu_model
    digest, created_us = sha256_hex(raw), int(score.created.timestamp() * 1e6)
    caught = {r.name for r in score.caught}
    return tuple(
        FaultRow(
            digest,
            created_us,
            score.pack,
            machine[:200],
            score.tier.value,
            r.expected,
            r.name,
            r.name in caught,
        )
        for r in score.planted
    )


def _files(path: Path) -> tuple[bytes, bytes]:
    if path.is_dir():
        return (
            read_bounded(path / MANIFEST, MAX_MANIFEST_BYTES),
            read_bounded(path / OUTCOMES, MAX_OUTCOMES_BYTES),
        )
    found = read_packed(path, {MANIFEST: MAX_MANIFEST_BYTES, OUTCOMES: MAX_OUTCOMES_BYTES})
    if len(found) < 2:
        raise EvidenceError(f"holds no {MANIFEST} or no {OUTCOMES}")
    return found[MANIFEST], found[OUTCOMES]


def _row(manifest: Manifest, digest: str) -> BundleRow:
    change, machine = manifest.change, manifest.machine
    return BundleRow(
        digest=digest,
        created_us=int(manifest.created.timestamp() * 1e6),
        repository=change.repository,
        pr=change.pr,
        base=change.base,
        head=change.head,
        is_dirty=change.is_dirty,
        tier=manifest.tier.value,
        pack=manifest.pack,
        pack_digest=manifest.pack_digest,
        harness_digest=manifest.harness_digest,
        policy_digest=manifest.policy_digest,
        machine=_machine(machine),
        driver=machine.driver or "",
        libraries=canonical_bytes([list(pair) for pair in machine.libraries]).decode(),
    )


def _machine(machine: Machine) -> str:
    if not machine.gpus:
        return f"{machine.cpu_model}, {machine.cpu_count} cores"[:200]
    return f"{len(machine.gpus)} x {machine.gpus[0].name}"[:200]


def _first(error: ValidationError) -> str:
    fault = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(str(p) for p in fault['loc'])[:120]}: {fault['msg'][:200]}"
