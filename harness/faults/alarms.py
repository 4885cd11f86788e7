"""How often the statistical checks accuse an honest pack: the same checks, seed after seed.

Each seed draws other inputs, prompts and blocks; the pack is as it is. An accusation is any verdict but PASS,
SKIPPED and INCONCLUSIVE. Runs add up: one line a seed in a file, each bound to the harness that it is of.
"""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from pydantic import ValidationError

from harness.domain.errors import EvidenceError
from harness.domain.faults import AlarmRun, Sighting
from harness.domain.machine import Tier
from harness.engines.packs import harness_digest, load_pack, pack_digest
from harness.faults.bench import Bench
from harness.measure.machine import read_machine

__all__ = ["STATISTICAL_CHECKS", "alarm_words", "read_runs", "run_seed"]

STATISTICAL_CHECKS = (
    "sweep/decode_step/cpu.tp1.dcp1.b1.c64", "sweep/decode_step/cpu.tp1.dcp1.b8.c64", "evals/mrcr_canary",
)  # fmt: skip
"""How the ids begin of checks that noise can move: two cells of a sweep, and a task."""


def run_seed(pack: str, seed: int, parts: Sequence[str], on_check: Callable[[str], None]) -> AlarmRun:
    """What the statistical checks of a plain smoke run say of the pack as it is, with one seed."""
    with TemporaryDirectory(prefix="fasttrack-alarms-") as folder:
        bench = Bench(Path(folder), pack, seed, Tier.SMOKE)
        seen: list[Sighting] = []
        for check in bench.checks(*parts):
            on_check(check.id)
            seen += bench.run([check])
    return AlarmRun(
        seed=seed, harness_digest=harness_digest(), pack=pack, pack_digest=pack_digest(load_pack(pack)),
        created=datetime.now(UTC).replace(microsecond=0), cpu_model=read_machine().cpu_model,
        seen=tuple(seen),
    )  # fmt: skip


def read_runs(path: Path) -> tuple[AlarmRun, ...]:
    """The runs in a file, one a line; none where there is none. Raises `EvidenceError` for a broken file."""
    if not path.is_file():
        return ()
    try:
        return tuple(
            AlarmRun.from_json(line) for line in path.read_text(encoding="utf-8").splitlines() if line
        )
    except (ValueError, ValidationError) as error:
        raise EvidenceError(f"{path}: no runs can be read here: {str(error).splitlines()[0]}") from error


def alarm_words(runs: Sequence[AlarmRun], allowed: float) -> str:
    """One sentence: how many seeds, how many with any accusation, and the rate that the policy states."""
    accused = [run for run in runs if run.alarms]
    checks = sum(len(run.seen) for run in runs)
    which = f": seeds {', '.join(str(run.seed) for run in accused)}" if accused else ""
    return (
        f"{len(accused)} of {len(runs)} seeds have a false alarm from {checks} statistical checks{which}; "
        f"the policy states a family-wise rate of {allowed:.0%}"
    )
