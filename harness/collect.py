"""The second half of a worker's run: judge its samples here and fill the run folder.

Samples are bound to the plan by its digest and to the code by the digests in the worker's header; the plan is
bound to the code that judges here. Checks that the worker could not run (isolation, audit) are left for
`pipeline.execute`, which repeats nothing that is already judged.
"""

from pathlib import Path

from harness.domain.errors import EvidenceError
from harness.domain.plan import Plan
from harness.engines.packs import harness_digest, load_pack, pack_digest
from harness.evidence.run_folder import RunFolder
from harness.pipeline import judge_samples
from harness.worker import WorkerHeader, read_samples

__all__ = ["collect_samples"]


def collect_samples(plan: Plan, samples_file: Path, run: RunFolder) -> tuple[WorkerHeader, int]:
    """Judge a worker's samples into the run folder; gives the worker's header and how many checks were
    judged.

    Raises `EvidenceError` for samples of another plan, of a check that the plan lacks, or of one check twice,
    for samples that cannot be judged, and where the plan was made with other code than is here.
    """
    _require_own_code(plan)
    header, all_samples = read_samples(samples_file, plan)
    checks = {check.id: check for check in plan.checks}
    finished = run.finished()
    seen: set[str] = set()
    for samples in all_samples:
        if samples.check not in checks or samples.check in seen:
            raise EvidenceError(
                f"{samples_file}: samples of {samples.check!r} are "
                f"{'doubled' if samples.check in seen else 'not in the plan'}"
                "; the file was edited or belongs to another plan"
            )
        if samples.tier is not plan.tier:
            raise EvidenceError(
                f"{samples_file}: samples of {samples.check} say tier {samples.tier}, and the plan is of "
                f"tier {plan.tier}; the file was edited"
            )
        seen.add(samples.check)
        if samples.check not in finished:
            clean = run.clean(samples)
            run.record(judge_samples(plan, checks[clean.check], clean), clean)
    return header, len(seen)


def _require_own_code(plan: Plan) -> None:
    """Another harness may judge otherwise, and another pack be audited in place of the planned one; the
    bundle would say neither.
    """
    for what, planned, here in (
        ("harness", plan.harness_digest, harness_digest()),
        ("pack", plan.pack_digest, pack_digest(load_pack(plan.pack))),
    ):
        if planned != here:
            raise EvidenceError(
                f"the plan was made with {what} {planned[:12]}, and the {what} here is {here[:12]}; collect "
                "with the checkout that made the plan, or plan and sample again with this one"
            )
