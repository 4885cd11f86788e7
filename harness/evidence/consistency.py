"""Steps 5, 6, 8 and 9 of verifying: what the files say is what the plan asks, and samples are its own."""

import os

from harness.domain.bundle import ChangeReference, Environment
from harness.domain.check import Check, Outcome, StageName, Status
from harness.domain.errors import EvidenceError
from harness.domain.machine import Gpu
from harness.domain.plan import Plan
from harness.domain.record import canonical_bytes, sha256_hex
from harness.evidence.integrity import Notes, Work
from harness.evidence.names import (
    ENVIRONMENT,
    MANIFEST,
    OUTCOMES,
    PLAN,
    SAMPLES,
    SAMPLES_HEADER,
    samples_folder,
)
from harness.evidence.reader import MAX_ENVIRONMENT_BYTES, iterate_outcomes
from harness.evidence.run_folder import MAX_PLAN_BYTES
from harness.evidence.samples import read_header
from harness.evidence.strict_json import load_record, parse_json, read_bounded

__all__ = [
    "check_binding",
    "check_outcomes",
    "check_samples",
    "check_schemas",
    "has_planned_gpus",
]

STAGES = list(StageName)


def check_schemas(work: Work, notes: Notes) -> None:
    """Step 5."""
    is_finished = work.manifest is not None
    for name in (PLAN, OUTCOMES, ENVIRONMENT):
        if name not in work.sizes:
            (notes.wrong if is_finished else notes.lacks)(name, "is not there")
    try:
        if PLAN in work.sizes:
            work.plan = load_record(work.folder / PLAN, Plan, MAX_PLAN_BYTES)
            work.parts = _digests_as_written(read_bounded(work.folder / PLAN, MAX_PLAN_BYTES))
        if ENVIRONMENT in work.sizes:
            load_record(work.folder / ENVIRONMENT, Environment, MAX_ENVIRONMENT_BYTES)
        if OUTCOMES in work.sizes:
            work.outcomes = list(iterate_outcomes(work.folder, is_finished))
    except EvidenceError as error:
        notes.wrong("", str(error).replace(f"{work.folder}{os.sep}", ""))
    notes.looked_at = 2 + len(work.outcomes)


def check_binding(work: Work, notes: Notes) -> None:
    """Step 6."""
    plan, manifest = work.plan, work.manifest
    if plan is None:
        notes.skipped = "there is no plan yet"
        return
    notes.looked_at = len(plan.checks)
    if manifest is not None:
        bound = {
            **work.parts,
            "harness_digest": plan.harness_digest,
            "harness_version": plan.harness_version,
            "pack": plan.pack,
            "pack_digest": plan.pack_digest,
            "tier": plan.tier,
            "change": ChangeReference.of(plan.change),
        }
        for name, value in bound.items():
            if getattr(manifest, name) != value:
                notes.wrong(MANIFEST, f"{name} is not the plan's: the parts come from different runs")
        if not has_planned_gpus(plan.machine.gpus, manifest.machine.gpus):
            notes.wrong(MANIFEST, "machine has other GPUs than the plan was made for")
    for check in plan.checks:
        proof = plan.policy.proof(check.stage)
        if proof is None:
            notes.wrong(check.id, f"is of stage {check.stage}, for which the policy asks no proof")
            continue
        asked = dict(proof.thresholds)
        for threshold in check.thresholds:
            if threshold.name in asked and threshold.value != asked[threshold.name]:
                notes.wrong(check.id, f"threshold {threshold.name} is not the policy's")


def has_planned_gpus(planned: tuple[Gpu, ...], here: tuple[Gpu, ...]) -> bool:
    """Whether a machine is of the kind a plan was made for; as for a worker, further GPUs are no fault."""
    return here[: len(planned)] == planned if planned else not here


def check_outcomes(work: Work, notes: Notes) -> None:
    """Step 8."""
    if work.plan is None:
        notes.skipped = "there is no plan yet"
        return
    order = {c.id: place for place, c in enumerate(work.plan.checks)}
    seen: set[str] = set()
    places: list[int] = []
    for outcome in work.outcomes:
        notes.looked_at += 1
        if outcome.check not in order:
            notes.wrong(outcome.check, "has an outcome but is not in the plan")
            continue
        if outcome.check in seen:
            notes.wrong(outcome.check, "has two outcomes")
        if outcome.tier is not work.plan.tier:
            notes.wrong(outcome.check, f"is of tier {outcome.tier}, the plan of {work.plan.tier}")
        seen.add(outcome.check)
        places.append(order[outcome.check])
    if work.manifest is not None and places != sorted(places):
        notes.wrong(OUTCOMES, "is not in plan order")
    for check in work.plan.checks:
        if check.id not in seen:
            notes.lacks(check.id, "is planned and has no outcome")


def check_samples(work: Work, notes: Notes) -> None:
    """Step 9."""
    plan = work.plan
    if plan is None:
        notes.skipped = "there is no plan yet"
        return
    checks = {c.id: c for c in plan.checks}
    owners: dict[str, Outcome] = {samples_folder(o.check): o for o in work.outcomes}
    held: dict[str, set[str]] = {}
    stopped = _first_stop(work.outcomes, checks)
    for name in work.sizes:
        if name.startswith(f"{SAMPLES}/"):
            held.setdefault(_sample_folder(name), set()).add(name)
    for folder in sorted(set(held) - set(owners)):
        if work.manifest is not None:
            notes.wrong(folder, "holds samples of no outcome")
    for folder, outcome in owners.items():
        notes.looked_at += 1
        check = checks.get(outcome.check)
        if f"{folder}/{SAMPLES_HEADER}" not in work.sizes:
            if check is not None:
                _require_skipped(check, outcome, stopped, notes)
            continue
        try:
            header = read_header(work.folder, outcome.check)
        except EvidenceError as error:
            notes.wrong(outcome.check, str(error).replace(f"{work.folder}{os.sep}", ""))
            continue
        if header.tier is not outcome.tier:
            notes.wrong(outcome.check, f"outcome is of tier {outcome.tier}, its samples of {header.tier}")
        if header.plan is None:
            work.unbound.add(outcome.check)
        elif header.plan != work.parts["plan_digest"]:
            notes.wrong(outcome.check, f"its samples answer another plan ({header.plan[:12]})")
        files = {f"{folder}/{name}.parquet" for name in header.tables} | {f"{folder}/{SAMPLES_HEADER}"}
        for name in sorted(files ^ held.get(folder, set())):
            notes.wrong(name, "and the samples' header do not name the same tables")


def _first_stop(outcomes: list[Outcome], checks: dict[str, Check]) -> int:
    """Place of the first stage that may have stopped the run; after all stages where none may."""
    blocking = (
        STAGES.index(checks[o.check].stage)
        for o in outcomes
        if o.status not in (Status.PASS, Status.SKIPPED) and o.check in checks
    )
    return min(blocking, default=len(STAGES))


def _require_skipped(check: Check, outcome: Outcome, stopped: int, notes: Notes) -> None:
    """An outcome without samples: SKIPPED, empty, and for a reason that the plan or an earlier stage
    gives.
    """
    if outcome.status is not Status.SKIPPED or outcome.figures or outcome.findings or outcome.control:
        notes.wrong(outcome.check, f"is {outcome.status} but has no samples")
    elif check.unavailable is None and STAGES.index(check.stage) <= stopped:
        notes.wrong(
            outcome.check, "is SKIPPED, but the plan could run it here and no earlier stage stopped the run"
        )


def _digests_as_written(raw: bytes) -> dict[str, str]:
    """Digests of a plan and its parts as the manifest binds them. A record that has grown a field since
    would give others.
    """
    parts = parse_json(raw)
    return {
        "plan_digest": sha256_hex(raw),
        "claim_digest": sha256_hex(canonical_bytes(parts["claim"])),
        "policy_digest": sha256_hex(canonical_bytes(parts["policy"])),
    }


def _sample_folder(name: str) -> str:
    return "/".join(name.split("/")[:2])
