"""The rules of the audit, over facts. Pure: the same rows give the same findings anywhere.

Only weights may be touched before the wait for preceding grids, and only weights may be read non-coherently.
What an address may come from is an upper bound, so an access that may be a weight or an activation counts as
an activation.
"""

from collections.abc import Iterable, Mapping, Sequence

from harness.domain.check import Finding, Severity
from harness.stages.audit.facts import EXCHANGED, AccessFact, ProgramFact

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
    "mailbox_read_unguarded": (
        "reads {parameters} ({roles}) on a path that has acquired no flag ({guard}), and not as a repeated "
        "strong load that carries its own mark",
        "acquire the flag at GPU or system scope on every path to the read, or poll the data itself by "
        "volatile or relaxed loads until its mark is there",
    ),
    "weak_exchange": (
        "writes {parameters} ({roles}) by a weak store, which other ranks may see late, torn or never",
        "store by st.release, st.relaxed.sys or st.volatile; a flag is released after its data",
    ),
    "weak_flag_read": (
        "reads {parameters} ({roles}) by a weak load, which the compiler may keep in a register",
        "poll by ld.acquire at GPU or system scope",
    ),
    "narrow_offset": (
        "addresses {parameters} ({roles}) by a 32-bit product of an index read from memory and {factor}",
        "widen the index to 64 bits before it is multiplied: at an index of 2**20 the product passes 2**31",
    ),
    "multicast": (
        "{figure} multicast instructions; the claim allows {limit}",
        "use per-peer stores, or declare multicast in the claim",
    ),
    "wide_loads": (
        "{figure} % of global loads move 16 bytes or more a thread; expected at least {limit} %",
        "find the load that became narrow (alignment, type, layout), or commit the new figure",
    ),
    "block_size": (
        "{figure} threads a block; at most {limit}",
        "launch smaller blocks",
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
NARROW_FACTOR = 2**31 // 2**20
"""Smallest factor by which an index of 2**20 (tokens of the longest context, pages of a full cache) passes
2**31.
"""
AT_LEAST = frozenset({"wide_loads"})
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
    `registers`, `shared_memory`, `cluster`, `multicast`, `block_size`, and `wide_loads`, a least share where
    the others are most; `figures` has the same names and `local_accesses`.
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
        if (figures[rule] < limit if rule in AT_LEAST else figures[rule] > limit)
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
    if access.narrow_factor is not None and not 0 < access.narrow_factor < NARROW_FACTOR:
        found.append("narrow_offset")
    return found + (_exchange_faults(access, roles) if roles & EXCHANGED else [])


def _exchange_faults(access: AccessFact, roles: frozenset[str]) -> list[str]:
    """What is wrong with an access to memory that others write or read while this kernel runs."""
    is_weak = access.order == "weak"
    if access.kind in ("store", "atomic"):
        return ["weak_exchange"] if is_weak else []
    if access.kind != "load":
        return []
    if "flag" in roles and is_weak:
        return ["weak_flag_read"]
    carries_mark = not is_weak and access.is_repeated
    if "mailbox" in roles and access.guard in ("none", "polled") and not carries_mark:
        return ["mailbox_read_unguarded"]
    return []


def _finding(rule: str, same: list[AccessFact]) -> Finding:
    first = same[0]
    what, remedy = RULES[rule]
    message = what.format(
        parameters=first.parameters,
        roles=first.roles,
        guard=first.guard,
        factor=first.narrow_factor or "a stride",
    )
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
