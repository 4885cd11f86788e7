"""Two bundles side by side: first what differs in what was run and where, then in what it gave.

Two results that differ while the environments do too say nothing about the change; so the order is the
message.
"""

from typing import Literal

from harness.domain.check import Outcome
from harness.domain.plan import Plan
from harness.domain.record import Record
from harness.evidence.reader import Bundle

__all__ = ["BundleDiff", "Difference", "diff_bundles"]

FIGURE_TOLERANCE = 1e-6


class Difference(Record):
    """One thing that differs."""

    about: str
    """Such as `library torch`, `claim`, or a check's id."""
    first: str
    second: str


class BundleDiff(Record):
    """What differs between two bundles."""

    schema_version: Literal[1] = 1
    is_comparable: bool
    """Whether both ask the same questions: one pack, one claim, at least one check in common."""
    conditions: tuple[Difference, ...]
    """Change, code, claim, policy, machine, libraries, settings."""
    results: tuple[Difference, ...]
    """Statuses and figures of the checks that both have, and checks that only one has."""


def diff_bundles(first: Bundle, second: Bundle) -> BundleDiff:
    """Differences, conditions first."""
    one, two = first.plan, second.plan
    ids = {o.check for o in first.outcomes}, {o.check for o in second.outcomes}
    is_comparable = one.pack == two.pack and one.claim.name == two.claim.name and bool(ids[0] & ids[1])
    conditions = [
        *_plans(one, two),
        *_pairs("library", _libraries(first), _libraries(second)),
        *_pairs("variable", _variables(first), _variables(second)),
        *_pairs("image", _image(first), _image(second)),
    ]
    results = []
    outcomes = {o.check: o for o in second.outcomes}
    for outcome in first.outcomes:
        results += _outcomes(outcome, outcomes.get(outcome.check))
    results += [
        Difference(about=o.check, first="absent", second=o.status)
        for o in second.outcomes
        if o.check not in ids[0]
    ]
    return BundleDiff(is_comparable=is_comparable, conditions=tuple(conditions), results=tuple(results))


def _plans(one: Plan, two: Plan) -> list[Difference]:
    def facts(plan: Plan) -> dict[str, str]:
        machine = plan.machine
        return {
            "base": plan.change.base,
            "head": plan.change.head,
            "uncommitted changes": str(plan.change.is_dirty),
            "harness": f"{plan.harness_version} {plan.harness_digest[:12]}",
            "pack": f"{plan.pack} {plan.pack_digest[:12]}",
            "claim": plan.claim.digest()[:12],
            "policy": f"{plan.policy.name} {plan.policy.digest()[:12]}",
            "tier": plan.tier,
            "full": str(plan.is_full),
            "GPUs": ", ".join(g.name for g in machine.gpus) or "none",
            "driver": machine.driver or "none",
            "NVLinks": "unknown" if machine.nvlinks is None else str(machine.nvlinks),
            "processor": f"{machine.cpu_model} x{machine.cpu_count}",
            "memory": f"{machine.memory_bytes / 2**30:.0f} GiB",
            "platform": machine.platform,
            "Python": machine.python,
        }

    return _pairs("", facts(one), facts(two))


def _pairs(kind: str, one: dict[str, str], two: dict[str, str]) -> list[Difference]:
    names = [*one, *(n for n in two if n not in one)]
    return [
        Difference(
            about=f"{kind} {name}".strip(), first=one.get(name, "absent"), second=two.get(name, "absent")
        )
        for name in names
        if one.get(name) != two.get(name)
    ]


def _libraries(bundle: Bundle) -> dict[str, str]:
    machine = bundle.plan.machine if bundle.manifest is None else bundle.manifest.machine
    return dict(machine.libraries)


def _variables(bundle: Bundle) -> dict[str, str]:
    return {} if bundle.environment is None else dict(bundle.environment.variables)


def _image(bundle: Bundle) -> dict[str, str]:
    image = None if bundle.environment is None else bundle.environment.image_digest
    return {} if image is None else {"digest": image}


def _outcomes(one: Outcome, two: Outcome | None) -> list[Difference]:
    if two is None:
        return [Difference(about=one.check, first=one.status, second="absent")]
    found = []
    if one.status is not two.status:
        found.append(Difference(about=one.check, first=one.status, second=two.status))
    others = {f.name: f for f in two.figures}
    for figure in one.figures:
        other = others.get(figure.name)
        a, b = figure.value, None if other is None else other.value
        if a is None or b is None:
            is_alike = a is b and (a is not None or other is not None)
        else:
            is_alike = abs(a - b) <= FIGURE_TOLERANCE * max(abs(a), abs(b))
        if not is_alike:
            found.append(Difference(about=f"{one.check} {figure.name}", first=_shown(a), second=_shown(b)))
    return found


def _shown(value: float | int | None) -> str:
    return "not measured" if value is None else f"{value:.6g}"
