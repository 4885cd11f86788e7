"""Which proofs are met, and for each that is not what is missing and how to make it."""

from collections import Counter
from collections.abc import Sequence

from harness.domain.check import Check, Status
from harness.domain.machine import Tier
from harness.domain.plan import Plan, is_within
from harness.domain.policy import Policy
from harness.domain.verdict import MissingEvidence, ProofRow
from harness.evidence.commands import MAX_WORDS, Rerun, validate_command, worktree_folder
from harness.gate.demands import Demand, demands
from harness.gate.merging import Evidence, Merged, Open, strongest

__all__ = ["prove", "rerun_command", "smallest_words"]

MAX_NAMED = 40
"""Check ids named for one missing proof; the words give the count."""


def prove(
    policy: Policy, plan: Plan, merged: Merged, head: str, is_any_refused: bool
) -> tuple[tuple[ProofRow, ...], tuple[MissingEvidence, ...]]:
    """A row for every demand, and what is missing for those that are not met."""
    best = [strongest(evidence) for evidence in merged.evidence.values()]
    rows, missing = [], []
    for demand in demands(policy, plan.claim):
        mine = [e for e in best if e.check.stage is demand.stage and e.arch == demand.arch]
        open_here = [o for o in merged.open if o.check.stage is demand.stage and o.arch == demand.arch]
        row, lacking = _row(demand, mine, open_here, is_any_refused)
        rows.append(row)
        if not row.is_met:
            words = smallest_words(lacking, [*(e.check for e in mine), *(o.check for o in open_here)])
            missing.append(
                MissingEvidence(
                    stage=demand.stage,
                    arch=demand.arch,
                    checks=tuple(check.id for check in lacking)[:MAX_NAMED],
                    why=row.why,
                    where=_where(demand),
                    command=rerun_command(policy, plan, head, demand, () if _absent(demand, mine) else words),
                )
            )
    return tuple(rows), tuple(missing)


def _row(
    demand: Demand, mine: Sequence[Evidence], open_here: Sequence[Open], is_any_refused: bool
) -> tuple[ProofRow, list[Check]]:
    """The row, and the checks that are still to be passed."""
    stale = [e for e in mine if e.stale is not None]
    fresh = [e for e in mine if e.stale is None]
    not_passed = [e for e in fresh if e.outcome.status is not Status.PASS]
    weak = [e for e in fresh if e.outcome.status is Status.PASS and e.tier.strength < demand.tier.strength]
    absent = _absent(demand, mine)
    why = []
    if not mine and not open_here:
        counted = "counted " if is_any_refused else ""
        why.append(f"no {counted}bundle has evidence{'' if demand.arch is None else f' on {demand.arch}'}")
    if open_here:
        first = open_here[0]
        why.append(
            f"{len(open_here)} checks that this gate asks are answered by no bundle, first "
            f"{first.check.id}: {first.why}"
        )
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
        found_tier=min((e.tier for e in passed), key=lambda t: t.strength, default=None),
        checks=len(mine) + len(open_here),
        statuses=tuple(sorted(Counter(e.outcome.status for e in fresh).items())),
        stale=len(stale),
        controls=sum(e.outcome.control is not None and e.outcome.control.failed for e in mine),
        is_met=not why,
        why="; ".join(why),
    )
    return row, [*(e.check for e in (*not_passed, *weak, *stale)), *(o.check for o in open_here)]


def smallest_words(lacking: Sequence[Check], asked: Sequence[Check]) -> tuple[str, ...]:
    """The fewest words after `--only` that name every lacking check and no other of its proof; none where the
    whole proof is lacking, or more words than a command should hold.
    """
    open_ids = {check.id for check in lacking}
    if not open_ids or open_ids >= {check.id for check in asked}:
        return ()
    words: list[str] = []
    for name in dict.fromkeys(check.op or check.subject or check.id for check in lacking):
        named = {check.id for check in asked if is_within(check, (name,))}
        own = [c.id for c in lacking if name == (c.op or c.subject or c.id)]
        words += [name] if named <= open_ids else own
    return tuple(dict.fromkeys(words)) if len(words) <= MAX_WORDS else ()


def _absent(demand: Demand, mine: Sequence[Evidence]) -> list[str]:
    """Subjects that the policy names and no check is about."""
    return [s for s in demand.subjects if not any(_is_about(e, s) for e in mine)]


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


def rerun_command(
    policy: Policy, plan: Plan, head: str, demand: Demand | None = None, only: Sequence[str] = ()
) -> str:
    """The command that makes one demand's evidence, or the bundle's own tier of everything, in the folder
    that `worktree_command` makes.
    """
    tier = plan.tier if demand is None else demand.tier
    stages = () if demand is None else (demand.stage,)
    rerun = Rerun(policy.name, head, tier, worktree_folder(head), stages, tuple(only))
    return validate_command(plan.model_copy(update={"is_full": False}), rerun)
