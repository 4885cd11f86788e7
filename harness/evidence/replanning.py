"""Step 7 of verifying: the plan asks what claim and policy call for, whoever made it.

The planner here plans again from the same claim, policy, change, machine and nonce, whatever harness and pack
the bundle names: a digest in a plan is a word of its author, and lifts nothing. With the code that made the
bundle any difference is a fault of it. With other code a difference may be honest; the bundle is then
unconfirmed, and only the checks that both plans ask alike can count.
"""

from harness.domain.check import Check
from harness.domain.plan import Plan
from harness.domain.policy import Policy
from harness.evidence.integrity import Notes, Replanned, Work
from harness.evidence.names import PLAN

__all__ = ["check_planning", "is_same_question", "other_questions"]

MAX_WORDS = 3
"""Words of a narrowed plan that are shown."""


def check_planning(work: Work, notes: Notes) -> None:
    """Step 7."""
    plan = work.plan
    if plan is None or work.replan is None:
        notes.skipped = "there is no plan yet" if plan is None else "no planner was given"
        return
    again = work.replanned = work.replan(plan)
    if again.checks is None:
        notes.differs(PLAN, f"could not be made again: {again.why}")
        return
    called = tuple(check for check in again.checks if plan.holds(check))
    notes.looked_at = len(called)
    say = notes.wrong if again.is_code_of(plan) else notes.differs
    for check, words in other_questions(plan, called).items():
        say(check, words)
    notes.note = "; ".join(filter(None, (_code_words(plan, again), _narrow_words(plan, again.checks))))


def _code_words(plan: Plan, again: Replanned) -> str:
    """Which code made the plan and which made it again, where they differ."""
    if again.is_code_of(plan):
        return ""
    what, made, here = "harness", plan.harness_digest, again.harness
    if made == here:
        what, made, here = "pack", plan.pack_digest, again.pack or "none"
    return f"made with {what} {made[:12]}; planned again with {here[:12]}"


def _narrow_words(plan: Plan, checks: tuple[Check, ...]) -> str:
    """What a plan that was narrowed on purpose leaves out."""
    if not plan.only:
        return ""
    left_out = sum(not plan.holds(check) for check in checks)
    more = f" and {len(plan.only) - MAX_WORDS} more" if len(plan.only) > MAX_WORDS else ""
    return f"narrowed to {', '.join(plan.only[:MAX_WORDS])}{more}: {left_out} checks left out"


def other_questions(plan: Plan, again: tuple[Check, ...]) -> dict[str, str]:
    """By check: how a plan differs from the one made again."""
    planned, called = {c.id: c for c in plan.checks}, {c.id: c for c in again}
    found = dict.fromkeys(called, "is called for by claim and policy, but the plan leaves it out")
    found |= dict.fromkeys(planned, "is in the plan, but claim and policy do not call for it")
    for check in planned.keys() & called.keys():
        if is_same_question(planned[check], called[check], plan.policy):
            del found[check]
        else:
            found[check] = "asks another question than claim and policy call for"
    return dict(sorted(found.items()))


def is_same_question(one: Check, two: Check, policy: Policy) -> bool:
    """Whether a pass of one is a pass of the other. What it costs, and whether a machine can run it, is no
    part of the question; nor is a waiver of the policy, which the gate holds against its own date.
    """
    asked, again = _question(one, policy), _question(two, policy)
    # 1 and 1.0 are one number in a plan, but to Python `True` is that number too.
    return asked == again and _flags(asked) == _flags(again)


def _flags(check: Check) -> list[bool]:
    """Which settings are yes or no, where a number could stand as well."""
    values = [*(t.value for t in check.thresholds), *(value for _, value in check.parameters)]
    return [isinstance(value, bool) for value in values]


def _question(check: Check, policy: Policy) -> Check:
    waived = {(f"waived.{w.rule}", w.words()) for w in policy.waivers}
    asked = tuple(t for t in check.thresholds if (t.name, t.value) not in waived)
    return check.model_copy(update={"cost_s": 0.0, "unavailable": None, "thresholds": asked})
