"""Plant every fault in turn, and its twin, and see what the stages say. Two workers, each with one thread.

A fault's patch lives in one worker process only and is gone before the next one starts; a worker that dies
breaks its fault and no other. The verdict follows from the sightings alone (`judge_sightings`, pure).
"""

import os
import shutil
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from tempfile import mkdtemp

from harness import __version__
from harness.domain.errors import EvidenceError, InputError
from harness.domain.faults import COLUMNS, FaultCell, FaultResult, FaultScore, FaultVerdict, Sighting
from harness.domain.machine import Tier
from harness.engines.packs import harness_digest, load_pack, pack_digest
from harness.faults.bench import Bench
from harness.faults.fault import Fault
from harness.faults.registry import Registered, registered_faults
from harness.measure.machine import read_machine

__all__ = ["SuiteOptions", "judge_sightings", "plant", "run_suite"]

WORKERS = 2


@dataclass(frozen=True, slots=True)
class SuiteOptions:
    """One run of the suite."""

    pack: str = "k3_decode"
    tier: Tier = Tier.SMOKE
    seed: int = 0
    names: tuple[str, ...] = ()
    """Only these faults; empty: all."""
    workers: int = WORKERS
    cache: str = ""
    """Folder whose compiled kernels are used; empty: none is kept."""


def run_suite(options: SuiteOptions, on_result: Callable[[FaultResult, int, int], None]) -> FaultScore:
    """The score of this harness; `on_result` hears of each result, how many are done and of how many.

    Raises `InputError` for a name that no fault has, and `EvidenceError` where harness or pack changed
    meanwhile: such results belong to neither.
    """
    digests = _digests(options)
    known = registered_faults()
    unknown = sorted(set(options.names) - {r.fault.name for r in known})
    if unknown:
        raise InputError(f"no fault is called {unknown[0]!r}; `fasttrack faults list` names them all")
    chosen = [r for r in known if not options.names or r.fault.name in options.names]
    folder = Path(mkdtemp(prefix="fasttrack-faults-"))
    results: dict[str, FaultResult] = {}

    def done(result: FaultResult) -> None:
        results[result.name] = result
        on_result(result, len(results), len(chosen))

    try:
        for registered in chosen:
            if registered.fault.tier.strength > options.tier.strength:
                done(_result(registered, "skipped", reason=f"needs tier {registered.fault.tier.value}"))
        waiting = [r for r in chosen if r.fault.name not in results]
        while waiting:
            waiting = _run_pool(options, folder, waiting, done)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if digests != _digests(options):
        raise EvidenceError(
            "the harness or the pack was edited while the fault suite ran, so its results belong to no one "
            "version; run it again from a tree that nobody edits, such as `git worktree add`"
        )
    machine = read_machine()
    return FaultScore(
        harness_version=__version__, harness_digest=digests[0], pack=options.pack,
        pack_digest=digests[1], tier=options.tier, seed=options.seed,
        created=datetime.now(UTC).replace(microsecond=0), cpu_model=machine.cpu_model,
        gpus=tuple(g.name for g in machine.gpus), results=tuple(results[r.fault.name] for r in chosen),
    )  # fmt: skip


def _digests(options: SuiteOptions) -> tuple[str, str]:
    return harness_digest(), pack_digest(load_pack(options.pack))


def _run_pool(
    options: SuiteOptions, folder: Path, waiting: Sequence[Registered], done: Callable[[FaultResult], None]
) -> list[Registered]:
    """Run faults in a fresh pool; gives those that are still to run because a worker died."""
    left = {r.fault.name: r for r in waiting}
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn"), initializer=_quiet) as pool:
        futures: dict[Future[FaultResult], Registered] = {
            pool.submit(_run_one, r.fault.name, options, str(folder)): r for r in waiting
        }
        for future in as_completed(futures):
            registered = futures[future]
            try:
                done(future.result())
            except BrokenProcessPool:
                # Which of the faults in flight killed the worker is unknown: run the first of them alone.
                alone = next(iter(left.values()))
                done(_run_alone(alone, options, folder))
                left.pop(alone.fault.name)
                return list(left.values())
            left.pop(registered.fault.name)
    return list(left.values())


def _run_alone(registered: Registered, options: SuiteOptions, folder: Path) -> FaultResult:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_quiet) as pool:
        try:
            return pool.submit(_run_one, registered.fault.name, options, str(folder)).result()
        except BrokenProcessPool:
            return _result(registered, "broken", reason="the process that planted it died")


def _quiet() -> None:
    """Before torch is loaded: one thread a worker, as a second one spins at the barriers of short steps; no
    progress bars beside ours.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    os.environ["TQDM_DISABLE"] = "1"


@lru_cache(maxsize=1)
def _bench(folder: str, options: SuiteOptions) -> Bench:
    cache = Path(options.cache) if options.cache else None
    return Bench(Path(folder), options.pack, options.seed, options.tier, cache)


def _run_one(name: str, options: SuiteOptions, folder: str) -> FaultResult:
    registered = next(r for r in registered_faults() if r.fault.name == name)
    return plant(registered, _bench(folder, options))


def plant(registered: Registered, bench: Bench) -> FaultResult:
    """Plant the fault, then its twin; an error of the scene itself makes it `broken`."""
    begun = time.monotonic()
    scene = registered.fault.scene
    try:
        fault = tuple(scene.look(bench, False))
        twin = tuple(scene.look(bench, True))
    except Exception as error:  # noqa: BLE001  # a stranger's scene may raise anything, and the suite goes on
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        reason = f"{type(error).__name__} at {where}: {error}"[:500]
        return _result(registered, "broken", reason=reason, duration_s=time.monotonic() - begun)
    return judge_sightings(registered, fault, twin, time.monotonic() - begun)


def judge_sightings(
    registered: Registered, fault: Sequence[Sighting], twin: Sequence[Sighting], duration_s: float = 0.0
) -> FaultResult:
    """Caught where a check objects to the fault and passes the twin; accusing the twin is a false alarm.

    A check that ran for the fault alone, or for the twin alone, decides nothing.
    """
    sound = {s.subject for s in twin if s.status == "PASS"}
    cells = []
    for column in COLUMNS:
        mine = [s for s in fault if s.column == column]
        caught = [s for s in mine if s.objects and s.subject in sound]
        if mine:
            cells.append(
                FaultCell(column=column, checks=len(mine), is_caught=bool(caught), seen=(caught or mine)[0])
            )
    columns = [c.column for c in cells if c.is_caught]
    verdict: FaultVerdict = "missed"
    if registered.fault.expected in columns:
        verdict = "caught"
    elif columns:
        verdict = "caught_elsewhere"
    alarms = tuple(s for s in twin if s.is_alarm)
    return _result(
        registered,
        verdict,
        registered.fault.gap if verdict == "missed" else "",
        tuple(cells),
        alarms,
        duration_s,
    )


def _result(
    registered: Registered,
    verdict: FaultVerdict,
    reason: str = "",
    cells: Iterable[FaultCell] = (),
    alarms: Iterable[Sighting] = (),
    duration_s: float = 0.0,
) -> FaultResult:
    fault: Fault = registered.fault
    return FaultResult(
        name=fault.name, title=fault.title, report=fault.report, target=fault.target, expected=fault.expected,
        tier=fault.tier, suite=registered.suite, verdict=verdict, reason=reason, cells=tuple(cells),
        false_alarms=tuple(alarms), duration_s=round(duration_s, 2),
    )  # fmt: skip
