"""Kernel checks outside of a run: planned on this machine, bound to no change."""

import tempfile
from functools import lru_cache
from pathlib import Path

from harness.documents import load_claim, load_policy_set
from harness.domain.change import Change
from harness.domain.check import Check
from harness.domain.pack import Pack
from harness.domain.stage import PlanRequest, StageContext
from harness.measure.machine import read_machine
from harness.stages import kernels

__all__ = ["context_of", "op_checks", "request_of"]


def request_of(pack: Pack, policy: str, seed: int, *, is_full: bool = False) -> PlanRequest:
    """What a stage plans from, with this machine and no change."""
    rules_of, zones, rules = load_policy_set(policy)
    machine = read_machine()
    return PlanRequest(
        pack=pack, claim=load_claim(pack.claim_file()), policy=rules_of, zones=zones, rules=rules,
        change=Change(repository="none", base="0" * 40, head="0" * 40), machine=machine,
        tier=machine.best_tier, is_full=is_full, seed=seed,
    )  # fmt: skip


def context_of(pack: Pack, policy: str) -> StageContext:
    """What sampling a kernel check needs; folders are temporary."""
    request = request_of(pack, policy, 0)
    folder = _folder()
    return StageContext(
        pack=pack, claim=request.claim, policy=request.policy, zones=request.zones, rules=request.rules,
        change=request.change, machine=request.machine, tier=request.tier, tree=None,
        cache=folder, logs=folder, ledger=folder, progress=lambda _text: None,
    )  # fmt: skip


def op_checks(request: PlanRequest, op: str, implementation: str) -> tuple[Check, ...]:
    """Checks of one op's implementation that this machine can run, the guard's left out."""
    return tuple(
        check
        for check in kernels.plan(request)
        if check.op == op
        and check.unavailable is None
        and check.parameter("implementation") == implementation
        and check.parameter("model") is not None
    )


@lru_cache(maxsize=1)
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="fasttrack-desk-"))
