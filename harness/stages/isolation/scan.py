"""A change through the rules: what was read, what was found, what was waived.

All rules read one file before any reads the next, so that its syntax trees are made once and then let go; a
large change is shared out among processes by files.
Invariant: the same change, tree, rules and date give the same findings in the same order (path, line, rule),
however many processes read.
"""

import gc
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import Final, NamedTuple

from pathspec import GitIgnoreSpec

from harness.domain.change import Change, ChangedFile, FileKind, SourceTree
from harness.domain.check import Finding
from harness.domain.claim import Claim
from harness.domain.errors import InputError
from harness.domain.policy import Policy, Rule, Waiver
from harness.forking import forked_map
from harness.stages.isolation.detectors import DETECTORS
from harness.stages.isolation.detectors.definitions import Altered, altered_functions
from harness.stages.isolation.flow import Flow
from harness.stages.isolation.source import Source
from harness.stages.isolation.surroundings import Match, Surroundings
from harness.stages.isolation.zones import ZoneIndex

__all__ = [
    "DEFAULT_MAX_FILE_BYTES", "PackPart", "Reading", "RuleCount", "Scan", "apply_waivers", "families_of",
    "read_sources", "read_through", "scan_rules", "surroundings_of",
]  # fmt: skip

DEFAULT_MAX_FILE_BYTES: Final = 2**20
MAX_EXCERPT: Final = 300
MIN_SPREAD: Final = 40
"""Changed files under which other processes would cost more than they save."""
LIMITED: Final = ("giant_file",)
"""Detectors that read a limit of their check."""
TOO_FAR: Final = "nested too deeply, or handed on too often, to be followed"
UNREADABLE: Final = "unreadable"
"""The detector that tells of code which others could not read."""
_FUNCTION: Final = re.compile(r"def (\w+)")


class PackPart:
    """Which paths belong to the claim's change: its files, and the pack's folder."""

    def __init__(self, claim: Claim, prefix: str) -> None:
        self._files = GitIgnoreSpec.from_lines(claim.files)
        self._prefix = prefix

    def has(self, file: ChangedFile) -> bool:
        """Whether the file was or is the pack's."""
        return any(self.holds(path) for path in (file.path, file.old_path) if path is not None)

    def holds(self, path: str) -> bool:
        """Whether a path is the pack's."""
        return bool(self._prefix and path.startswith(self._prefix)) or self._files.match_file(path)


@dataclass(frozen=True, slots=True)
class RuleCount:
    """What one rule read."""

    rule: str
    severity: str
    files_read: int
    findings: int


@dataclass(frozen=True, slots=True)
class Scan:
    """What the rules gave."""

    findings: tuple[Finding, ...]
    counts: tuple[RuleCount, ...]


class Reading(NamedTuple):
    """What one file holds."""

    matches: Mapping[str, tuple[Match, ...]]
    """By the id of each rule that read it, but for those with a limit of their check."""
    altered: tuple[Altered, ...]
    """Public functions that callers meet differently now."""


def families_of(policy: Policy, is_pack: bool) -> tuple[str, ...]:
    """Rule families that judge a file."""
    return policy.rule_families if is_pack else policy.outside_pack_families


def read_sources(change: Change, tree: SourceTree, zones: ZoneIndex) -> dict[str, Source]:
    """Every changed file with its text at both sides."""
    for file in change.files:
        if file.kind is FileKind.TEXT and file.added_lines + file.removed_lines > 0 and not file.hunks:
            raise InputError(
                f"{file.path}: the change was given without its lines, as a plan carries it; load it "
                "from the repository"
            )
    return {file.path: _read(file, tree, zones) for file in change.files}


def surroundings_of(
    sources: Mapping[str, Source], tree: SourceTree, zones: ZoneIndex, claim: Claim, max_file_bytes: int
) -> Surroundings:
    """What detectors may ask about a change."""
    return Surroundings(
        zones=zones,
        changed_zones=frozenset(source.zone for source in sources.values()),
        sources=sources,
        read_head=lambda path: _content(tree, "head", path),
        switch=claim.switch,
        functions=frozenset().union(*(s.derive("functions", _functions) for s in sources.values())),
        max_file_bytes=max_file_bytes,
    )


def read_through(
    sources: Sequence[Source], rules: Sequence[Sequence[Rule]], around: Surroundings
) -> dict[str, Reading]:
    """What each file's rules find in it, by path. `rules` has those of each file in turn."""
    was_on = gc.isenabled()
    gc.disable()  # what refers to itself is let go by hand; each tree would have all objects looked through
    try:
        work = partial(_read_one, sources, rules, around)
        readings = forked_map(work, range(len(sources)), at_least=MIN_SPREAD)
    finally:
        if was_on:
            gc.enable()
    return {source.path: reading for source, reading in zip(sources, readings, strict=True)}


def scan_rules(
    rules: Sequence[Rule], sources: Sequence[Source], around: Surroundings, readings: Mapping[str, Reading]
) -> Scan:
    """Findings of every rule over the files that its zones and languages name."""
    findings: list[Finding] = []
    counts = []
    for rule in rules:
        read = [source for source in sources if _is_read(rule, source)]
        found = [
            _finding(rule, source, match)
            for source in read
            for match in (
                DETECTORS[rule.detector](rule, source, around)
                if rule.detector in LIMITED
                else readings[source.path].matches[rule.id]
            )
        ]
        findings += found
        counts.append(RuleCount(rule.id, rule.severity.value, len(read), len(found)))
    by_place = {_order(finding): finding for finding in findings}
    return Scan(tuple(by_place[place] for place in sorted(by_place)), tuple(counts))


def apply_waivers(findings: Sequence[Finding], waivers: Sequence[Waiver], today: date) -> Iterator[Finding]:
    """Findings, each marked where a waiver that has not expired covers it."""
    specs = [(w, GitIgnoreSpec.from_lines([w.path])) for w in waivers if w.expires >= today]
    for finding in findings:
        covering = (
            waiver
            for waiver, spec in specs
            if waiver.rule == finding.rule and finding.path is not None and spec.match_file(finding.path)
        )
        waiver = next(covering, None)
        words = f"{waiver.owner}, until {waiver.expires.isoformat()}: {waiver.reason}" if waiver else None
        yield finding.model_copy(update={"waived": words}) if words else finding


def _read_one(
    sources: Sequence[Source], rules: Sequence[Sequence[Rule]], around: Surroundings, place: int
) -> Reading:
    source = sources[place]
    asked = [rule for rule in rules[place] if rule.detector not in LIMITED and _is_read(rule, source)]
    asked.sort(key=lambda rule: rule.detector == UNREADABLE)  # last, as the others find what cannot be read
    matches = {rule.id: _matches(rule, source, around) for rule in asked}
    is_asked = any(rule.family == "blast_radius" for rule in rules[place])
    altered = tuple(altered_functions(source)) if is_asked else ()
    source.let_go()
    return Reading(matches, altered)


def _matches(rule: Rule, source: Source, around: Surroundings) -> tuple[Match, ...]:
    try:
        found = tuple(DETECTORS[rule.detector](rule, source, around))
    except RecursionError:
        found, source.given_up = (), TOO_FAR
    flow = source.made("flow")
    if isinstance(flow, Flow) and flow.is_cut:
        source.given_up = TOO_FAR
    return found


def _functions(source: Source) -> frozenset[str]:
    return frozenset(_FUNCTION.findall(source.after or ""))


def _is_read(rule: Rule, source: Source) -> bool:
    is_zone = not rule.zones or source.zone in rule.zones or source.old_zone in rule.zones
    return is_zone and ("any" in rule.languages or source.language in rule.languages)


def _finding(rule: Rule, source: Source, match: Match) -> Finding:
    return Finding(
        rule=rule.id,
        severity=rule.severity,
        message=f"{match.note}: {rule.rationale}" if match.note else rule.rationale,
        path=source.path,
        line=match.line,
        excerpt=_printable(match.excerpt)[:MAX_EXCERPT],
        remedy=rule.remedy,
    )


def _order(finding: Finding) -> tuple[str, int, str, str]:
    return (finding.path or "", finding.line or 0, finding.rule, finding.message)


def _printable(text: str) -> str:
    """Text that cannot turn a terminal or a page around."""
    return "".join(c if c.isprintable() or c == "\t" else f"\\u{ord(c):04x}" for c in text)


def _read(file: ChangedFile, tree: SourceTree, zones: ZoneIndex) -> Source:
    content = None if file.status == "deleted" else _content(tree, "head", file.path)
    is_text = file.kind is FileKind.TEXT
    old = (
        None if file.status == "added" or not is_text else _content(tree, "base", file.old_path or file.path)
    )
    return Source(
        file=file,
        zone=zones.zone_of(file.path),
        old_zone=zones.zone_of(file.old_path or file.path),
        before=None if old is None else old.decode("utf-8", "replace"),
        after=content.decode("utf-8", "replace") if is_text and content is not None else None,
        content=content,
    )


def _content(tree: SourceTree, side: str, path: str) -> bytes | None:
    """Content, or None where there is none or more than may be read: the giant-file rule tells of those."""
    try:
        return tree.read("base" if side == "base" else "head", path)
    except InputError:
        return None
