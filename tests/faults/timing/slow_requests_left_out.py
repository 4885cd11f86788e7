"""The slowest requests of a served run are left out of its times, and of nothing else."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from harness.domain.faults import Sighting
from harness.engines import bench_serve
from harness.engines.bench_serve import ORDER, BenchRun, Load, row_of
from harness.engines.served import ServedArm, ServerSettings
from harness.faults.bench import Bench
from harness.faults.fault import Fault
from tests.faults.planting import wrapped

LOAD = Load(concurrency=2, requests_each=8, output_tokens=5)
SETTINGS = ServerSettings(model="m", served_name="m", optimised=ServedArm(arguments=("--fast",)))


def quick_ones(sound: Any, told: Mapping[str, Any]) -> tuple[float, ...]:
    times = sound(told)
    return tuple(us for us in times if us < 2 * min(times))


@dataclass(frozen=True, slots=True)
class ServedScene:
    """Three runs as the load generator tells them, put together by the real code; every fourth answer of the
    optimised server stalls.
    """

    def look(self, bench: Bench, is_repaired: bool) -> Iterable[Sighting]:
        """What becomes of the load's row."""
        around = (lambda sound, told: sound(told)) if is_repaired else quick_ones
        with wrapped("harness.engines.bench_serve:_token_times", around):
            row = row_of(SETTINGS, LOAD, [_run(turn, arm) for turn, arm in enumerate(ORDER)])
        status = "PASS" if row.status == "measured" else row.status
        return (Sighting(column="sweep", subject="bench serve", status=status, words=row.words),)


def _run(turn: int, arm: str) -> BenchRun:
    stalls = dict.fromkeys(range(0, 16, 4), 0.02) if arm == "optimised" else {}
    told = {"itls": [[stalls.get(place, 0.002)] * 4 for place in range(16)]}
    return BenchRun.model_validate({
        "arm": arm, "turn": turn, "load": LOAD, "completed": 16, "failed": 0, "reached": 2, "prefix_hits": 0,
        "output_tokens": 80, "tpot_us": bench_serve._token_times(told), "ttft_ms": 1,
        "output_tokens_per_s": 1,
    })  # fmt: skip


FAULT = Fault(
    name="slow_requests_left_out",
    title="The slowest requests of a served run are left out of its times, and of nothing else.",
    report="SemiAnalysisAI/InferenceX#357",
    target="timing",
    expected="sweep",
    scene=ServedScene(),
)
