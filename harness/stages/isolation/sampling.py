"""What the rules saw: raw findings, what was read, and what became of the planted violations."""

import time
from collections.abc import Iterable, Sequence
from datetime import UTC, date, datetime
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

from harness.domain.change import SourceTree
from harness.domain.check import Check, Finding, Outcome, Samples, SampleTable
from harness.domain.errors import InputError
from harness.domain.policy import Rule
from harness.domain.stage import StageContext
from harness.stages.isolation.examples import Trial, try_rule
from harness.stages.isolation.judging import judge
from harness.stages.isolation.opt_in_graph import Graph, draw_opt_in
from harness.stages.isolation.opt_in_rules import check_graph, try_graph
from harness.stages.isolation.radius import measure_radius
from harness.stages.isolation.scan import (
    DEFAULT_MAX_FILE_BYTES,
    PackPart,
    Reading,
    Scan,
    apply_waivers,
    families_of,
    read_sources,
    read_through,
    scan_rules,
    surroundings_of,
)
from harness.stages.isolation.source import Source
from harness.stages.isolation.zone_rules import check_zones, try_zones
from harness.stages.isolation.zones import ZoneIndex

__all__ = ["run", "sample", "sample_on"]


class _Held(NamedTuple):
    """A change, read once for all families while its tree is open."""

    asked: tuple[object, ...]
    zones: ZoneIndex
    sources: dict[str, Source]
    readings: dict[str, Reading]


_READ: Final[WeakKeyDictionary[SourceTree, _Held]] = WeakKeyDictionary()


def sample(check: Check, context: StageContext) -> Samples:
    """Findings of one family on today's date."""
    return sample_on(check, context, datetime.now(UTC).date())


def run(check: Check, context: StageContext) -> Outcome:
    """`sample`, then `judge`."""
    return judge(check, sample(check, context))


def sample_on(check: Check, context: StageContext, today: date) -> Samples:
    """Findings of one family; waivers count that have not expired on `today`."""
    if context.tree is None:
        raise InputError(
            f"{check.id} reads the repository, and none was given; run it where that is (--repo DIR)"
        )
    started = time.monotonic()
    family = str(check.subject)
    context.progress(f"isolation: {family} over {len(context.change.files)} files")
    held = _read(context)
    zones, sources, part = held.zones, held.sources, _part(context)
    is_pack = {path: part.has(source.file) for path, source in sources.items()}
    judged = [s for p, s in sources.items() if family in families_of(context.policy, is_pack[p])]
    if family == "zones":
        scan, trials = _scan_zones(context, sources, judged, zones)
    else:
        scan, trials = _scan_family(check, context, held, judged)
    graph = _draw(context, zones, part) if family == "opt_in" else Graph(())
    if family == "opt_in":
        added = {source.path: source.added for source in judged}
        extra = tuple(check_graph(graph, context.claim.switch, added))
        scan = Scan(scan.findings + extra, scan.counts)
        trials += tuple(try_graph())
    findings = tuple(apply_waivers(scan.findings, context.policy.waivers, today))
    return Samples(
        check=check.id,
        tier=context.tier,
        tables=(
            _files_table(sources, is_pack, {s.path for s in judged}),
            _rules_table(scan),
            _planted_table(trials),
            _selection_table(graph),
            SampleTable(name="sampled", columns=("on",), rows=((today.isoformat(),),)),
            *(_graph_tables(graph) if family == "opt_in" else ()),
            *(_radius_tables(context, judged, held) if family == "blast_radius" else ()),
        ),
        findings=findings,
        duration_s=round(time.monotonic() - started, 3),
    )


def _read(context: StageContext) -> _Held:
    """The changed files with what every family's rules find in them."""
    tree = context.tree
    assert tree is not None
    change = context.change
    asked = (change.base, change.head, context.zones, context.rules, context.policy, context.claim)
    held = _READ.get(tree)
    if held is None or held.asked != asked:
        zones = ZoneIndex(context.zones, frozenset(tree.paths("head")))
        sources = read_sources(context.change, tree, zones)
        held = _Held(asked, zones, sources, _read_through(context, tree, zones, sources))
        _READ[tree] = held
    return held


def _read_through(
    context: StageContext, tree: SourceTree, zones: ZoneIndex, sources: dict[str, Source]
) -> dict[str, Reading]:
    part, rules = _part(context), [rule for rule in context.rules if _applies(rule, context)]
    of_family = {
        is_pack: [rule for rule in rules if rule.family in families_of(context.policy, is_pack)]
        for is_pack in (True, False)
    }
    around = surroundings_of(sources, tree, zones, context.claim, DEFAULT_MAX_FILE_BYTES)
    wanted = [of_family[part.has(source.file)] for source in sources.values()]
    return read_through(tuple(sources.values()), wanted, around)


def _part(context: StageContext) -> PackPart:
    return PackPart(context.claim, context.pack.repository_prefix)


def _scan_zones(
    context: StageContext, sources: dict[str, Source], judged: Sequence[Source], zones: ZoneIndex
) -> tuple[Scan, tuple[Trial, ...]]:
    assert context.tree is not None
    allowed = context.policy.allowed_zones
    held = {source.path for source in judged}
    findings: list[Finding] = []
    for path, source in sources.items():
        findings += check_zones(path, source.file.old_path, zones, allowed if path in held else None)
    return Scan(tuple(findings), ()), tuple(try_zones(zones, context.tree.paths("head"), allowed))


def _scan_family(
    check: Check, context: StageContext, held: _Held, judged: Sequence[Source]
) -> tuple[Scan, tuple[Trial, ...]]:
    assert context.tree is not None
    rules = [rule for rule in context.rules if rule.family == check.subject and _applies(rule, context)]
    limits = {threshold.name: threshold.value for threshold in check.thresholds}
    max_file_bytes = int(limits.get("max_file_bytes", DEFAULT_MAX_FILE_BYTES))
    around = surroundings_of(held.sources, context.tree, held.zones, context.claim, max_file_bytes)
    trials = tuple(trial for rule in rules for trial in try_rule(rule))
    return scan_rules(rules, judged, around, held.readings), trials


def _applies(rule: Rule, context: StageContext) -> bool:
    """A rule about a feature counts where the claim keeps that feature."""
    feature = rule.id.removeprefix("keeps_")
    return rule.family != "features" or feature == rule.id or feature in context.claim.features


def _files_table(sources: dict[str, Source], is_pack: dict[str, bool], judged: set[str]) -> SampleTable:
    columns = (
        "path", "old_path", "zone", "old_zone", "is_pack", "is_judged", "status", "kind", "added_lines",
        "removed_lines",
    )  # fmt: skip
    rows = tuple(
        (
            path, s.file.old_path, s.zone, s.old_zone, is_pack[path], path in judged, s.file.status,
            s.file.kind.value, s.file.added_lines, s.file.removed_lines,
        )
        for path, s in sources.items()
    )  # fmt: skip
    return SampleTable(name="files", columns=columns, rows=rows)


def _rules_table(scan: Scan) -> SampleTable:
    rows = tuple((c.rule, c.severity, c.files_read, c.findings) for c in scan.counts)
    return SampleTable(name="rules", columns=("rule", "severity", "files_read", "findings"), rows=rows)


def _planted_table(trials: Iterable[Trial]) -> SampleTable:
    rows = tuple((t.rule, t.example, t.expected, t.found, t.is_right) for t in trials)
    return SampleTable(
        name="planted", columns=("rule", "example", "expected", "found", "is_right"), rows=rows
    )


def _draw(context: StageContext, zones: ZoneIndex, part: PackPart) -> Graph:
    """The opt-in of the claim's files at head."""
    tree = context.tree
    assert tree is not None
    paths = tuple(path for path in tree.paths("head") if part.holds(path))
    return draw_opt_in(context.claim.switch, zones, paths, lambda path: _readable(tree, path))


def _readable(tree: SourceTree, path: str) -> bytes | None:
    try:
        return tree.read("head", path)
    except InputError:  # over the size limit, of which the giant-file rule tells
        return None


def _selection_table(graph: Graph) -> SampleTable:
    """Selection and default of the switch; only the opt-in family looks for them."""
    return SampleTable(
        name="selection",
        columns=("role", "path", "line", "text"),
        rows=tuple((p.role, p.path, p.line, p.text) for p in graph.of("selection") + graph.of("default")),
    )


def _graph_tables(graph: Graph) -> tuple[SampleTable, ...]:
    columns = ("role", "path", "line", "text", "leads_to")
    return (
        SampleTable(
            name="opt_in_graph",
            columns=columns,
            rows=tuple((p.role, p.path, p.line, p.text, p.leads_to) for p in graph.places),
        ),
    )


def _radius_tables(context: StageContext, judged: Sequence[Source], held: _Held) -> tuple[SampleTable, ...]:
    assert context.tree is not None
    altered = tuple(a for source in judged for a in held.readings[source.path].altered)
    radius = measure_radius(judged, altered, context.tree, context.zones, held.zones)
    tables = (
        ("reach_by_zone", ("zone", "modules", "before", "after"), radius.zones),
        ("newly_reaching", ("path", "zone", "chain"), radius.newly),
        ("exercised", ("path", "added_lines", "direct_tests", "is_reached"), radius.exercised),
        ("named", ("path", "named_lines"), radius.named),
        ("altered", ("path", "line", "name", "what"), radius.altered),
        ("radius_missing", ("reason",), ((radius.missing,),) if radius.missing else ()),
    )
    return tuple(
        SampleTable(name=name, columns=columns, rows=tuple(map(tuple, rows)))
        for name, columns, rows in tables
    )
