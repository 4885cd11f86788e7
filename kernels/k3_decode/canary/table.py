"""The tables of the README, from `accuracy.jsonl` and `sensitivity/`: `python -m k3_decode.canary.table`
prints them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from k3_decode.canary.accuracy import WAYS, lower_bound
from k3_decode.canary.faults import FAULTS, Fault
from k3_decode.canary.sensitivity import (
    MEASURES,
    RESULTS_FOLDER,
    SETS,
    Results,
    detected,
    figures,
    read_results,
    thresholds,
)

__all__ = [
    "ACCURACY_FILE",
    "Score",
    "read_accuracy",
    "render",
    "render_accuracy",
    "render_smallest",
    "render_thresholds",
    "smallest_detected",
]

ACCURACY_FILE = Path(__file__).with_name("accuracy.jsonl")
_SHORT = ("chain_504", "mrcr_512")
_NAN_DRIFT = 10.0
"""Log-probabilities of NaN enter as a change of 1000; no finite fault moves them by 10 on average."""
_NOMINAL_ONLY = tuple(s.name for s in SETS if s.is_nominal_only)


class Score(NamedTuple):
    """Answers of one task and length, graded in one way."""

    way: str
    device: str
    task: str
    tokens: int
    is_marked: bool
    right: int
    questions: int
    smallest_margin: float


def render(results: Results) -> str:
    """Markdown: what a fault of its nominal size does to each set."""
    sets = _shown(results)
    lines = ["| fault, at its nominal size | " + " | ".join(sets) + " |", "|---" * (len(sets) + 1) + "|"]
    limits = {s: thresholds(results, s) for s in sets}
    for fault in FAULTS:
        cells = [_cell(results, s, f"{fault.name}/{fault.nominal:g}", limits[s]) for s in sets]
        lines.append(f"| `{fault.name}` {fault.nominal:g} {fault.unit} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def render_smallest(results: Results) -> str:
    """Markdown: per fault and measure the smallest size detected in any set, and the sets that do."""
    limits = {s: thresholds(results, s) for s in _shown(results) if s not in _NOMINAL_ONLY}
    lines = ["| fault | " + " | ".join(MEASURES) + " | smallest tried |", "|---" * (len(MEASURES) + 2) + "|"]
    for fault in FAULTS:
        found = [_smallest(results, limits, fault, m) for m in MEASURES]
        lines.append(f"| `{fault.name}`, {fault.unit} | " + " | ".join(found) + f" | {fault.sizes[-1]:g} |")
    return "\n".join(lines)


def render_thresholds(results: Results) -> str:
    """Markdown: per set the fault-free scores and the limits above which a figure is a detection."""
    lines = [
        "| set | questions | exact, stock | smallest margin | limit: exact lost | drift | peak | shift |",
        "|---" * 8 + "|",
    ]
    for s in SETS:
        if (s.name, "stock") in results:
            stock, limit = results[s.name, "stock"], thresholds(results, s.name)
            share = sum(stock.exact) / len(stock.exact)
            lines.append(
                f"| {s.name} | {len(stock.exact)} | {share:.3f} | {stock.margin:.2f} | "
                f"{limit['exact']:.3f} | {limit['drift']:.5f} | {limit['peak']:.4f} | {limit['shift']:.6f} |"
            )
    return "\n".join(lines)


def read_accuracy(path: Path) -> list[Score]:
    """What `accuracy.py` wrote, its groups added up, in the order of `WAYS` and `LENGTHS`."""
    groups: dict[tuple[str, str, str, int, bool], dict[int, tuple[list[bool], float]]] = {}
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        key = entry["way"], entry["device"], entry["task"], entry["tokens"], entry["marked"]
        groups.setdefault(key, {})[entry["first"]] = entry["exact"], entry["smallest_margin"]
    return [
        Score(
            *key,
            right=sum(sum(exact) for exact, _ in parts.values()),
            questions=sum(len(exact) for exact, _ in parts.values()),
            smallest_margin=min(margin for _, margin in parts.values()),
        )
        for key, parts in sorted(groups.items(), key=lambda pair: _place(*pair[0]))
    ]


def _place(way: str, device: str, *question: object) -> tuple[object, ...]:
    return WAYS.index(way), device != "cuda", question


def render_accuracy(scores: Sequence[Score]) -> str:
    """Markdown: a row for each task, length and way of grading."""
    lines = ["| path | on | task | tokens | exact | at least (95 %) | smallest margin |", "|---" * 7 + "|"]
    for s in scores:
        task = f"{s.task}, marked" if s.is_marked else s.task
        place = "GPU" if s.device == "cuda" else "CPU"
        lines.append(
            f"| {s.way} | {place} | {task} | {s.tokens} | {s.right} of {s.questions} | "
            f"{lower_bound(s.right, s.questions):.3f} | {s.smallest_margin:.2f} |"
        )
    return "\n".join(lines)


def smallest_detected(
    results: Results, set_name: str, fault: Fault, measure: str, limit: dict[str, float]
) -> float | None:
    """The smallest size such that it and all grosser ones were tried and detected; None: not even the
    grossest."""
    found = None
    for size in fault.sizes:
        result = results.get((set_name, f"{fault.name}/{size:g}"))
        if result is None or not detected(result, results[set_name, "stock"], limit)[measure]:
            break
        found = size
    return found


def _cell(results: Results, set_name: str, arm: str, limit: dict[str, float]) -> str:
    result = results.get((set_name, arm))
    if result is None:
        return "not run"
    stock = results[set_name, "stock"]
    seen = detected(result, stock, limit)
    found = figures(result, stock)
    is_nan = found["drift"] > _NAN_DRIFT
    shown = {
        "exact": f"{-found['exact']:+.2f}" if found["exact"] else "0",
        "drift": "NaN" if is_nan else f"{found['drift']:.4f}",
        "shift": "NaN" if is_nan else f"{found['shift']:.5f}",
    }
    return ", ".join(_mark(text, seen[m]) for m, text in shown.items())


def _smallest(results: Results, limits: dict[str, dict[str, float]], fault: Fault, measure: str) -> str:
    found = {name: smallest_detected(results, name, fault, measure, limits[name]) for name in limits}
    sizes = [size for size in found.values() if size is not None]
    if not sizes:
        return "none"
    smallest = max(sizes, key=fault.sizes.index)
    return f"{smallest:g}: " + ", ".join(name for name, size in found.items() if size == smallest)


def _shown(results: Results) -> list[str]:
    """Sets that were measured; a short one only where no longer one of its task was."""
    measured = [s for s in SETS if (s.name, "stock") in results]
    long_tasks = {s.task for s in measured if s.name not in _SHORT}
    return [s.name for s in measured if s.name not in _SHORT or s.task not in long_tasks]


def _mark(text: str, is_detected: bool) -> str:
    return f"**{text}**" if is_detected else text


if __name__ == "__main__":
    print(render_accuracy(read_accuracy(ACCURACY_FILE)), end="\n\n")
    held = read_results(RESULTS_FOLDER)
    print(render_thresholds(held), render(held), render_smallest(held), sep="\n\n")
