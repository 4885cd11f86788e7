"""The decision. Each rule is one function that gives its grounds; the answer follows from all of them.

Could not judge (2): no bundle; a bundle that is broken or incomplete; bundles about different claims,
changes or packs; two heads and nobody said which is judged. Rejected (1): a proof that the policy demands
is not met by fresh, counted evidence of its tier; a check that the gate's own plan calls for and no bundle
answers; a contradiction; a repetition that gave otherwise, or fewer of them than the policy asks for; a
waiver that no longer holds. Evidence does not count when its plan could not be made again, when it is
about another claim than the one in force or another change than the repository holds, when it comes from a
dirty tree, from another policy or other rules, or from a signer whom the policy does not name. It counts at
most at the tier that its machine can give.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime

from harness.documents import PolicySet
from harness.domain.bundle import BundleState
from harness.domain.change import Sha
from harness.domain.check import Finding
from harness.domain.plan import Plan
from harness.domain.policy import Policy
from harness.domain.replication import Repeated
from harness.domain.verdict import (
    Answer,
    BundleUse,
    Contradiction,
    ProofRow,
    ReplicationUse,
    Verdict,
)
from harness.evidence.commands import worktree_command
from harness.evidence.replanning import other_questions
from harness.gate.freshness import Move
from harness.gate.merging import Head, contradictions, merge, stale_evidence, strongest
from harness.gate.proving import prove, rerun_command
from harness.gate.repetition import distinct_signers, replications
from harness.gate.submission import Submission
from harness.gate.waivers import unheld, waiver_uses

__all__ = ["decide"]


def decide(
    submissions: Sequence[Submission],
    asked: Policy | PolicySet,
    head: Sha | None = None,
    moves: Mapping[Sha, Move] | None = None,
    today: date | None = None,
) -> Verdict:
    """The verdict on a claim from the bundles handed in for it.

    `asked` is the policy, with its zones and rules where isolation's evidence is to be held against them;
    `head` is the head to judge (the bundles' own where it is None); `moves` says by bundle head what changed
    since; `today` decides about waivers (now where it is None).
    """
    policy = asked.policy if isinstance(asked, PolicySet) else asked
    obstacles = _obstacles(submissions, head)
    if obstacles:
        return _verdict(Answer.COULD_NOT_JUDGE, policy, submissions, head, obstacles, {})
    today = today or datetime.now(UTC).date()
    refused = {s.name: reason for s in submissions if (reason := _refusal(s, policy))}
    counted = [s for s in submissions if s.name not in refused]
    plan = _plans(submissions)[0]
    judged = head or plan.change.head
    merged = merge(counted, Head(judged, moves or {}), _foreign_rules(counted, asked))
    rows, missing = prove(policy, plan, merged, judged, bool(refused))
    findings = [f for evidence in merged.evidence.values() for f in strongest(evidence).outcome.findings]
    repeated = replications(counted)
    doubts = Doubts(
        clashes=contradictions(merged),
        unlike=tuple(use for use in repeated if use.answer is Repeated.NOT_REPLICATED),
        vouched=distinct_signers(repeated, counted),
        lapsed=unheld(policy, findings, today),
    )
    against = [
        *(f"{name}: {reason}" for name, reason in refused.items()),
        *doubts.reasons(policy),
        *(f"{_row_name(row)}: {row.why}" for row in rows if not row.is_met),
    ]
    is_rejected = bool(missing or not rows or doubts.reasons(policy))
    return _verdict(
        Answer.REJECTED if is_rejected else Answer.ADMITTED,
        policy,
        submissions,
        judged,
        [*([] if is_rejected else [_admission_words(policy, rows)]), *_no_rows_words(policy, rows), *against],
        refused,
        rows=rows,
        missing=missing,
        contradictions=doubts.clashes,
        stale=stale_evidence(merged),
        worktree=worktree_command(judged) if missing else "",
        replications=repeated,
        replicated_by=doubts.vouched,
        waivers=waiver_uses(policy, findings, today),
    )


@dataclass(frozen=True, slots=True)
class Doubts:
    """What speaks against evidence that would otherwise be enough."""

    clashes: tuple[Contradiction, ...]
    unlike: tuple[ReplicationUse, ...]
    """Repetitions that gave otherwise."""
    vouched: int
    """Distinct signers of repetitions that gave the same."""
    lapsed: tuple[Finding, ...]
    """Findings whose waiver no longer holds."""

    def reasons(self, policy: Policy) -> list[str]:
        """A sentence for each doubt; empty where there is none."""
        found = [f"{c.check} passes in one bundle and fails in another" for c in self.clashes]
        found += [f"{u.bundle} repeats {u.repeats} and does not give the same: {u.why}" for u in self.unlike]
        if self.vouched < policy.min_replications:
            found.append(
                f"{self.vouched} other signers have replicated a bundle, and policy {policy.name!r} asks for "
                f"{policy.min_replications}; run `fasttrack reproduce BUNDLE` elsewhere, sign what it makes "
                "and hand it in"
            )
        return found + [_lapsed_words(f) for f in self.lapsed]


def _admission_words(policy: Policy, rows: Sequence[ProofRow]) -> str:
    checks = sum(row.passed for row in rows)
    return (
        f"all {len(rows)} proofs that policy {policy.name!r} demands are met by {checks} passed checks, "
        "each with a control that failed as it should"
    )


def _no_rows_words(policy: Policy, rows: Sequence[ProofRow]) -> list[str]:
    if rows:
        return []
    return [f"policy {policy.name!r} demands no proof of this claim, so nothing can be admitted on it"]


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
    found += [
        f"the bundles of head {sha[:12]} take it for a change from different bases, so isolation judged "
        "another range than the rest; make all of them with the pull request's own --base"
        for sha in heads
        if len({p.change.base for p in plans if p.change.head == sha}) > 1
    ]
    return found


def _refusal(submission: Submission, policy: Policy) -> str:
    """Why a sound bundle's evidence does not count; empty where it does."""
    plan = submission.plan
    if plan is None:
        raise AssertionError(f"{submission.name} was refused before")
    if plan.change.is_dirty:
        return "made from uncommitted changes, so it is bound to no commit; commit and run again"
    if not plan.change.files:
        return (
            f"its change {plan.change.base[:12]}..{plan.change.head[:12]} has no changed file, so isolation "
            "had nothing to judge; run again with the pull request's own --base"
        )
    if submission.asked is None:
        return (
            f"its plan could not be made again, so nothing shows that it asks all: {_why_unasked(submission)}"
        )
    if submission.claim is not None and plan.claim != submission.claim:
        return (
            f"its claim is not the one in force in pack {plan.pack}, by which the guard dispatches; put that "
            "claim in force, or run again without --claim"
        )
    if submission.other_change:
        return submission.other_change
    if plan.policy != policy:
        how = "has another version of it" if plan.policy.name == policy.name else f"was {plan.policy.name!r}"
        return f"judged under another policy than {policy.name!r} (its policy {how})"
    signer = submission.verification.signer
    if policy.signers and signer not in policy.signers:
        shown = f"{signer[:16]}…" if signer and " " not in signer else signer
        who = f"signed by {shown}, whom" if signer else "unsigned, and"
        return f"{who} policy {policy.name!r} does not accept; see its signers"
    return ""


def _why_unasked(submission: Submission) -> str:
    planning = next((s for s in submission.verification.steps if s.name == "planning"), None)
    if planning is None:
        return "no planner was given"
    return planning.skipped or "; ".join(p.message for p in planning.differing)


def _foreign_rules(submissions: Iterable[Submission], asked: Policy | PolicySet) -> frozenset[str]:
    """Bundles whose isolation was judged by other zones or rules than the gate's."""
    if not isinstance(asked, PolicySet):
        return frozenset()
    mine = (asked.zones, asked.rules)
    return frozenset(s.name for s in submissions if s.plan and (s.plan.zones, s.plan.rules) != mine)


def _note(submission: Submission, policy: Policy) -> str:
    """What the gate plans or judges otherwise than a bundle that other code made."""
    verification, plan = submission.verification, submission.plan
    if plan is None or submission.asked is None:
        return ""
    here = verification.verified_with or ""
    code = f"another version of pack {plan.pack} than is here"
    if here != plan.harness_digest:
        code = f"harness {plan.harness_digest[:12]}, and this gate is {here[:12]}"
    if verification.state is not BundleState.UNCONFIRMED:
        is_other = here != plan.harness_digest or submission.has_other_pack
        return f"made with {code}; every check of it is asked and judged alike here" if is_other else ""
    planned = len(other_questions(plan, submission.asked))
    shown = [p.path for s in verification.steps if s.name == "rederivation" for p in s.differing]
    judged = f"{len(set(filter(None, shown)))}{' or more' if '' in shown else ''}"
    return (
        f"made with {code}: {planned} checks are planned and {judged} judged otherwise here; only what "
        "is asked alike counts, as judged here. To have all of it count, run "
        f"`{rerun_command(policy, plan, plan.change.head)}` with this gate's version"
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
            base=s.plan.change.base if s.plan else None,
            state=s.verification.state,
            signer=s.verification.signer,
            harness=s.verification.made_with,
            refused=refused.get(s.name, ""),
            note=_note(s, policy),
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
