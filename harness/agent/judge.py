"""One op under an agent's hands: its workspace, its attempts, and the best that was proved.

An attempt is judged in this order, and ends at the first no: its change (only the op's own files count),
public tests, held-out tests, speed against the best so far at the level that is left, and the policy's
verdict. Every attempt is counted and goes into the journal, whatever came of it. Invariant: `best` only ever
holds files of an accepted attempt, or those that the loop began with.
"""

import random
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.agent.charge import blocks_for, charged_alpha
from harness.agent.commands import CommandEnded
from harness.agent.held_out import Bench, draw_checks, public_checks, run_checks, summed_up
from harness.agent.race import Entrant, RaceResult, race
from harness.agent.verdicts import Asked, VerdictDesk, is_admitted
from harness.agent.workspace import Change, editable_files, lay_out, read_change, tree_with
from harness.domain.check import Check, Status
from harness.domain.errors import InputError
from harness.domain.journal import AttemptResult, CheckRow, JournalEntry
from harness.domain.pack import Pack
from harness.domain.stage import PlanRequest
from harness.evidence.journal import append_entry, load_journal
from harness.tuning.desk import request_of

__all__ = ["Judge", "Progress", "Said", "Settings"]

Progress = Callable[[int, int, str], None]
STAGES = ("change", "tests", "held_out", "speed", "verdict")


@dataclass(frozen=True, slots=True)
class Settings:
    """What a judge is told by the person who starts it."""

    pack: Pack
    repo: Path
    """Repository whose version of the op the loop begins with."""
    policy: str
    folder: Path
    """The judge's own: nothing of it lies in the workspace."""
    workspace: Path
    attempts: int | None = 20
    alpha: float = 0.05
    """Chance that any attempt of the budget is called faster though none is."""
    held_out: int = 3
    blocks: int = 12
    cell: str = ""
    """Text that the label of the timed cell holds; empty: any."""
    is_verdict_asked: bool = True
    seed: int = 0
    """Of public checks."""


@dataclass(frozen=True, slots=True)
class Said:
    """What an agent says of an attempt."""

    question: str = ""
    predicted: str = ""
    next: str = ""


@dataclass(slots=True)
class Judge:
    """See the module; made by `Judge.of`."""

    settings: Settings
    op: str
    implementation: str
    request: PlanRequest
    checks: tuple[Check, ...]
    start: Mapping[str, str]
    base_tree: Path
    best_tree: Path
    best_files: Mapping[str, str]
    journal: Path
    has_gpu: bool
    attempts: int = 0
    accepted: int = 0
    best: int | None = None
    over_start: float = 1.0
    since_accepted: int = 0
    busy_s: float = 0.0
    """Seconds in which something of a candidate ran here."""
    verdict: Asked | None = None
    _desk: VerdictDesk | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, settings: Settings, op: str) -> "Judge":
        """Lay the workspace out and open the journal; raises `InputError` for an op that cannot be judged."""
        pack = settings.pack
        contract = next((o for o in pack.ops() if o.name == op), None)
        if contract is None:
            raise InputError(f"no op is called {op!r}; there are {', '.join(o.name for o in pack.ops())}")
        request = request_of(pack, settings.policy, settings.seed)
        has_gpu = request.machine.arch != "cpu"
        implementation = "cute" if has_gpu else "cpu"
        checks = public_checks(request, op, implementation)
        files = editable_files(contract, implementation)
        if not checks or not files:
            raise InputError(f"{op} has no {implementation} implementation that this machine can test")
        settings.folder.mkdir(parents=True, exist_ok=True)
        settings.workspace.mkdir(parents=True, exist_ok=True)
        if settings.folder.resolve().is_relative_to(settings.workspace.resolve()):
            raise InputError(
                f"the judge's folder {settings.folder} lies in the agent's workspace; name another"
            )
        lay_out(settings.workspace, settings.repo, files)
        start = {name: (settings.workspace / name).read_text(encoding="utf-8") for name in files}
        base = tree_with(pack, settings.repo, start, settings.folder / op / "base")
        journal = settings.folder / "journal.jsonl"
        words = f"{implementation}, policy {settings.policy}, {settings.attempts or 'unlimited'} attempts"
        append_entry(journal, kind="begun", op=op, words=words)
        return cls(
            settings=settings, op=op, implementation=implementation, request=request, checks=checks,
            start=start, base_tree=base, best_tree=base, best_files=start, journal=journal, has_gpu=has_gpu,
        )  # fmt: skip

    @property
    def timed_check(self) -> Check:
        """The check in whose cell versions race: of those that are wanted, the one with most rows."""
        text = self.settings.cell
        found = [c for c in self.checks if c.cell is not None and text in c.cell.label()]
        if not found:
            raise InputError(f"no cell of {self.op} holds {text!r}")
        return max(found, key=lambda c: 0 if c.cell is None else c.cell.batch * (c.cell.drafts + 1))

    def change(self) -> Change:
        """The agent's files as they are now."""
        return read_change(self.settings.workspace, self.start)

    def candidate_tree(self, change: Change, name: str) -> Path:
        """A tree with these files, below the judge's folder."""
        return tree_with(self.settings.pack, self.settings.repo, change.files, self.folder / name / "tree")

    @property
    def folder(self) -> Path:
        """The judge's folder of this op."""
        return self.settings.folder / self.op

    def submit(
        self, said: Said, on_progress: Progress | None = None, cancelled: threading.Event | None = None
    ) -> AttemptResult:
        """One counted attempt; raises `InputError` where the budget is spent."""
        with self._lock:
            budget = self.settings.attempts
            if budget is not None and self.attempts >= budget:
                raise InputError(f"all {budget} attempts are spent; the best proved one stands")
            self.attempts += 1
            self.since_accepted += 1
            begun = time.monotonic()
            change: Change | None = None
            try:
                change = self.change()
                result = self._judged(change, _told(on_progress, cancelled), cancelled)
            except InputError as error:
                result = self._no("change", str(error), "mend the files of the workspace and submit again")
            except CommandEnded as error:
                result = self._no("tests", str(error), "submit again and wait for the result")
            finally:
                self.busy_s += time.monotonic() - begun
            self._keep(said, change, result)
            return result

    def entries(self) -> tuple[JournalEntry, ...]:
        """The journal so far."""
        return load_journal(self.journal)

    def write_best(self, folder: Path) -> None:
        """The best proved files below `folder`."""
        for name, text in self.best_files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")

    def _judged(
        self, change: Change, on_progress: Progress, cancelled: threading.Event | None
    ) -> AttemptResult:
        if not change.patch or change.files == self.best_files:
            words = "nothing differs from the best version so far"
            return self._no("change", words, "edit the files that `read_contract` names")
        name = f"attempt{self.attempts}"
        tree = self.candidate_tree(change, name)
        scratch = self.folder / name / "scratch"
        settings = self.settings
        with Bench(settings.pack.name, settings.policy, tree, scratch, has_gpu=self.has_gpu) as bench:
            outcomes = run_checks(bench, self.checks, on_progress)
            rows = tuple(CheckRow(check=o.check, status=o.status, summary=o.summary) for o in outcomes)
            given: dict[str, Any] = {"tests": rows, "sandbox": bench.words}
            bad = [o for o in outcomes if o.status is not Status.PASS]
            if bad:
                words = f"{len(bad)} of {len(outcomes)} tests do not pass; {bad[0].check}: {bad[0].summary}"
                return self._no("tests", words, bad[0].next_step, **given)
            source = random.Random(secrets.randbits(64))
            drawn = draw_checks(self.request, self.op, self.implementation, settings.held_out, source)
            hidden = run_checks(bench, drawn, is_first_enough=True)
        given["held_out"] = summed_up(hidden, len(drawn))
        if not given["held_out"].is_passed:
            words = f"a held-out test does not pass: {given['held_out'].kind}"
            step = "the public cells are examples; be right in the whole envelope"
            return self._no("held_out", words, step, **given)
        return self._raced(change, tree, given, on_progress, cancelled)

    def _raced(
        self, change: Change, tree: Path, given: dict[str, Any], on_progress: Progress,
        cancelled: threading.Event | None,
    ) -> AttemptResult:  # fmt: skip
        alpha = charged_alpha(self.settings.alpha, self.attempts, self.settings.attempts)
        on_progress(len(self.checks), len(self.checks), "timing against the best so far")
        found = self._race(self.best_tree, tree, alpha, "race")
        given["speed"] = found.speed
        if found.status is not Status.PASS or found.speed is None:
            return self._no("speed", found.words, "times and outputs of timed calls must be true", **given)
        if found.speed.low <= 1.0:
            words = f"{found.words}: not surely faster than the best so far"
            return self._no(
                "speed", words, "find a larger gain; each attempt makes the level stricter", **given
            )
        over = found.speed.ratio
        if self.best is not None:
            again = self._race(self.base_tree, tree, self.settings.alpha, "race-start")
            over = (
                again.speed.ratio if again.status is Status.PASS and again.speed else over * self.over_start
            )
        given["over_start"] = over
        if self.settings.is_verdict_asked:
            on_progress(len(self.checks), len(self.checks), "asking for the policy's verdict")
            self.verdict = self._ask(change, on_progress, cancelled)
            given["verdict"] = self.verdict.words
            if not is_admitted(self.verdict):
                step = "read the verdict; make what it says is missing"
                return self._no("verdict", f"{found.words}, but {self.verdict.words}", step, **given)
        self.best, self.best_tree, self.best_files = self.attempts, tree, change.files
        self.over_start, self.since_accepted = over, 0
        self.accepted += 1
        return AttemptResult(
            attempt=self.attempts, accepted=True, stage="accepted", words=found.words,
            next_step="this is the best so far; the next attempt races against it", **given,
        )  # fmt: skip

    def _race(self, first: Path, second: Path, alpha: float, name: str) -> RaceResult:
        return race(
            self.settings.pack, self.timed_check, self.base_tree,
            Entrant(first, "optimised"), Entrant(second, "optimised"),
            self.folder / f"attempt{self.attempts}" / name,
            blocks=blocks_for(alpha, self.settings.blocks), alpha=alpha,
            source=random.Random(secrets.randbits(64)), has_gpu=self.has_gpu,
        )  # fmt: skip

    @property
    def desk(self) -> VerdictDesk:
        """Where candidates become commits; made when first asked for."""
        if self._desk is None:
            settings = self.settings
            self._desk = VerdictDesk(
                settings.pack, settings.repo, settings.policy, self.start, self.folder, self.base_tree,
                has_gpu=self.has_gpu,
            )  # fmt: skip
        return self._desk

    @property
    def is_busy(self) -> bool:
        """Whether an attempt is being judged."""
        return self._lock.locked()

    def _ask(self, change: Change, on_progress: Progress, cancelled: threading.Event | None) -> Asked:
        return self.desk.ask(change.files, self.attempts, self.journal, on_progress, cancelled)

    def _no(self, stage: Any, words: str, step: str, **given: Any) -> AttemptResult:
        return AttemptResult(
            attempt=self.attempts,
            accepted=False,
            stage=stage,
            words=words[:3000],
            next_step=step[:1000],
            **given,
        )

    def _keep(self, said: Said, change: Change | None, result: AttemptResult) -> None:
        append_entry(
            self.journal, kind="attempt", op=self.op, question=said.question[:2000],
            change=None if change is None else change.digest,
            patch="" if change is None else change.patch[:200_000],
            predicted=said.predicted[:2000], result=result, next=said.next[:2000],
        )  # fmt: skip


def _told(on_progress: Progress | None, cancelled: threading.Event | None) -> Progress:
    """Progress that ends the attempt once it is cancelled."""

    def tell(done: int, total: int, text: str) -> None:
        if cancelled is not None and cancelled.is_set():
            raise CommandEnded("the attempt was cancelled")
        if on_progress is not None:
            on_progress(done, total, text)

    return tell
