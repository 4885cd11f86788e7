"""A run while it goes: the folder that becomes the bundle.

Layout: `plan.json`, `outcomes.jsonl` (one line a finished check, only ever appended to), `samples/`,
`ledger/`, `logs/`. `write_bundle` puts `manifest.json` in last. Invariant: whatever byte the process dies
at, the folder reads as a run that has not finished, and `open_run` goes on from the checks that were
recorded whole. Files are not forced to disk one by one (measured: 13 ms each); where a power cut lost
samples, `open_run` forgets their outcome. One process holds a run at a time. Callers keep everything else
(caches, reports) outside the folder.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from harness.domain.check import Check, CheckId, Outcome, Samples, Status
from harness.domain.errors import EvidenceError, InputError
from harness.domain.plan import Plan
from harness.domain.record import Digest, sha256_hex
from harness.evidence.names import (
    ATTESTATION,
    LEDGER,
    LOGS,
    MANIFEST,
    OUTCOMES,
    PLAN,
    SAMPLES,
    SCRATCH,
    samples_folder,
)
from harness.evidence.redaction import Redactor
from harness.evidence.samples import has_samples, read_samples, write_samples
from harness.evidence.strict_json import load_record, parse_record, read_bounded

__all__ = [
    "MAX_OUTCOME_BYTES",
    "MAX_PLAN_BYTES",
    "TEMPORARY",
    "RunFolder",
    "load_plan",
    "open_run",
    "write_atomically",
]

MAX_PLAN_BYTES = 256 * 2**20
MAX_OUTCOME_BYTES = 8 * 2**20
TEMPORARY = ".writing-"


class RunFolder:
    """One open run. Made by `open_run`; holds a lock on the folder until it is closed."""

    def __init__(self, folder: Path, plan: Plan, lock: int) -> None:
        self.folder = folder
        self.plan = plan
        self.redactor = Redactor.of_process()
        self._lock = lock
        self._plan_digest = _plan_digest(folder)
        self._checks = {c.id: c for c in plan.checks}
        self._outcomes = {o.check: o for o in _read_whole_lines(folder / OUTCOMES)}

    @property
    def plan_file(self) -> Path:
        """The plan on disk."""
        return self.folder / PLAN

    @property
    def scratch(self) -> Path:
        """Folder for files of the running process; removed when the bundle is written."""
        place = self.folder / SCRATCH
        place.mkdir(exist_ok=True)
        return place

    @property
    def logs(self) -> Path:
        """Folder whose files travel in the bundle, redacted when it is finished."""
        return self.folder / LOGS

    @property
    def ledger(self) -> Path:
        """Folder for dispatcher ledgers that are no samples of one check."""
        return self.folder / LEDGER

    def finished(self) -> frozenset[CheckId]:
        """Checks whose outcome and samples are on disk whole."""
        return frozenset(self._outcomes)

    def outcomes(self) -> tuple[Outcome, ...]:
        """Outcomes recorded so far, in plan order."""
        return tuple(self._outcomes[c.id] for c in self.plan.checks if c.id in self._outcomes)

    def samples(self, check: CheckId) -> Samples:
        """Recorded samples of a finished check; raises `EvidenceError` where it has none."""
        return read_samples(self.folder, check)

    def clean(self, samples: Samples) -> Samples:
        """Samples without secrets in their free text. Judge these, so that anybody who judges the bundle
        again comes to the same words.
        """
        return self.redactor.samples(samples)

    def record(self, outcome: Outcome, samples: Samples | None) -> None:
        """Put one outcome and its samples on disk, samples first. Only a SKIPPED outcome may come without.

        Raises `InputError` for a check that the plan lacks or that was recorded before, and where outcome
        and samples speak of different checks.
        """
        self._require_new(outcome, samples)
        if samples is not None:
            self._write_samples(self.redactor.samples(samples))
        redacted = self.redactor.outcome(outcome)
        line = redacted.canonical() + b"\n"
        if len(line) > MAX_OUTCOME_BYTES:
            raise InputError(
                f"outcome of {outcome.check} takes {len(line)} bytes, over the limit of {MAX_OUTCOME_BYTES}; "
                "keep raw observations in samples, not in figures or findings"
            )
        with (self.folder / OUTCOMES).open("ab") as file:
            file.write(line)
        self._outcomes[outcome.check] = redacted

    def close(self) -> None:
        """Let go of the folder."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _require_new(self, outcome: Outcome, samples: Samples | None) -> None:
        check: Check | None = self._checks.get(outcome.check)
        if check is None:
            raise InputError(f"outcome of {outcome.check}: this run's plan has no such check")
        if outcome.check in self._outcomes:
            raise InputError(f"outcome of {outcome.check} is already recorded; outcomes are written once")
        if samples is None and outcome.status is not Status.SKIPPED:
            raise InputError(
                f"outcome of {outcome.check} is {outcome.status} but comes without samples; only SKIPPED may"
            )
        if samples is not None and samples.check != outcome.check:
            raise InputError(f"outcome of {outcome.check} comes with the samples of {samples.check}")
        if samples is not None and samples.tier is not outcome.tier:
            raise InputError(
                f"outcome of {outcome.check} is of tier {outcome.tier}, its samples of {samples.tier}"
            )

    def _write_samples(self, samples: Samples) -> None:
        place = self.folder / samples_folder(samples.check)
        temporary = place.with_name(TEMPORARY + place.name)
        for leftover in (temporary, place):
            if leftover.exists():  # samples of an outcome whose line was never written
                shutil.rmtree(leftover)
        write_samples(temporary, samples, self._plan_digest)
        temporary.rename(place)


def open_run(folder: Path, plan: Plan) -> RunFolder:
    """Start a run in `folder`, or go on with the one that is there.

    A finished bundle becomes a run again: its manifest and attestation are removed first. Raises `InputError`
    where the folder holds another plan, something that is no run, or a run that another process has open.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{folder}: the run's folder cannot be made ({error.strerror}); choose another place with --out"
        ) from error
    lock = _lock(folder)
    try:
        _require_own_folder(folder, plan)
        for name in (MANIFEST, ATTESTATION):
            (folder / name).unlink(missing_ok=True)
        for name in (SAMPLES, LOGS, LEDGER):
            (folder / name).mkdir(exist_ok=True)
        for leftover in list(folder.rglob(TEMPORARY + "*")):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        if not (folder / PLAN).exists():
            write_atomically(folder / PLAN, plan.canonical())
        _drop_torn_line(folder / OUTCOMES)
        _drop_lost_samples(folder)
        return RunFolder(folder, plan, lock)
    except BaseException:
        os.close(lock)
        raise


def load_plan(folder: Path) -> Plan:
    """The plan of a run or bundle; raises `InputError` where there is none, `EvidenceError` for a bad one."""
    path = folder / PLAN
    if not path.is_file():
        raise InputError(f"{folder} holds no {PLAN}; name a folder that `fasttrack validate --out` made")
    return load_record(path, Plan, MAX_PLAN_BYTES)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file whole or not at all; its content is on disk before its name is."""
    temporary = path.with_name(TEMPORARY + path.name)
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _lock(folder: Path) -> int:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise InputError(
            f"{folder}: another fasttrack process is writing this run; wait for it or choose another --out"
        ) from None
    return handle


def _require_own_folder(folder: Path, plan: Plan) -> None:
    names = {p.name for p in folder.iterdir() if not p.name.startswith(TEMPORARY)}
    if PLAN not in names:
        if names:
            raise InputError(
                f"{folder} is not empty and holds no {PLAN}, so it is no run; "
                "choose an empty folder for --out"
            )
        return
    other = load_plan(folder).digest()
    if other != plan.digest():
        raise InputError(
            f"{folder} holds a run of plan {other[:12]}, not of {plan.digest()[:12]}: claim, policy, change, "
            "machine, harness or nonce differ; runs are never mixed, so choose another --out"
        )


def _plan_digest(folder: Path) -> Digest:
    """Digest of the plan as it lies on disk, which is what the manifest binds."""
    return sha256_hex(read_bounded(folder / PLAN, MAX_PLAN_BYTES))


def _drop_torn_line(path: Path) -> None:
    """Cut what a crash left after the last whole line."""
    with path.open("a+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - MAX_OUTCOME_BYTES))
        tail = file.read()
        if tail and not tail.endswith(b"\n"):
            file.truncate(size - len(tail) + tail.rfind(b"\n") + 1)


def _drop_lost_samples(folder: Path) -> None:
    """Forget outcomes whose samples cannot be read, so that their checks run again."""
    outcomes = list(_read_whole_lines(folder / OUTCOMES))
    plan = _plan_digest(folder)
    kept = [o for o in outcomes if o.status is Status.SKIPPED or has_samples(folder, o.check, plan)]
    if len(kept) != len(outcomes):
        write_atomically(folder / OUTCOMES, b"".join(o.canonical() + b"\n" for o in kept))


def _read_whole_lines(path: Path) -> Iterator[Outcome]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield parse_record(line[:-1], Outcome)
            except EvidenceError as error:
                raise EvidenceError(f"{path}, line {number}: {error}") from error
