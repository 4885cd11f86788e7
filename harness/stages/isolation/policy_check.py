"""Whether a policy can be trusted: rules against their own examples, patterns that nothing exercises, zone
maps against a real tree, waivers that name no rule or have ended.
"""

from collections.abc import Sequence
from datetime import date

from pathspec import GitIgnoreSpec

from harness.domain.errors import InputError
from harness.domain.policy import Policy, Rule, ZoneMap
from harness.domain.record import Record
from harness.stages.isolation.detectors import DETECTORS
from harness.stages.isolation.examples import Trial, try_example, try_rule
from harness.stages.isolation.opt_in_rules import GRAPH_RULES
from harness.stages.isolation.zones import ZoneIndex

__all__ = ["PolicyReport", "RuleReport", "ZoneReport", "check_policy"]


class RuleReport(Record):
    """One rule tried on its examples."""

    rule: str
    examples: int
    problems: tuple[str, ...]
    """Each makes the policy unfit: an example that came out wrong, a pattern that cannot be used."""
    unexercised: tuple[str, ...]
    """Patterns that no example shows to work."""


class ZoneReport(Record):
    """A zone map over the files of one tree."""

    zone_map: str
    files: int
    unknown: tuple[str, ...]
    """Paths that no zone covers."""
    idle: tuple[str, ...]
    """Patterns that match no file, as `zone: pattern`."""


class PolicyReport(Record):
    """What `policy check` found."""

    schema_version: int = 1
    policy: str
    rules: tuple[RuleReport, ...]
    zones: ZoneReport | None = None
    waivers: tuple[str, ...] = ()
    """Waivers that name no rule or have ended."""

    @property
    def is_fit(self) -> bool:
        """Whether every example came out as written and every file has a zone."""
        return not any(rule.problems for rule in self.rules) and not (self.zones and self.zones.unknown)


def check_policy(
    policy: Policy, zones: ZoneMap, rules: Sequence[Rule], paths: Sequence[str] | None, today: date
) -> PolicyReport:
    """Every rule against its examples; the zone map against `paths` where a tree was given."""
    return PolicyReport(
        policy=policy.name,
        rules=tuple(_check_rule(rule) for rule in rules),
        zones=_check_zones(zones, paths) if paths is not None else None,
        waivers=tuple(_check_waivers(policy, {rule.id for rule in rules}, today)),
    )


def _check_rule(rule: Rule) -> RuleReport:
    if rule.detector not in DETECTORS:
        known = ", ".join(sorted(DETECTORS))
        problem = f"detector {rule.detector!r} does not exist; known are {known}"
        return RuleReport(rule=rule.id, examples=0, problems=(problem,), unexercised=())
    try:
        trials = try_rule(rule)
        unexercised = tuple(p for p in rule.patterns if not _is_exercised(rule, p))
    except InputError as error:
        return RuleReport(rule=rule.id, examples=0, problems=(str(error),), unexercised=())
    problems = tuple(_words(trial) for trial in trials if not trial.is_right)
    return RuleReport(rule=rule.id, examples=len(trials), problems=problems, unexercised=unexercised)


def _is_exercised(rule: Rule, pattern: str) -> bool:
    """Whether some example that must match does so by this pattern alone."""
    if rule.detector not in ("ast_grep", "regex", "path", "module_imported", "file_kind", "feature_narrowed"):
        return True
    alone = rule.model_copy(update={"patterns": (pattern,)})
    return any(try_example(alone, example) for example in rule.examples if example.matches)


def _words(trial: Trial) -> str:
    wanted = "must match" if trial.expected else "must not match"
    where = f" at line {trial.wanted_line}" if trial.wanted_line else ""
    seen = "nothing was found" if not trial.found else f"line {trial.line} was found"
    return f"example {trial.example!r} {wanted}{where}, but {seen}"


def _check_zones(zones: ZoneMap, paths: Sequence[str]) -> ZoneReport:
    index = ZoneIndex(zones, frozenset(paths))
    idle = [
        f"{zone.name}: {glob}"
        for zone in zones.zones
        for glob in zone.globs
        if not any(GitIgnoreSpec.from_lines([glob.removeprefix("!")]).match_files(paths))
    ]
    unknown = sorted(path for path in paths if index.zone_of(path) == "unknown")
    return ZoneReport(zone_map=zones.name, files=len(paths), unknown=tuple(unknown), idle=tuple(idle))


def _check_waivers(policy: Policy, rules: set[str], today: date) -> Sequence[str]:
    known = rules | {"zone_breach", "unknown_zone", *GRAPH_RULES}
    words = [f"{w.rule} on {w.path}: there is no such rule" for w in policy.waivers if w.rule not in known]
    return words + [
        f"{w.rule} on {w.path}: ended on {w.expires.isoformat()}" for w in policy.waivers if w.expires < today
    ]
