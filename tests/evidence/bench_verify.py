"""How long verifying takes and how much memory: `python -m tests.evidence.bench_verify SHAPE...`.

Makes a real bundle of each shape in a temporary folder and verifies it in a fresh process, with the example's
judge and planner, so that what is measured is verifying and not what stages compute. Prints one line a shape:
files, bytes, seconds of CPU and of the clock, and the peak of resident memory. No test: machines differ.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from harness.domain.check import Check, Outcome, Samples, SampleTable, StageName, Status
from harness.domain.plan import Plan
from harness.evidence.bundle import write_bundle
from harness.evidence.run_folder import open_run
from harness.evidence.verify import verify
from tests.evidence.example_judge import judge
from tests.evidence.example_run import as_planned, example_plan, example_samples

__all__ = ["SHAPES", "Shape", "make_bundle", "main", "swollen"]


class Shape(NamedTuple):
    """A bundle of so many checks; every `sampled`-th has samples, with timing tables of `rows` rows."""

    checks: int
    sampled: int = 1
    rows: int = 0


SHAPES = {
    "thousand-files": Shape(340),
    "planned-20000": Shape(20_000, sampled=20),
    "sampled-20000": Shape(20_000),
    "two-gigabytes": Shape(170, rows=450_000),
}


def make_bundle(folder: Path, shape: Shape) -> Path:
    """Write one bundle of the example's sampled checks, each as often as the shape needs."""
    plan = _plan(shape.checks, shape.sampled)
    with open_run(folder, plan) as run:
        for place, check in enumerate(plan.checks):
            if place % shape.sampled:
                run.record(_skipped(check, plan), None)
                continue
            samples = swollen(example_samples(check, plan.tier, "passing"), shape.rows)
            run.record(judge(check, samples), samples)
        return write_bundle(run)


def swollen(samples: Samples, rows: int) -> Samples:
    """Samples whose tables repeat to so many rows, with numbers that differ so that they stay large."""
    if not rows:
        return samples
    return samples.model_copy(update={"tables": tuple(_repeated(t, rows) for t in samples.tables)})


def _repeated(table: SampleTable, rows: int) -> SampleTable:
    def spread(value: object, n: int) -> object:
        return value * (1.0 + n * 1e-9) if isinstance(value, float) else value

    source = table.rows or ((0,) * len(table.columns),)
    made = tuple(tuple(spread(v, n) for v in source[n % len(source)]) for n in range(rows))
    return SampleTable.model_construct(name=table.name, columns=table.columns, rows=made)


def _plan(count: int, sampled: int) -> Plan:
    plan = example_plan(scene="passing")
    kept = [c for c in plan.checks if c.unavailable is None and c.stage is not StageName.ISOLATION]
    checks = tuple(
        kept[n % len(kept)].model_copy(
            update={
                "id": f"{kept[n % len(kept)].id}-{n}", "unavailable": "needs a GPU" if n % sampled else None,
            }
        )
        for n in range(count)
    )  # fmt: skip
    return plan.model_copy(update={"checks": checks})


def _skipped(check: Check, plan: Plan) -> Outcome:
    return Outcome(
        check=check.id, status=Status.SKIPPED, tier=plan.tier, summary="needs a GPU", next_step="run it there"
    )


def _measure(folder: Path) -> dict[str, object]:
    """Verify once, in this process."""
    begun, cpu = time.perf_counter(), time.process_time()
    result = verify(folder, judge, as_planned)
    return {
        "state": result.state.value,
        "seconds": round(time.perf_counter() - begun, 2),
        "cpu_s": round(time.process_time() - cpu, 2),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "problems": [p.message for p in result.problems[:2]],
    }


def _sizes(folder: Path) -> Iterator[int]:
    return (path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main(argv: list[str] | None = None) -> int:
    """Make, verify in a child, print."""
    parser = argparse.ArgumentParser(prog="python -m tests.evidence.bench_verify", description=__doc__)
    parser.add_argument("shapes", nargs="*", help=", ".join(SHAPES))
    parser.add_argument("--folder", type=Path, help="verify this bundle instead, in this process")
    asked = parser.parse_args(argv)
    if asked.folder is not None:
        sys.stdout.write(json.dumps(_measure(asked.folder)) + "\n")
        return 0
    for name in asked.shapes:
        with tempfile.TemporaryDirectory() as scratch:
            folder = make_bundle(Path(scratch) / "bundle", SHAPES[name])
            sizes = list(_sizes(folder))
            command = [sys.executable, "-m", "tests.evidence.bench_verify", "--folder", str(folder)]
            found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
            sys.stdout.write(f"{name}: {len(sizes)} files, {sum(sizes) / 2**20:.0f} MiB, {found}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
