"""What a graph of the opt-in may not show: a second selection, no way back, state that a decline leaves.

Only what the change adds is a finding: a place that was there before is drawn, and judged where it was added.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from typing import Final

from harness.domain.check import Finding, Severity
from harness.domain.claim import Switch
from harness.stages.isolation.examples import EXAMPLE_SWITCH, EXAMPLE_ZONES, Trial
from harness.stages.isolation.opt_in_graph import Graph, Place, draw_opt_in, is_together
from harness.stages.isolation.zones import ZoneIndex

__all__ = ["GRAPH_RULES", "check_graph", "try_graph"]

SECOND: Final = "second_selection"
NO_RETURN: Final = "no_return"
LEFT: Final = "state_before_decline"
GRAPH_RULES: Final = (SECOND, NO_RETURN, LEFT)
Added = Mapping[str, frozenset[int]]
"""Added lines by path."""
_READ: Final = "def backend(extra):\n    return extra.get('decode_backend', 'auto')\n"
_OWNER: Final = (
    "from model.switch import backend\n\n\nclass Model:\n    def __init__(self, extra):\n"
    "        self.fast = Fast() if backend(extra) != 'auto' else None\n"
    "        self.mode = backend(extra)\n\n"
)
_FORWARD: Final = (
    "    def forward(self, x):\n        if self.mode != 'auto':\n            step = self.fast.plan(x)\n"
    "            if step is not None:\n                return self.fast.take(step)\n"
    "        return self.stock(x)\n\n\n"
)
_PLAN: Final = (
    "class Fast:\n    def plan(self, x):\n        if x.rows > 8:\n            return None\n        return x\n"
)
_LEAVES: Final = _PLAN.replace("        if x.rows", "        self.rows = x.rows\n        if x.rows")
_TREES: Final[tuple[tuple[str, str, bool, dict[str, str]], ...]] = (
    (SECOND, "two places read the switch", True, {"model/switch.py": _READ, "model/other.py": _READ}),
    (SECOND, "one place a platform", False, {"model/amd/switch.py": _READ, "model/nvidia/switch.py": _READ}),
    (
        NO_RETURN, "a guard after which nothing runs", True,
        {"model/switch.py": _READ, "model/decode.py": _OWNER + "    def forward(self, x):\n"
         "        if self.mode != 'auto':\n            return self.fast.take(x)\n"},
    ),
    (NO_RETURN, "stock runs after the guard", False,
     {"model/switch.py": _READ, "model/decode.py": _OWNER + _FORWARD + _PLAN}),
    (LEFT, "a plan writes before it declines", True,
     {"model/switch.py": _READ, "model/decode.py": _OWNER + _FORWARD + _LEAVES}),
    (LEFT, "a plan that only looks", False,
     {"model/switch.py": _READ, "model/decode.py": _OWNER + _FORWARD + _PLAN}),
)  # fmt: skip
"""(rule, what it shows, whether it must be found, files)."""


def check_graph(graph: Graph, switch: Switch, added: Added) -> Iterator[Finding]:
    """Findings about places that the change adds."""
    selections = graph.of("selection")
    pairs = [(a, b) for a, b in combinations(selections, 2) if is_together(a.path, b.path)]
    for one, other in pairs:
        new, old = (one, other) if _is_added(one, added) else (other, one)
        if _is_added(new, added):
            yield _finding(
                SECOND, Severity.ERROR, new,
                f"{switch.name} is read here and at {old.where}; with two selections nobody can say which "
                "one a step took",
                "read the switch in one place and hand its value on",
            )  # fmt: skip
    guards = [place for place in graph.of("guard") if _is_added(place, added)]
    if guards and any(_is_added(s, added) for s in selections) and not graph.of("return"):
        yield _finding(
            NO_RETURN, Severity.ERROR, guards[0],
            "after this guard nothing runs when it does not hold, so that a decline has no way back to stock",
            "call the stock path where the guard does not hold",
        )  # fmt: skip
    for place in graph.of("left"):
        if _is_added(place, added):
            yield _finding(
                LEFT, Severity.WARNING, place,
                f"written before the decline at {place.leads_to}; stock finds it changed",
                "decide first and write afterwards",
            )  # fmt: skip


def try_graph() -> Iterator[Trial]:
    """Planted trees through the same code."""
    for rule, name, expected, files in _TREES:
        zones = ZoneIndex(EXAMPLE_ZONES, frozenset(files))
        graph = draw_opt_in(EXAMPLE_SWITCH, zones, tuple(files), _reader(files))
        added = {path: frozenset(range(1, text.count("\n") + 2)) for path, text in files.items()}
        found = any(f.rule == rule for f in check_graph(graph, EXAMPLE_SWITCH, added))
        yield Trial(rule, name, expected, found, None, None)


def _reader(files: Mapping[str, str]) -> Callable[[str], bytes | None]:
    return lambda path: files[path].encode() if path in files else None


def _is_added(place: Place, added: Added) -> bool:
    return place.line in added.get(place.path, frozenset())


def _finding(rule: str, severity: Severity, place: Place, message: str, remedy: str) -> Finding:
    return Finding(
        rule=rule, severity=severity, message=message, path=place.path, line=place.line,
        excerpt=place.text[:300], remedy=remedy,
    )  # fmt: skip
