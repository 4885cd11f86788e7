"""Twenty thousand cells: planned in seconds, scheduled in milliseconds each. Processor time is counted, as
other work on the machine is not ours.
"""

import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import pytest

from harness.domain.check import Check, Samples, StageName
from harness.domain.machine import Tier
from harness.evidence.run_folder import open_run
from harness.pipeline import Progress, _run_stage
from harness.planner import CodeDigests, make_plan
from harness.stages.sweep import planning
from harness.stages.sweep.planning import Grid, Sweep
from tests.fakes.requests import plan_request

CELLS = 20_032


class Instant:
    """An executor that needs no time of its own."""

    def stream(
        self, checks: Sequence[Check], side_by_side: int, on_begin: Callable[[str], None]
    ) -> Generator[tuple[Check, Samples], None, None]:
        for check in checks:
            on_begin(check.id)
            yield check, Samples(check=check.id, tier=Tier.SMOKE, ended="crashed", detail="at once")

    def close(self) -> None: ...


def test_twenty_thousand_cells_are_planned_in_5_s_and_cost_5_ms_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = Grid(batch=tuple(range(1, 65)), context=tuple(range(64, 2568, 8)))
    sweep = Sweep(name="big", level="step", phase="decode", smoke=grid, full=grid)
    (tmp_path / "big.yaml").touch()
    monkeypatch.setattr(planning, "load_sweep", lambda _path: sweep)
    monkeypatch.setattr(planning, "data_folder", lambda _name: tmp_path)
    begun = time.process_time()
    plan = make_plan(plan_request(), CodeDigests("a" * 64, "b" * 64), "0123456789abcdef", (StageName.SWEEP,))
    assert len(plan.checks) == CELLS
    assert time.process_time() - begun < 5.0
    few = plan.model_copy(update={"checks": plan.checks[:500]})
    with open_run(tmp_path / "run", few) as run:
        progress = Progress(say=lambda *_: None)
        progress.begin(few.checks)
        begun = time.process_time()
        _run_stage(few, run, progress, few.checks, Instant(), 1)
        assert (time.process_time() - begun) / 500 < 0.005
        assert len(run.outcomes()) == 500
