"""The first screen's words: the verdict, what is missing, and the evidence matrix."""

from collections import Counter

from harness.domain.check import Outcome, StageName, Status
from harness.domain.verdict import Answer, ProofRow, Verdict
from harness.evidence.reader import Bundle
from harness.report.plots import status_bar
from harness.report.text import anchor, plain
from harness.report.view import Command, MatrixRow, MissingView, VerdictView

__all__ = ["matrix_rows", "missing_views", "verdict_view"]

MAX_NAMED = 8
WORDS = {
    Answer.ADMITTED: ("Admitted", "good"),
    Answer.REJECTED: ("Rejected", "bad"),
    Answer.COULD_NOT_JUDGE: ("Could not judge", "unsure"),
}


def verdict_view(bundle: Bundle, verdict: Verdict | None) -> VerdictView:
    """The verdict, or that nobody asked the gate."""
    if verdict is None:
        failed = sum(o.status is not Status.PASS for o in bundle.outcomes)
        return VerdictView(
            answer="",
            word="Not judged",
            policy="",
            tone="unsure",
            sentence=f"Made without a verdict; {failed} of {len(bundle.outcomes)} checks did not pass.",
            reasons=(),
            waivers=(),
            worktree="",
            bundles=(),
        )
    word, tone = WORDS[verdict.answer]
    sentence = _sentence(bundle, verdict)
    return VerdictView(
        answer=verdict.answer.value,
        word=word,
        policy=plain(verdict.policy, 80),
        tone=tone,
        sentence=sentence,
        reasons=tuple(plain(r, 600) for r in verdict.reasons),
        worktree=plain(verdict.worktree, 600),
        waivers=tuple(
            plain(
                f"{w.rule} on {w.path}: {w.owner}, {w.reason}; "
                f"{'expired' if w.is_expired else 'until'} {w.expires}; {w.findings} findings",
                600,
            )
            for w in verdict.waivers
        ),
        bundles=tuple(plain(b.words(), 1500) for b in verdict.bundles),
    )


def _sentence(bundle: Bundle, verdict: Verdict) -> str:
    """How much of the policy is met, and how far the answer reaches: it holds under this policy alone."""
    if verdict.answer is Answer.COULD_NOT_JUDGE:
        return "The evidence could not be judged."
    met = sum(row.is_met for row in verdict.rows)
    policy, made_for = plain(verdict.policy, 80), plain(bundle.plan.policy.name, 80)
    sentence = f"{met} of {len(verdict.rows)} proofs that policy {policy} demands are met."
    if verdict.answer is Answer.ADMITTED and verdict.rows:
        strongest = max((row.required_tier for row in verdict.rows), key=lambda tier: tier.strength)
        sentence += (
            f" It asks for evidence of tier {strongest.value} at most; other policies ask for other proofs."
        )
    if made_for != policy:
        sentence += f" The bundle was made for policy {made_for}."
    return sentence


def missing_views(verdict: Verdict) -> tuple[MissingView, ...]:
    """Missing proofs with their commands."""
    return tuple(
        MissingView(
            proof=m.stage.value if m.arch is None else f"{m.stage.value} on {m.arch}",
            why=plain(m.why, 600),
            checks=tuple((c, anchor(c)) for c in m.checks[:MAX_NAMED]),
            more=max(0, len(m.checks) - MAX_NAMED),
            command=Command(plain(m.command, 600), plain(m.where, 200)),
        )
        for m in verdict.missing
    )


def matrix_rows(bundle: Bundle, verdict: Verdict | None) -> tuple[MatrixRow, ...]:
    """One row for each proof that is demanded; without a verdict one for each stage that ran."""
    if verdict is not None and verdict.rows:
        return tuple(_proof_row(row) for row in verdict.rows)
    outcomes = {o.check: o for o in bundle.outcomes}
    rows = []
    for stage in StageName:
        mine = [outcomes[c.id] for c in bundle.plan.of_stage(stage) if c.id in outcomes]
        if mine:
            rows.append(_stage_row(stage, mine))
    return tuple(rows)


def _proof_row(row: ProofRow) -> MatrixRow:
    counts = tuple((s.value, n) for s in Status for status, n in row.statuses if status is s)
    found, needed = row.found_tier, row.required_tier
    tier = needed.value if found is needed else f"needs {needed.value}"
    if found is not None and found is not needed:
        tier = f"{found.value}, needs {needed.value}" if found.strength < needed.strength else found.value
    return MatrixRow(
        stage=row.stage.value,
        arch=row.arch or "",
        counts=counts,
        bar=status_bar(counts, ", ".join(f"{n} {s}" for s, n in counts) or "no evidence"),
        controls=f"{row.controls}/{row.checks}" if row.checks else "",
        tier=tier,
        is_met=row.is_met,
        why=plain(row.why, 300) + (f" ({row.stale} stale)" if row.stale else ""),
    )


def _stage_row(stage: StageName, outcomes: list[Outcome]) -> MatrixRow:
    found = Counter(o.status for o in outcomes)
    counts = tuple((s.value, found[s]) for s in Status if found[s])
    controls = sum(o.control is not None and o.control.failed for o in outcomes)
    return MatrixRow(
        stage=stage.value,
        arch="",
        counts=counts,
        bar=status_bar(counts, ", ".join(f"{n} {s}" for s, n in counts)),
        controls=f"{controls}/{len(outcomes)}",
        tier=min((o.tier for o in outcomes), key=lambda t: t.strength).value,
        is_met=None,
        why="",
    )
