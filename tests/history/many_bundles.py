"""Small bundles by the hundred: one sweep, one kernel and one coverage check each, written as a run would."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from harness.domain.bundle import FileEntry, Manifest
from harness.domain.cell import Cell
from harness.domain.check import Control, Figure, Outcome, Status
from harness.domain.machine import Machine, Tier
from harness.domain.plan import Plan
from harness.domain.record import sha256_hex
from tests.evidence.example_run import example_machine, example_plan

__all__ = ["RATIO", "START", "Run", "outcome", "write_bundles", "write_small"]

START = datetime(2026, 9, 1, 12, tzinfo=UTC)
CELL = Cell(batch=1, context=64).label()
RATIO = f"sweep/decode/{CELL}"
Run = dict[str, Any]
"""What is special about one bundle: `ratio`, `day`, `head`, `pr`, `status`, `noticed`, `machine`, ..."""
PLAN = example_plan(checks=())


def write_small(folder: Path, **run: Any) -> Path:
    """One bundle of a manifest and outcomes, as the index reads them."""
    plan: Plan = PLAN
    machine: Machine = run.get("machine") or example_machine()
    content = b"".join(o.canonical() + b"\n" for o in run.get("outcomes") or _outcomes(run))
    folder.mkdir(parents=True)
    (folder / "outcomes.jsonl").write_bytes(content)
    files = (FileEntry(path="outcomes.jsonl", sha256=sha256_hex(content), size=len(content)),)
    manifest = Manifest.of(plan, machine, files, START + timedelta(days=run.get("day", 0)))
    head = run.get("head", f"{int(run.get('day', 0) * 1000):040x}")
    change = manifest.change.model_copy(
        update={"head": head, "pr": run.get("pr"), "is_dirty": run.get("is_dirty", False)}
    )
    digests = {n: run[n] for n in ("harness_digest", "pack_digest", "policy_digest") if n in run}
    changed = manifest.model_copy(update={"change": change, **digests})
    (folder / "manifest.json").write_bytes(changed.canonical())
    return folder


def write_bundles(folder: Path, count: int, of: Callable[[int], Run]) -> None:
    """Bundles 0 to `count`, one a day."""
    for number in range(count):
        write_small(folder / f"b{number:05}", **{"day": number, **of(number)})


def outcome(check: str, status: Status = Status.PASS, noticed: bool = True, **figures: float) -> Outcome:
    """An outcome with figures and a planted control."""
    return Outcome(
        check=check, status=status, tier=Tier.SMOKE, summary="seen",
        next_step="" if status is Status.PASS else "look at it",
        control=Control(kind="planted", description="a slow-down", failed=noticed, observed="1.2"),
        figures=tuple(Figure(name=n, value=v) for n, v in figures.items()),
    )  # fmt: skip


def _outcomes(run: Run) -> tuple[Outcome, ...]:
    noticed = run.get("noticed", True)
    status = run.get("status", Status.PASS if noticed else Status.NO_EVIDENCE)
    return (
        outcome(RATIO, status, noticed, ratio=run.get("ratio", 1.5), optimised_us=100.0),
        outcome(f"kernels/router/{CELL}", optimised_relative_l2=2e-3),
        outcome("coverage/path/change", path_share=1.0),
    )
