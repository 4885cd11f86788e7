"""Which bundles repeat others of those handed in, and who vouches for it."""

from collections.abc import Sequence

from harness.domain.replication import Repeated
from harness.domain.verdict import ReplicationUse
from harness.evidence.replication import replicate_outcomes
from harness.gate.submission import Submission

__all__ = ["distinct_signers", "replications"]


def replications(submissions: Sequence[Submission]) -> tuple[ReplicationUse, ...]:
    """A use for each bundle whose plan names another one here as the run that it repeats."""
    by_digest = {s.verification.bundle_digest: s for s in submissions if s.verification.bundle_digest}
    found = []
    for second in submissions:
        first = None if second.plan is None else by_digest.get(second.plan.replicates or "")
        if first is not None and first is not second:
            found.append(_use(first, second))
    return tuple(found)


def distinct_signers(uses: Sequence[ReplicationUse], submissions: Sequence[Submission]) -> int:
    """Signers of replications, each once. Who signed the first run does not vouch for it a second time."""
    signer_of = {s.name: s.verification.signer for s in submissions}
    return len(
        {
            use.signer
            for use in uses
            if use.answer is Repeated.REPLICATED
            and use.signer is not None
            and use.signer != signer_of.get(use.repeats)
        }
    )


def _use(first: Submission, second: Submission) -> ReplicationUse:
    assert first.plan is not None
    assert second.plan is not None
    checks = replicate_outcomes((first.plan, first.outcomes), (second.plan, second.outcomes))
    answers = [c.answer for c in checks]
    order = (Repeated.NOT_REPLICATED, Repeated.REPLICATED)
    answer = next((a for a in order if a in answers), Repeated.NOT_COMPARABLE)
    worst = next((c for c in checks if c.answer is answer and c.why), None)
    return ReplicationUse(
        bundle=second.name,
        repeats=first.name,
        signer=second.verification.signer,
        answer=answer,
        why=f"{worst.check}: {worst.why}" if worst else "",
    )
