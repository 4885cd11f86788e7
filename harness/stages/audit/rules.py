"""The rules of the audit, over facts. Pure: the same rows give the same findings anywhere.

Only weights may be touched before the wait for preceding grids, and only weights may be read non-coherently.
What an address may come from is an upper bound, so an access that may be a weight or an activation counts as
an activation.
"""

from collections.abc import Iterable, Mapping, Sequence

from harness.domain.check import Finding, Severity
from harness.stages.audit.facts import AccessFact, ProgramFact

__all__ = ["RULES", "access_findings", "program_findings", "unclassed"]

RULES: Mapping[str, tuple[str, str]] = {
    "load_before_wait": (
        "reads {parameters} ({roles}) on a path that has not waited for the previous grid",
        "move the load below griddepcontrol.wait and keep the compiler from hoisting it: a volatile "
        "statement with a memory clobber",
    ),
    "prefetch_before_wait": (
        "prefetches {parameters} ({roles}) on a path that has not waited for the previous grid",
        "prefetch only weights above griddepcontrol.wait",
    ),
    "store_before_wait": (
        "writes {parameters} ({roles}) on a path that has not waited for the previous grid, its reader",
        "move the store below griddepcontrol.wait",
    ),
    "non_coherent_load": (
        "reads {parameters} ({roles}) non-coherently, though a running grid may write it",
        "use a coherent load; ld.global.nc is for static weights only",
    ),
    "store_to_read_only": (
        "writes {parameters}, which the op declares as {roles}",
        "declare the parameter as state, output or workspace, or do not write it",
    ),
    "spill": (
        "{figure} bytes of registers spill to local memory ({local} local accesses); allowed: {limit}",
        "cut live registers, or commit the spill as expected with its measurement",
    ),
    "registers": (
        "{figure} registers a thread; expected at most {limit}",
        "find what grew, or commit the new figure",
    ),
    "shared_memory": (
        "{figure} bytes of shared memory; allowed: {limit}",
        "shrink stages, or commit the new figure",
    ),
    "cluster": (
        "launched with clusters of {figure} blocks; declared at most {limit}",
        "declare the cluster size",
    ),
}
"""By rule: what is wrong, and what to do."""
READ_ONLY = frozenset({"weight", "activation", "index"})


def unclassed(accesses: Iterable[AccessFact]) -> tuple[AccessFact, ...]:
    """Accesses whose address could not be traced to a parameter of known role."""
    return tuple(a for a in accesses if not a.roles)


def access_findings(programs: Sequence[ProgramFact], accesses: Iterable[AccessFact]) -> tuple[Finding, ...]:
    """Findings over classed accesses, equal ones at one line merged, in the order of the code."""
    dependent = {(p.subject, p.level): p.is_dependent is not False for p in programs}
    merged: dict[tuple[str, str, str, int | None, str], list[AccessFact]] = {}
    for access in accesses:
        for rule in _broken(access, dependent.get((access.subject, access.level), True)):
            merged.setdefault((rule, access.level, access.path, access.line, access.parameters), []).append(
                access
            )
    return tuple(_finding(rule, same) for (rule, *_), same in merged.items())


def program_findings(figures: Mapping[str, int], limits: Mapping[str, int]) -> tuple[Finding, ...]:
    """Findings on what a kernel costs. `limits` has an entry for each rule that applies: `spill`,
    `registers`, `shared_memory`, `cluster`; `figures` has the same names and `local_accesses`.
    """
    return tuple(
        Finding(
            rule=rule,
            severity=Severity.ERROR,
            message=RULES[rule][0].format(
                figure=figures[rule], limit=limit, local=figures.get("local_accesses", 0)
            ),
            remedy=RULES[rule][1],
        )
        for rule, limit in limits.items()
        if figures[rule] > limit
    )


def _broken(access: AccessFact, is_dependent: bool) -> list[str]:
    roles = frozenset(access.roles.split("+")) if access.roles else frozenset()
    if not roles:
        return []
    found = []
    is_static = roles == {"weight"}
    if is_dependent and access.is_before_wait and not is_static:
        found.append(
            {"load": "load_before_wait", "prefetch": "prefetch_before_wait"}.get(
                access.kind, "store_before_wait"
            )
        )
    if access.is_non_coherent and not is_static:
        found.append("non_coherent_load")
    if access.kind in ("store", "atomic") and roles <= READ_ONLY:
        found.append("store_to_read_only")
    return found


def _finding(rule: str, same: list[AccessFact]) -> Finding:
    first = same[0]
    what, remedy = RULES[rule]
    message = what.format(parameters=first.parameters, roles=first.roles)
    times = f", {len(same)} times" if len(same) > 1 else ""
    return Finding(
        rule=rule,
        severity=Severity.ERROR,
        message=f"{first.level} {first.opcode} {message}{times}",
        path=first.path or None,
        line=first.line,
        excerpt=first.opcode,
        remedy=remedy,
    )
