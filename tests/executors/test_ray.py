"""A real cluster of two nodes on this machine: nothing is lost and nothing counts twice, whatever dies."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import pipeline
from harness.domain.check import Check, Outcome, Samples, StageName, Status
from harness.domain.errors import DeviceMissing
from harness.domain.machine import Tier
from harness.domain.plan import Plan
from harness.evidence.run_folder import open_run
from harness.executors.local import HarnessFault
from harness.executors.ray import NODES, ClusterWork, RayExecutor
from harness.executors.ray_lane import LaneSetup
from harness.pipeline import Cluster, Progress, execute
from harness.planner import CodeDigests, make_plan
from tests.fakes.requests import plan_request

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'fasttrack[ray]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own; it also leaves sockets to the collector
ROOT = Path(__file__).parents[2]
CHILD = """
import json, os, sys, time
folder, delay = sys.argv[1], float(sys.argv[2])
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    check = line.strip()
    with open(os.path.join(folder, "begun"), "a") as file:
        file.write(f"{check} {os.getpid()} {os.readlink('/proc/self/ns/pid')}\\n")
    if check.endswith("crash"):
        os._exit(3)
    if check.endswith("fault"):
        print(json.dumps({"fault": "ZeroDivisionError"}), flush=True)
        continue
    time.sleep(delay)
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    print(json.dumps({"samples": {"check": check, "tier": "smoke", "detail": seen}}), flush=True)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """The driver's node, which has two GPUs on paper, and one beside it."""
    from ray.cluster_utils import Cluster as RayCluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    made = RayCluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 2, "num_gpus": 2, "include_dashboard": False,
            "_system_config": {"health_check_period_ms": 500, "health_check_failure_threshold": 2},
        },
    )  # fmt: skip
    made.add_node(num_cpus=2)
    ray.init(address=made.address, log_to_driver=False, configure_logging=False)
    yield made
    ray.shutdown()
    made.shutdown()


def _checks(*names: str) -> list[Check]:
    return [Check(id=f"sweep/{name}", stage=StageName.SWEEP, proves="it holds", cost_s=1.0) for name in names]


def _work(
    folder: Path, delay: float, objections: Callable[[bytes], tuple[str, ...]] = lambda _: (), gpus: int = 0
) -> ClusterWork:
    child = folder / "child.py"
    child.write_text(CHILD)

    def lay_out(_plan: bytes, _folder: Path) -> Path:
        return child

    def command(job: Path) -> tuple[str, ...]:
        return (sys.executable, str(job), str(job.parent), str(delay))

    setup = LaneSetup(Tier.SMOKE, lay_out, command, objections, False)
    return ClusterWork(b"{}", setup, lambda _: gpus, folder, folder, lambda _: None)


def _begun(folder: Path, at_least: int = 1) -> list[list[str]]:
    """(check, child, its processes' namespace) of every check that a child began, once there are so many."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        if (folder / "begun").exists():
            found = [line.split() for line in (folder / "begun").read_text().splitlines()]
            if len(found) >= at_least:
                return found
        time.sleep(0.02)
    raise AssertionError("no check began in time")


def _notes(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / NODES).read_text().splitlines()]


def _streamed(work: ClusterWork, checks: list[Check], side_by_side: int = 1) -> list[Samples]:
    executor = RayExecutor(None, work)
    return [samples for _, samples in executor.stream(checks, side_by_side, lambda _: None)]


def test_checks_are_spread_over_both_nodes_and_each_is_given_once(cluster: Any, tmp_path: Path) -> None:
    checks = _checks(*(f"cell{i}" for i in range(8)))
    found = _streamed(_work(tmp_path, 0.3), checks)
    assert sorted(s.check for s in found) == sorted(c.id for c in checks)
    assert {note["node"] for note in _notes(tmp_path) if "check" in note} == {"node 1", "node 2"}


def test_a_lane_that_is_killed_loses_nothing_and_counts_nothing_twice(cluster: Any, tmp_path: Path) -> None:
    checks = _checks(*(f"cell{i}" for i in range(6)))
    victims: list[list[str]] = []

    def kill() -> None:
        victims.append(_begun(tmp_path, 3)[-1])
        os.kill(_lane_of(_seen_from_here(*victims[0][1:])), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    found = [samples.check for samples in _streamed(_work(tmp_path, 1.5), checks)]
    killer.join()
    victim = victims[0]
    assert sorted(found) == sorted(c.id for c in checks)
    again = [note for note in _notes(tmp_path) if note.get("attempt") == 2]
    assert [note["check"] for note in again] == [victim[0]]
    assert _is_gone(*victim[1:])


def test_a_child_that_crashes_is_an_observation_and_is_not_tried_again(cluster: Any, tmp_path: Path) -> None:
    (samples,) = _streamed(_work(tmp_path, 0.0), _checks("crash"))
    assert samples.ended == "crashed"
    assert "exit code 3" in samples.detail
    assert len(_begun(tmp_path)) == 1


def test_a_fault_of_the_harness_on_a_node_ends_the_stream_after_what_was_in_flight(
    cluster: Any, tmp_path: Path
) -> None:
    executor, names = RayExecutor(None, _work(tmp_path, 0.2)), ("a", "fault", "c", "d", "e")
    found: list[str] = []
    with pytest.raises(HarnessFault, match="ZeroDivisionError"):
        found.extend(s.check for _, s in executor.stream(_checks(*names), 1, lambda _: None))
    assert "sweep/e" not in found


def test_a_node_that_is_another_machine_gets_no_check_and_is_recorded(cluster: Any, tmp_path: Path) -> None:
    first = next(n["NodeID"] for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU"))

    def objections(_plan: bytes) -> tuple[str, ...]:
        import ray

        is_it = ray.get_runtime_context().get_node_id() == first
        return ("driver: '570' here, '580' planned",) if is_it else ()

    found = _streamed(_work(tmp_path, 0.1, objections), _checks("a", "b", "c"))
    assert len(found) == 3
    (refused,) = [note for note in _notes(tmp_path) if note.get("event") == "refused"]
    assert refused["differs"] == ["driver: '570' here, '580' planned"]
    assert refused["node"] not in {note["node"] for note in _notes(tmp_path) if "check" in note}


def test_a_cluster_of_other_machines_only_is_a_missing_device(cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(DeviceMissing, match="other clocks"):
        _streamed(_work(tmp_path, 0.0, lambda _: ("other clocks",)), _checks("a"))


def test_a_cell_of_two_gpus_gets_both_of_one_node(cluster: Any, tmp_path: Path) -> None:
    (samples,) = _streamed(_work(tmp_path, 0.0, gpus=2), _checks("a"))
    assert samples.detail == "0,1"


def _plan() -> Plan:
    request = plan_request()
    return make_plan(
        request, CodeDigests("a" * 64, "b" * 64), "0123456789abcdef", (StageName.COVERAGE,), ("mix",)
    )


def _outcomes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, where: Cluster | None
) -> list[tuple[str, str, str]]:
    def command(job: Path) -> tuple[str, ...]:
        return ("env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "tests.fakes.serve", str(job), "honest")

    monkeypatch.setattr(pipeline, "serve_command", command)
    monkeypatch.setattr(pipeline, "node_objections", lambda _plan: ())
    with open_run(folder / "run", _plan()) as run:
        execute(run.plan, run, None, folder / "cache", Progress(say=lambda *_: None), True, where)
        assert "sandbox: " in (run.logs / "child.log").read_text()
        return [(o.check, o.status.value, o.summary) for o in run.outcomes()]


def test_a_plan_gives_the_same_outcomes_here_and_on_a_cluster(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = _outcomes(tmp_path / "here", monkeypatch, None)
    there = _outcomes(tmp_path / "there", monkeypatch, Cluster(cluster.address))
    assert here == there
    assert len(there) == 1


DRIVER = """
import sys
from pathlib import Path
from tests.executors.test_ray import _run_cells
_run_cells(Path(sys.argv[1]), sys.argv[2])
"""


def _run_cells(folder: Path, address: str) -> None:
    """Run eight cells, or what is left of them."""
    checks = tuple(_checks(*(f"cell{i}" for i in range(8))))
    plan = _plan().model_copy(update={"checks": checks})
    with pytest.MonkeyPatch.context() as patch, open_run(folder / "run", plan) as run:
        patch.setattr(pipeline, "_cluster_work", lambda *_: _work(folder, 0.4))
        patch.setattr(pipeline, "judge_samples", _undecided)
        execute(plan, run, None, folder / "cache", Progress(say=lambda *_: None), True, Cluster(address))


def _undecided(_plan: Plan, check: Check, samples: Samples) -> Outcome:
    return Outcome(
        check=check.id, status=Status.INCONCLUSIVE, tier=samples.tier, summary="no times", next_step="none"
    )


def _recorded(folder: Path, at_least: int) -> list[str]:
    """Checks with an outcome on disk, once there are so many."""
    path, until = folder / "run" / "outcomes.jsonl", time.monotonic() + 120
    while time.monotonic() < until:
        lines = path.read_text().splitlines() if path.exists() else []
        if len(lines) >= at_least:
            return [json.loads(line)["check"] for line in lines]
        time.sleep(0.05)
    raise AssertionError("no outcome was recorded in time")


def test_a_run_whose_driver_died_goes_on_and_repeats_no_finished_check(cluster: Any, tmp_path: Path) -> None:
    with (tmp_path / "driver.log").open("wb") as log:
        driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(tmp_path), cluster.address], cwd=ROOT, stderr=log
        )
    _recorded(tmp_path, 2)
    driver.kill()
    driver.wait()
    finished = _recorded(tmp_path, 2)
    assert all(_is_gone(child, space) for _, child, space in _begun(tmp_path))
    _run_cells(tmp_path, cluster.address)
    recorded = _recorded(tmp_path, 8)
    assert sorted(recorded) == [f"sweep/cell{i}" for i in range(8)]
    begun = [check for check, *_ in _begun(tmp_path)]
    assert [begun.count(check) for check in finished] == [1] * len(finished)


OPS = ("attn_res", "projection", "kda_step", "router", "experts", "mla_query", "mla_attend", "mla_value")
COMMAND = (sys.executable, "-c", "from harness.cli.main import entry; entry()", "run", "coverage")


@pytest.mark.slow
def test_a_command_whose_driver_was_killed_is_resumed_and_each_check_stands_once(
    cluster: Any, tmp_path: Path
) -> None:
    """The pack's own checks through the command line, from the first word to the bundle."""
    only = [word for op in OPS for word in ("--only", op)]
    where = ("--policy", "smoke", "--executor", "ray", "--address", cluster.address, "--allow-dirty")
    command = [*COMMAND, *only, *where, "--out", str(tmp_path / "run")]
    with (tmp_path / "driver.log").open("wb") as log:
        driver = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    _recorded(tmp_path, 1)
    driver.kill()
    driver.wait()
    before = (tmp_path / "run" / "outcomes.jsonl").read_text().splitlines()
    done = subprocess.run([*command, "--resume"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "run" / "outcomes.jsonl").read_text().splitlines()
    assert set(before) <= set(lines)  # in the plan's order at the end
    found = [json.loads(line) for line in lines]
    assert sorted(o["check"] for o in found) == sorted(f"coverage/poison/{op}" for op in OPS)
    assert {o["status"] for o in found} == {"PASS"}


def test_a_node_that_is_lost_loses_nothing_and_counts_nothing_twice(cluster: Any, tmp_path: Path) -> None:
    """Runs last: the cluster has one node from here on."""
    checks = _checks(*(f"cell{i}" for i in range(8)))

    def lose() -> None:
        _begun(tmp_path, 3)
        cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)

    loser = threading.Thread(target=lose)
    loser.start()
    found = [samples.check for samples in _streamed(_work(tmp_path, 0.5), checks)]
    loser.join()
    assert sorted(found) == sorted(c.id for c in checks)
    assert "lost" in {note.get("event") for note in _notes(tmp_path)}


def _seen_from_here(child: str, space: str) -> int:
    """Number here of a process that knows its own number in the namespace of a box; 0 where it is gone."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "ns" / "pid") != space:
                continue
            status = (process / "status").read_text()
        except OSError:
            continue  # it ended meanwhile
        own = next(line.split()[-1] for line in status.splitlines() if line.startswith("NSpid:"))
        if own == child:
            return int(process.name)
    return 0


def _lane_of(pid: int) -> int:
    """The lane that a boxed child runs for: the nearest of its ancestors that Ray named."""
    while b"ray::" not in Path(f"/proc/{pid}/cmdline").read_bytes():
        status = Path(f"/proc/{pid}/status").read_text()
        pid = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("PPid:"))
        assert pid > 1, "the child runs for no lane"
    return pid


def _is_gone(child: str, space: str) -> bool:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        if not _seen_from_here(child, space):
            return True
        time.sleep(0.05)
    return False
