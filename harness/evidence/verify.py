"""Whether a bundle holds together, decided without trusting anything in it.

Eleven steps, one function each:
1. tree: regular files and folders only, names that mean one thing everywhere, within the limits
2. manifest: canonical, of a known schema version, naming safe paths
3. listing: every file of the tree is listed, every listed file is there, each in a known place
4. digests: size and sha256 of every file, in pieces
5. schemas: plan, environment and every outcome parse as canonical records
6. binding: the manifest's digests, change and tier are the plan's; thresholds are the policy's
7. planning: the checks are those that the planner here makes of claim, policy, change and machine
8. outcomes: each belongs to a planned check, once, in plan order; what has none is missing
9. samples: each outcome has its own samples, made for this plan, and nothing else has any
10. rederivation: each outcome judged again from its samples is the same
11. attestation: the signature, where there is one, is over this manifest

Needs no network, GPU or torch. A run without a manifest is incomplete, not broken: steps 3, 4 and 11 then
have nothing to compare with. Where other code made the bundle, what steps 7 and 10 give otherwise leaves it
unconfirmed, not broken. Memory is bounded by the plan and one check's samples for each process of step 10,
whatever the bundle's size.
"""

from collections.abc import Callable
from pathlib import Path

from harness.domain.bundle import BundleState, Problem, Verification, VerificationStep
from harness.domain.errors import EvidenceError
from harness.domain.record import sha256_hex
from harness.evidence.bundle import digest_file
from harness.evidence.consistency import (
    check_binding,
    check_outcomes,
    check_samples,
    check_schemas,
)
from harness.evidence.integrity import (
    Notes,
    Rejudge,
    Replan,
    Replanned,
    Work,
    check_digests,
    check_listing,
    check_manifest,
    check_tree,
)
from harness.evidence.names import ATTESTATION
from harness.evidence.rejudging import check_rederivation
from harness.evidence.replanning import check_planning

__all__ = ["Rejudge", "Replan", "Replanned", "conclusion", "content_digest", "examine", "verify"]

MAX_PROBLEMS = 50
"""Shown for each step; one more line says how many there are."""


def verify(
    folder: Path,
    rejudge: Rejudge | None = None,
    replan: Replan | None = None,
    trusted_root: Path | None = None,
) -> Verification:
    """Verify the bundle in `folder`. Without `replan` step 7, without `rejudge` step 10 is skipped, and the
    result says so; without `trusted_root` a signature by identity counts as none.
    """
    return examine(folder, rejudge, replan, trusted_root)[0]


def examine(
    folder: Path,
    rejudge: Rejudge | None = None,
    replan: Replan | None = None,
    trusted_root: Path | None = None,
) -> tuple[Verification, Work]:
    """As `verify`, with what the steps read: a caller need not read it once more."""
    work = Work(folder, rejudge, replan, trusted_root)
    steps: list[VerificationStep] = []
    for number, (name, step, _) in enumerate(_STEPS, 1):
        notes = Notes()
        if not any(s.problems for s in steps if not _STEPS[s.number - 1][2]):
            step(work, notes)
        else:
            notes.skipped = "an earlier step found the bundle unsafe or unreadable"
        steps.append(_record(number, name, notes))
    state = BundleState.VERIFIED
    if any(s.differing for s in steps):
        state = BundleState.UNCONFIRMED
    if any(s.missing for s in steps):
        state = BundleState.INCOMPLETE
    if any(s.problems for s in steps):
        state = BundleState.BROKEN
    planning, rederivation = (next(s for s in steps if s.name == n) for n in ("planning", "rederivation"))
    result = Verification(
        state=state,
        bundle_digest=work.digest,
        signer=work.signer,
        is_replanned=_holds(planning),
        is_rederived=_holds(rederivation),
        made_with=work.plan.harness_digest if work.plan else None,
        verified_with=work.replanned.harness if work.replanned else None,
        steps=tuple(steps),
    )
    return result, work


def conclusion(result: Verification) -> str:
    """What verifying concluded, in a sentence that says what to do where it is not enough."""
    if result.state is not BundleState.UNCONFIRMED:
        return result.state.value
    made, here = ((digest or "unknown")[:12] for digest in (result.made_with, result.verified_with))
    code = "with another version of its pack" if made == here else f"with harness {made}, and this is {here}"
    return (
        f"unconfirmed: its files hold together, but it was made {code}, and what is named above could not be "
        "planned or judged alike here; run `fasttrack validate` again with this version, or verify it with "
        "the one that made it"
    )


def content_digest(folder: Path) -> str | None:
    """Digest of all that a finished bundle holds, as read now; None where steps 1 to 4 find something wrong.

    The manifest stands for every file that it lists; the attestation is the one file that it does not.
    """
    work, notes = Work(folder, None, None), Notes()
    for _, step, _ in _STEPS[:4]:
        step(work, notes)
        if notes.problems or notes.missing:
            return None
    signature = digest_file(folder / ATTESTATION)[0] if ATTESTATION in work.sizes else ""
    return sha256_hex(f"{work.digest}:{signature}".encode())


def _holds(step: VerificationStep) -> bool:
    return not (step.skipped or step.problems or step.differing)


def _attestation(work: Work, notes: Notes) -> None:
    """Step 11."""
    if work.digest is None or ATTESTATION not in work.sizes:
        notes.skipped = "the bundle is unsigned"
        return
    # cryptography takes 0.1 s to load, which an unsigned bundle need not wait for
    from harness.evidence.attestation import check_attestation

    notes.looked_at = 1
    try:
        path = work.folder / ATTESTATION
        work.signer = check_attestation(path, work.digest, work.outcomes, work.trusted_root)
        if work.signer is None:
            notes.skipped = (
                "it is signed by an identity, and no root of trust was named to check that with "
                "(--trusted-root FILE); it counts as unsigned"
            )
    except EvidenceError as error:
        notes.wrong(ATTESTATION, str(error))


_STEPS: tuple[tuple[str, Callable[[Work, Notes], None], bool], ...] = (
    ("tree", check_tree, False),
    ("manifest", check_manifest, False),
    ("listing", check_listing, False),
    ("digests", check_digests, True),
    ("schemas", check_schemas, False),
    ("binding", check_binding, True),
    ("planning", check_planning, True),
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
        differing=_shortened(notes.differing),
        skipped=notes.skipped,
        note=notes.note,
    )


def _shortened(problems: list[Problem]) -> tuple[Problem, ...]:
    if len(problems) <= MAX_PROBLEMS:
        return tuple(problems)
    rest = Problem(path="", message=f"and {len(problems) - MAX_PROBLEMS} more of this step")
    return (*problems[:MAX_PROBLEMS], rest)
