"""The decision. Each rule is one function that gives its grounds; the answer follows from all of them.

Could not judge (2): no bundle; a bundle that is broken or incomplete; bundles about different claims,
changes or packs; two heads and nobody said which is judged. Rejected (1): a proof that the policy demands
is not met by fresh, counted evidence of its tier; a contradiction; a waiver that no longer holds. Evidence
does not count when it comes from a dirty tree, from another policy, or from a signer whom the policy does
not name.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime

from harness.domain.bundle import BundleState
from harness.domain.change import Sha
from harness.domain.check import Finding, Status
from harness.domain.machine import Tier
from harness.domain.plan import Plan
from harness.domain.policy import Policy
from harness.domain.verdict import Answer, BundleUse, MissingEvidence, ProofRow, Verdict
from harness.gate.demands import Demand, demands
from harness.gate.freshness import Move
from harness.gate.merging import Evidence, Merged, contradictions, merge, stale_evidence, strongest
from harness.gate.submission import Submission
from harness.gate.waivers import unheld, waiver_uses

__all__ = ["decide"]

MAX_NAMED = 40
"""Check ids named for one missing proof; the words give the count."""


def decide(
    submissions: Sequence[Submission],
    policy: Policy,
    head: Sha | None = None,
    moves: Mapping[Sha, Move] | None = None,
    today: date | None = None,
) -> Verdict:
    """The verdict on a claim from the bundles handed in for it.

    `head` is the head to judge (the bundles' own where it is None); `moves` says by bundle head what changed
    since; `today` decides about waivers (now where it is None).
    """
    obstacles = _obstacles(submissions, head)
    if obstacles:
        return _verdict(Answer.COULD_NOT_JUDGE, policy, submissions, head, obstacles, {})
    today = today or datetime.now(UTC).date()
    refused = {s.name: reason for s in submissions if (reason := _refusal(s, policy))}
    counted = [s for s in submissions if s.name not in refused]
    plan = _plans(submissions)[0]
    judged = head or plan.change.head
    merged = merge(counted, judged, moves or {})
    rows, missing = _prove(policy, plan, merged, judged, refused)
    clashes = contradictions(merged)
    findings = [f for evidence in merged.values() for f in strongest(evidence).outcome.findings]
    lapsed = unheld(policy, findings, today)
    reasons = [f"{name}: {reason}" for name, reason in refused.items()]
    reasons += [f"{c.check} passes in one bundle and fails in another" for c in clashes]
    reasons += [_lapsed_words(f) for f in lapsed]
    reasons += [f"{_row_name(row)}: {row.why}" for row in rows if not row.is_met]
    if not rows:
        reasons.append(
            f"policy {policy.name!r} demands no proof of this claim, so nothing can be admitted on it"
        )
    answer = Answer.REJECTED if missing or clashes or lapsed or not rows else Answer.ADMITTED
    if answer is Answer.ADMITTED:
        checks = sum(row.passed for row in rows)
        reasons.append(
            f"all {len(rows)} proofs that policy {policy.name!r} demands are met by {checks} passed checks, "
            "each with a control that failed as it should"
        )
    return _verdict(
        answer,
        policy,
        submissions,
        judged,
        reasons,
        refused,
        rows=rows,
        missing=missing,
        contradictions=clashes,
        stale=stale_evidence(merged),
        waivers=waiver_uses(policy, findings, today),
    )


def _obstacles(submissions: Sequence[Submission], head: Sha | None) -> list[str]:
    """Why nothing can be judged."""
    if not submissions:
        return ["no bundle was given"]
    names = Counter(s.name for s in submissions)
    found = [f"two bundles are called {name}" for name, count in names.items() if count > 1]
    for submission in submissions:
        verification = submission.verification
        if not submission.is_sound:
            first = next(iter(verification.problems), None)
            words = f": {first.path or 'bundle'} {first.message}" if first else ""
            state = verification.state if verification.state is not BundleState.VERIFIED else "unreadable"
            found.append(f"{submission.name} is {state}{words}")
    if found:
        return found
    plans = _plans(submissions)
    for what, values in (
        ("repositories", {p.change.repository for p in plans}),
        ("pull requests", {p.change.pr for p in plans if p.change.pr is not None}),
        ("claims", {p.claim.digest() for p in plans}),
        ("packs", {p.pack for p in plans}),
    ):
        if len(values) > 1:
            found.append(f"the bundles are about {len(values)} different {what}")
    heads = {p.change.head for p in plans}
    if len(heads) > 1 and head is None:
        found.append(f"the bundles are of {len(heads)} different heads; say with --head which is judged")
    found += [
        f"two bundles of head {sha[:12]} ran different pack files, so one is not of that commit"
        for sha in heads
        if len({p.pack_digest for p in plans if p.change.head == sha}) > 1
    ]
    return found


def _refusal(submission: Submission, policy: Policy) -> str:
    """Why a sound bundle's evidence does not count; empty where it does."""
    plan = submission.plan
    if plan is None:
        raise AssertionError(f"{submission.name} was refused before")
    if plan.change.is_dirty:
        return "made from uncommitted changes, so it is bound to no commit; commit and run again"
    if plan.policy.digest() != policy.digest():
        how = "has another version of it" if plan.policy.name == policy.name else f"was {plan.policy.name!r}"
        return f"judged under another policy than {policy.name!r} (its policy {how})"
    signer = submission.verification.signer
    if policy.signers and signer not in policy.signers:
        who = f"signed by {signer[:16]}…, whom" if signer else "unsigned, and"
        return f"{who} policy {policy.name!r} does not accept; see its signers"
    return ""


def _prove(
    policy: Policy,
    plan: Plan,
    merged: Merged,
    head: Sha,
    refused: Mapping[str, str],
) -> tuple[tuple[ProofRow, ...], tuple[MissingEvidence, ...]]:
    """A row for every demand, and what is missing for those that are not met."""
    best = [strongest(evidence) for evidence in merged.values()]
    rows, missing = [], []
    for demand in demands(policy, plan.claim):
        mine = [e for e in best if e.check.stage is demand.stage and e.arch == demand.arch]
        row, lacking = _row(demand, mine, bool(refused))
        rows.append(row)
        if not row.is_met:
            missing.append(
                MissingEvidence(
                    stage=demand.stage,
                    arch=demand.arch,
                    checks=tuple(e.check.id for e in lacking)[:MAX_NAMED],
                    why=row.why,
                    where=_where(demand),
                    command=_command(demand, policy, plan, head),
                )
            )
    return tuple(rows), tuple(missing)


def _row(demand: Demand, mine: Sequence[Evidence], is_any_refused: bool) -> tuple[ProofRow, list[Evidence]]:
    stale = [e for e in mine if e.stale is not None]
    fresh = [e for e in mine if e.stale is None]
    not_passed = [e for e in fresh if e.outcome.status is not Status.PASS]
    weak = [
        e for e in fresh if e.outcome.status is Status.PASS and e.outcome.tier.strength < demand.tier.strength
    ]
    absent = [s for s in demand.subjects if not any(_is_about(e, s) for e in mine)]
    why = []
    if not mine:
        counted = "counted " if is_any_refused else ""
        why.append(f"no {counted}bundle has evidence{'' if demand.arch is None else f' on {demand.arch}'}")
    if absent and mine:
        why.append(f"no check of {', '.join(absent)}")
    if not_passed:
        counts = Counter(e.outcome.status for e in not_passed)
        said = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
        why.append(f"{len(not_passed)} of {len(mine)} required checks did not pass ({said})")
    if weak:
        why.append(f"{len(weak)} checks passed below tier {demand.tier}")
    if stale:
        why.append(f"evidence of {len(stale)} checks is of an older head")
    passed = [e for e in fresh if e.outcome.status is Status.PASS]
    row = ProofRow(
        stage=demand.stage,
        arch=demand.arch,
        required_tier=demand.tier,
        found_tier=min((e.outcome.tier for e in passed), key=lambda t: t.strength, default=None),
        checks=len(mine),
        statuses=tuple(sorted(Counter(e.outcome.status for e in fresh).items())),
        stale=len(stale),
        controls=sum(e.outcome.control is not None and e.outcome.control.failed for e in mine),
        is_met=not why,
        why="; ".join(why),
    )
    return row, [*not_passed, *weak, *stale]


def _is_about(evidence: Evidence, subject: str) -> bool:
    check = evidence.check
    return subject in (check.subject, check.op) or subject in check.id.split("/")


def _where(demand: Demand) -> str:
    if demand.tier is Tier.SMOKE:
        return "any machine, no GPU needed"
    counts = {Tier.RANK: "one", Tier.NODE: "several", Tier.CLAIM: "the claimed number of"}
    plural = "" if demand.tier is Tier.RANK else "s"
    kind = "" if demand.arch is None else f" {demand.arch}"
    return f"a machine with {counts[demand.tier]}{kind} GPU{plural}"


def _command(demand: Demand, policy: Policy, plan: Plan, head: Sha) -> str:
    return (
        f"fasttrack validate --pack {plan.pack} --policy {policy.name} --base {plan.change.base} "
        f"--head {head} --tier {demand.tier} --stage {demand.stage}"
    )


def _lapsed_words(finding: Finding) -> str:
    place = f" at {finding.path}" if finding.path else ""
    return f"finding {finding.rule}{place} was waived, and no waiver in force covers it any more"


def _row_name(row: ProofRow) -> str:
    return row.stage.value if row.arch is None else f"{row.stage.value} on {row.arch}"


def _plans(submissions: Iterable[Submission]) -> list[Plan]:
    return [s.plan for s in submissions if s.plan is not None]


def _verdict(
    answer: Answer,
    policy: Policy,
    submissions: Sequence[Submission],
    head: Sha | None,
    reasons: Sequence[str],
    refused: Mapping[str, str],
    **grounds: object,
) -> Verdict:
    plans = _plans(submissions)
    plan = plans[0] if plans else None
    uses = tuple(
        BundleUse(
            name=s.name,
            bundle_digest=s.verification.bundle_digest,
            tier=s.plan.tier if s.plan else None,
            arch=s.plan.machine.arch if s.plan else None,
            head=s.plan.change.head if s.plan else None,
            state=s.verification.state,
            signer=s.verification.signer,
            refused=refused.get(s.name, ""),
        )
        for s in submissions
    )
    return Verdict.model_validate(
        {
            "answer": answer,
            "exit_code": answer.exit_code,
            "policy": policy.name,
            "claim": plan.claim.name if plan else None,
            "repository": plan.change.repository if plan else None,
            "pr": next((p.change.pr for p in plans if p.change.pr is not None), None),
            "head": head or (plan.change.head if plan else None),
            "reasons": tuple(reasons),
            "bundles": uses,
            **grounds,
        }
    )
