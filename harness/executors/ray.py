"""Sampling on a Ray cluster: a lane is an actor on one node, a check is one call of it.

Retried is what the infrastructure broke: a lane or a node that is gone, never a child that crashed (an
observation) and never our own fault. A check is given to the caller once, by whichever lane answered for it;
answers of lanes that were given up are never read. Nodes that are not the plan's kind of machine get no
check, and `nodes.jsonl` in the logs says so, as it says which node gave which check. With no address a
cluster is started on this machine, which ends with the executor.
"""

import json
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.domain.check import Check, Samples
from harness.domain.errors import DeviceMissing, InputError
from harness.executors.local import HarnessFault
from harness.executors.ray_lane import CHILD_LOG, Answer, Lane, LaneSetup, clear_left

__all__ = ["NODES", "ClusterWork", "RayExecutor"]

NODES = "nodes.jsonl"
TRIES = 3
"""Lanes that one check may lose before the infrastructure, and so the run, is given up."""
RESCAN_S = 2.0
"""How often nodes that came or went are looked for."""
PATIENCE_S = 60.0
"""How long no lane may be there, or be on its way, before the run is given up."""


@dataclass(frozen=True, slots=True)
class ClusterWork:
    """What the driver asks of a cluster, and where it keeps what nodes send."""

    plan: bytes
    setup: LaneSetup
    gpus: Callable[[Check], int]
    """GPUs of one node that a check needs."""
    logs: Path
    ledger: Path
    say: Callable[[str], None]


@dataclass(slots=True, eq=False)
class _Lane:
    """The driver's side of a lane."""

    actor: Any
    node: str
    """Node id of Ray; empty where a placement group chose the node."""
    group: Any = None
    check: Check | None = None
    is_open: bool = False


@dataclass(slots=True)
class _Round:
    """One stream: checks that need equally many GPUs."""

    gpus: int
    side_by_side: int
    waiting: deque[Check]
    lanes: list[_Lane] = field(default_factory=list)
    flights: dict[Any, _Lane] = field(default_factory=dict)
    lost: Counter[str] = field(default_factory=Counter)
    scanned: float = 0.0
    alone_since: float | None = None
    fault: str = ""


class RayExecutor:
    """See `lanes.Executor`."""

    def __init__(self, address: str | None, work: ClusterWork) -> None:
        self._ray = _import_ray()
        self._work = work
        self._names: dict[str, str] = {}
        self._refused: dict[str, tuple[str, ...]] = {}
        self._is_ours = not self._ray.is_initialized()
        if self._is_ours:
            _connect(self._ray, address)
        self._plan = self._ray.put(work.plan)
        self._actor = self._ray.remote(Lane)

    def stream(
        self, checks: Sequence[Check], side_by_side: int, on_begin: Callable[[str], None]
    ) -> Generator[tuple[Check, Samples], None, None]:
        """See `Executor`; checks that need equally many GPUs run together."""
        for gpus in sorted({self._work.gpus(check) for check in checks}):
            mine = deque(check for check in checks if self._work.gpus(check) == gpus)
            one = _Round(gpus, side_by_side, mine)
            try:
                yield from self._streamed(one, on_begin)
            finally:
                for lane in tuple(one.lanes):
                    self._drop(one, lane)

    def close(self) -> None:
        """Leave the cluster; one that was started here ends."""
        if self._is_ours:
            self._ray.shutdown()
            clear_left()

    def _streamed(
        self, one: _Round, on_begin: Callable[[str], None]
    ) -> Generator[tuple[Check, Samples], None, None]:
        while one.waiting or any(lane.check for lane in one.lanes):
            if one.fault and not any(lane.check for lane in one.lanes):
                break
            self._rescan(one)
            self._fill(one, on_begin)
            done, _ = self._ray.wait(list(one.flights), num_returns=1, timeout=RESCAN_S)
            for ref in done:
                lane = one.flights.pop(ref)
                found = self._landed(one, lane, ref)
                if found is not None:
                    yield found
        if one.fault:
            raise HarnessFault(one.fault)

    def _fill(self, one: _Round, on_begin: Callable[[str], None]) -> None:
        """Give every idle lane the next check."""
        for lane in one.lanes:
            if lane.is_open and lane.check is None and one.waiting and not one.fault:
                lane.check = one.waiting.popleft()
                on_begin(lane.check.id)
                one.flights[lane.actor.sample.remote(lane.check)] = lane

    def _landed(self, one: _Round, lane: _Lane, ref: Any) -> tuple[Check, Samples] | None:
        """What a lane answered: samples, or None where it opened, refused, broke or is gone."""
        try:
            answer = self._ray.get(ref)
        except self._ray.exceptions.RayTaskError as error:
            one.fault = f"a lane of the cluster broke: {str(error).strip().splitlines()[-1][:300]}"
            lane.check = None
            return None
        except self._ray.exceptions.RayError as error:
            self._lost(one, lane, error)
            return None
        if not lane.is_open:
            self._opened(one, lane, answer)
            return None
        check, lane.check = lane.check, None
        if check is None:
            raise AssertionError("a lane answered without a check")
        self._keep(answer)
        if answer.fault:
            one.fault = answer.fault
            return None
        self._note(node=self._name(lane.node), check=check.id, attempt=one.lost[check.id] + 1)
        return check, Samples.model_validate_json(answer.samples)

    def _opened(self, one: _Round, lane: _Lane, refused: tuple[str, ...]) -> None:
        if not refused:
            lane.is_open = True
            self._note(node=self._name(lane.node), event="joined")
            return
        if lane.node not in self._refused:
            self._note(node=self._name(lane.node), event="refused", differs=list(refused))
            self._work.say(f"{self._name(lane.node)} is another machine than planned: {'; '.join(refused)}")
        self._refused[lane.node] = refused
        self._drop(one, lane)

    def _lost(self, one: _Round, lane: _Lane, error: Exception) -> None:
        """A lane is gone: its check waits again, first of all."""
        words = type(error).__name__
        self._note(node=self._name(lane.node), event="lost", error=words)
        check = lane.check
        self._drop(one, lane)
        one.scanned = 0.0
        if check is None:
            return
        one.lost[check.id] += 1
        self._work.say(f"{self._name(lane.node)} was lost ({words}); {check.id} waits again")
        if one.lost[check.id] >= TRIES:
            one.fault = (
                f"{check.id} lost its process on the cluster {TRIES} times ({words}), so nothing was learned "
                "about the candidate; finished checks are kept and --resume goes on after a repair"
            )
        else:
            one.waiting.appendleft(check)

    def _rescan(self, one: _Round) -> None:
        """Open lanes on nodes that have too few of them; give up where none can be."""
        now = time.monotonic()
        if now - one.scanned >= RESCAN_S:
            one.scanned = now
            wanted = _wanted(self._ray.nodes(), one.gpus, one.side_by_side)
            for node in (n for n, count in wanted.items() for _ in range(count)):
                mine = sum(lane.node == node for lane in one.lanes)
                if mine < wanted[node] and node not in self._refused and len(one.lanes) < self._useful(one):
                    self._open(one, node)
        if one.lanes:
            one.alone_since = None
            return
        one.alone_since = one.alone_since or now
        if self._refused and set(self._refused) >= set(_wanted(self._ray.nodes(), one.gpus, 1)):
            words = "; ".join(sorted({w for found in self._refused.values() for w in found}))
            raise DeviceMissing(
                f"no node of the cluster is the machine that the plan was made for ({words}); plan for these "
                "nodes (`fasttrack doctor --json` there, then `fasttrack plan --machine FILE`), or give an "
                "address of a cluster of the planned kind"
            )
        if now - one.alone_since > PATIENCE_S:
            raise HarnessFault(
                f"no node of the cluster had a CPU and {one.gpus} GPUs for {PATIENCE_S:.0f} s; finished "
                "checks are kept and --resume goes on when one has"
            )
        time.sleep(0.1)

    def _useful(self, one: _Round) -> int:
        return len(one.waiting) + sum(lane.check is not None for lane in one.lanes)

    def _open(self, one: _Round, node: str) -> None:
        from ray.util.scheduling_strategies import (
            NodeAffinitySchedulingStrategy,
            PlacementGroupSchedulingStrategy,
        )

        group, where = None, NodeAffinitySchedulingStrategy(node, soft=False)
        if one.gpus > 1:
            # One bundle: the GPUs of a cell are one node's, and all or none are taken.
            group = self._ray.util.placement_group(
                [{"CPU": 1, "GPU": one.gpus}], strategy="STRICT_PACK",
                bundle_label_selector=[{"ray.io/node-id": node}],
            )  # fmt: skip
            where = PlacementGroupSchedulingStrategy(placement_group=group)
        actor = self._actor.options(
            num_cpus=1, num_gpus=one.gpus, max_restarts=0, max_task_retries=0, scheduling_strategy=where
        ).remote(self._plan, self._work.setup)
        lane = _Lane(actor, node, group)
        one.lanes.append(lane)
        one.flights[actor.refuses.remote()] = lane

    def _drop(self, one: _Round, lane: _Lane) -> None:
        """End a lane; what it may still answer is not read."""
        one.lanes.remove(lane)
        for ref in [ref for ref, owner in one.flights.items() if owner is lane]:
            del one.flights[ref]
        try:
            if lane.check is None and (lane.is_open or lane.node in self._refused):
                self._ray.get(lane.actor.close.remote(), timeout=5.0)
        except self._ray.exceptions.RayError:
            pass  # it is gone, or will be
        self._ray.kill(lane.actor)
        if lane.group is not None:
            self._ray.util.remove_placement_group(lane.group)

    def _keep(self, answer: Answer) -> None:
        """Put what a node sent beside this machine's own; names only, so that none leads elsewhere."""
        for folder, name, content in answer.files:
            place = (self._work.ledger if folder == "ledger" else self._work.logs) / Path(name).name
            with place.open("ab" if name == CHILD_LOG else "wb") as file:
                file.write(content)

    def _name(self, node: str) -> str:
        """A node by its turn: addresses and host names stay out of bundles."""
        return self._names.setdefault(node, f"node {len(self._names) + 1}")

    def _note(self, **fields: object) -> None:
        with (self._work.logs / NODES).open("a", encoding="utf-8") as file:
            file.write(json.dumps(fields) + "\n")


def _wanted(nodes: Sequence[dict[str, Any]], gpus: int, side_by_side: int) -> dict[str, int]:
    """Lanes by node id: one a node where checks want quiet; else one a set of GPUs, or so many beside each
    other as asked.
    """
    found = {}
    for node in nodes:
        has = node["Resources"]
        cpus, has_gpus = int(has.get("CPU", 0)), int(has.get("GPU", 0))
        if node["Alive"] and cpus >= 1 and has_gpus >= gpus:
            most = 1 if side_by_side == 1 else has_gpus // gpus if gpus else side_by_side
            found[str(node["NodeID"])] = min(most, cpus)
    return found


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise InputError(
            "--executor ray needs Ray, which is not installed here: `pip install 'fasttrack[ray]'`, or "
            "--executor local"
        ) from error
    return ray


def _connect(ray: Any, address: str | None) -> None:
    """Join the cluster at an address, or start one here."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet = {"log_to_driver": False, "configure_logging": False}
    try:
        if address is None:
            ray.init(address="local", include_dashboard=False, **quiet)
        else:
            ray.init(address=address, **quiet)
    except Exception as error:  # what Ray raises where a node does not come up
        raise DeviceMissing(
            f"no Ray cluster answers at {address or 'this machine'} "
            f"({str(error).strip().splitlines()[0][:200]}); start one (`ray start --head`), or leave "
            "--address out to have one on this machine"
        ) from error
