"""Whether a bundle holds together, decided without trusting anything in it.

Ten steps, one function each:
1. tree: regular files and folders only, names that mean one thing everywhere, within the limits
2. manifest: canonical, of a known schema version, naming safe paths
3. listing: every file of the tree is listed, every listed file is there, each in a known place
4. digests: size and sha256 of every file, in pieces
5. schemas: plan, environment and every outcome parse as canonical records
6. binding: the manifest's digests, change and tier are the plan's; checks are what claim and policy call for
7. outcomes: each belongs to a planned check, once, in plan order; what has none is missing
8. samples: each outcome has its own samples, and nothing else has any
9. rederivation: each outcome judged again from its samples is the same
10. attestation: the signature, where there is one, is over this manifest

Needs no network, GPU or torch. A run without a manifest is incomplete, not broken: steps 3, 4 and 10 then
have nothing to compare with. Memory is bounded by the plan and one check's samples, whatever the bundle's
size.
"""

from collections.abc import Callable
from pathlib import Path

from harness.domain.bundle import BundleState, Problem, Verification, VerificationStep
from harness.domain.errors import EvidenceError
from harness.evidence.attestation import check_attestation
from harness.evidence.consistency import (
    check_binding,
    check_outcomes,
    check_rederivation,
    check_samples,
    check_schemas,
)
from harness.evidence.integrity import (
    Notes,
    Rejudge,
    Replan,
    Work,
    check_digests,
    check_listing,
    check_manifest,
    check_tree,
)
from harness.evidence.names import ATTESTATION

__all__ = ["Rejudge", "Replan", "verify"]

MAX_PROBLEMS = 50
"""Shown for each step; one more line says how many there are."""


def verify(folder: Path, rejudge: Rejudge | None = None, replan: Replan | None = None) -> Verification:
    """Verify the bundle in `folder`. Without `rejudge`, step 9 is skipped and the result says so."""
    work = Work(folder, rejudge, replan)
    steps: list[VerificationStep] = []
    for number, (name, step, _) in enumerate(_STEPS, 1):
        notes = Notes()
        if not any(s.problems for s in steps if not _STEPS[s.number - 1][2]):
            step(work, notes)
        else:
            notes.skipped = "an earlier step found the bundle unsafe or unreadable"
        steps.append(_record(number, name, notes))
    state = BundleState.VERIFIED
    if any(s.missing for s in steps):
        state = BundleState.INCOMPLETE
    if any(s.problems for s in steps):
        state = BundleState.BROKEN
    rederivation = steps[8]
    return Verification(
        state=state,
        bundle_digest=work.digest,
        signer=work.signer,
        is_rederived=not rederivation.skipped and not rederivation.problems,
        steps=tuple(steps),
    )


def _attestation(work: Work, notes: Notes) -> None:
    """Step 10."""
    if work.digest is None or ATTESTATION not in work.sizes:
        notes.skipped = "the bundle is unsigned"
        return
    notes.looked_at = 1
    try:
        work.signer = check_attestation(work.folder / ATTESTATION, work.digest, work.outcomes)
    except EvidenceError as error:
        notes.wrong(ATTESTATION, str(error))


_STEPS: tuple[tuple[str, Callable[[Work, Notes], None], bool], ...] = (
    ("tree", check_tree, False),
    ("manifest", check_manifest, False),
    ("listing", check_listing, False),
    ("digests", check_digests, True),
    ("schemas", check_schemas, False),
    ("binding", check_binding, True),
    ("outcomes", check_outcomes, False),
    ("samples", check_samples, False),
    ("rederivation", check_rederivation, True),
    ("attestation", _attestation, True),
)
"""Name, function, and whether later steps still make sense after it found a problem."""


def _record(number: int, name: str, notes: Notes) -> VerificationStep:
    return VerificationStep(
        number=number,
        name=name,
        looked_at=notes.looked_at,
        problems=_shortened(notes.problems),
        missing=_shortened(notes.missing),
        skipped=notes.skipped,
        note=notes.note,
    )


def _shortened(problems: list[Problem]) -> tuple[Problem, ...]:
    if len(problems) <= MAX_PROBLEMS:
        return tuple(problems)
    rest = Problem(path="", message=f"and {len(problems) - MAX_PROBLEMS} more of this step")
    return (*problems[:MAX_PROBLEMS], rest)
