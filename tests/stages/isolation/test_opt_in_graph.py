"""The way from the switch to the return, with file and line."""

import pytest

from harness.documents import load_zone_map
from harness.domain.claim import Switch
from harness.stages.isolation.opt_in_graph import draw_opt_in
from harness.stages.isolation.opt_in_rules import try_graph
from harness.stages.isolation.zones import ZoneIndex

SWITCH = Switch(name="decode_backend", on="fast", off="auto", default="auto")
K3 = "vllm/models/kimi_k3/"
CONFIG = """\
from .names import AUTO

def fast_config(extra):
    backend = extra.get("decode_backend", AUTO) if isinstance(extra, dict) else AUTO
    if backend == AUTO:
        return None
    return Config()
"""
MODEL = """\
class Model:
    def __init__(self, extra):
        self.config = fast_config(extra)
        self.fast = None

    def build(self):
        self.fast = Fast(self.config)

    def forward(self, x):
        fast = self.fast
        if fast is not None:
            step = fast.plan(x)
            if step is not None:
                return fast.run(step)
        return self.stock(x)
"""
FAST = """\
class Fast:
    def plan(self, x):
        if x.rows > 64:
            return None
        return x
"""
FILES = {
    f"{K3}names.py": 'AUTO, FAST = "auto", "fast"\n',
    f"{K3}config.py": CONFIG,
    f"{K3}model.py": MODEL,
    f"{K3}fast.py": FAST,
}


def places(files: dict[str, str]) -> list[tuple[str, str, str]]:
    zones = ZoneIndex(load_zone_map("vllm"), frozenset(files))
    graph = draw_opt_in(SWITCH, zones, tuple(files), lambda path: files[path].encode())
    return [(p.role, p.where.removeprefix(K3), p.leads_to.replace(K3, "")) for p in graph.places]


def test_each_step_from_selection_to_return_is_drawn_with_its_line() -> None:
    assert places(FILES) == [
        ("selection", "config.py:4", "model.py:3"),
        ("default", "config.py:4", ""),
        ("state", "config.py:4", "config.py:5"),
        ("state", "model.py:3", "model.py:7"),
        ("state", "model.py:7", "model.py:11"),
        ("guard", "config.py:5", "config.py:6"),
        ("guard", "model.py:11", "model.py:15"),
        ("decline", "fast.py:4", "model.py:15"),
        ("return", "config.py:6", ""),
        ("return", "model.py:15", ""),
    ]


def test_the_default_is_evaluated_through_the_names_that_hold_it() -> None:
    zones = ZoneIndex(load_zone_map("vllm"), frozenset(FILES))
    graph = draw_opt_in(SWITCH, zones, tuple(FILES), lambda path: FILES[path].encode())
    assert [place.text for place in graph.of("default")] == ["'auto'"]


def test_a_pack_that_decides_by_reason_codes_declines_at_each_of_them() -> None:
    text = (
        "class Reason(StrEnum):\n    TAKEN = 't'\n    OFF = 'o'\n    ROWS = 'r'\n\n\n"
        "class Dispatcher:\n    def __init__(self):\n        self.is_on = False\n\n"
        "    def decide(self, x):\n        reason = self._reason(x)\n"
        '        return Decision(path="optimised" if reason is Reason.TAKEN else "stock")\n\n'
        "    def _reason(self, x):\n        if not self.is_on:\n            return Reason.OFF\n"
        "        return Reason.ROWS if x.rows > 8 else Reason.TAKEN\n"
    )
    found = places({f"{K3}dispatch.py": text})
    assert [p for p in found if p[0] in ("selection", "default", "decline")] == [
        ("selection", "dispatch.py:13", ""),
        ("default", "dispatch.py:9", ""),
        ("decline", "dispatch.py:17", "dispatch.py:13"),
        ("decline", "dispatch.py:18", "dispatch.py:13"),
    ]


def test_a_tree_that_reads_no_switch_gives_no_graph_and_one_that_does_not_parse_no_crash() -> None:
    assert places({f"{K3}model.py": "rows = 1\n"}) == []
    assert places({f"{K3}model.py": 'x = extra.get("decode_backend"\n'}) == []


@pytest.mark.parametrize("trial", tuple(try_graph()), ids=lambda trial: f"{trial.rule}: {trial.example}")
def test_graph_rules_find_what_is_planted_and_nothing_else(trial: object) -> None:
    assert trial.is_right  # type: ignore[attr-defined]  # a Trial
