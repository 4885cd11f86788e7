"""The tables of the README, from `accuracy.jsonl` and `sensitivity.jsonl`: `python -m k3_decode.canary.table`
prints them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from k3_decode.canary.faults import FAULTS, Fault
from k3_decode.canary.sensitivity import (
    MEASURES,
    RESULTS_FILE,
    SETS,
    Results,
    detected,
    figures,
    read_results,
    thresholds,
)

__all__ = [
    "ACCURACY_FILE",
    "read_accuracy",
    "render",
    "render_accuracy",
    "render_thresholds",
    "smallest_detected",
]

ACCURACY_FILE = Path(__file__).with_name("accuracy.jsonl")


_SHORT = ("chain_504", "mrcr_512")
_NAN_DRIFT = 10.0
"""Log-probabilities of NaN enter as a change of 1000; no finite fault moves them by 10 on average."""
_NOMINAL_ONLY = tuple(s.name for s in SETS if s.is_nominal_only)


def render(results: Results) -> str:
    """Markdown: what a fault of its nominal size does to each set, and the smallest size that each measure
    detects."""
    sets = _shown(results)
    lines = [
        "| fault, at its nominal size | "
        + " | ".join(f"{s}: exact, drift, shift" for s in sets)
        + "".join(f" | {m}" for m in MEASURES)
        + " |",
        "|---" * (len(sets) + 1 + len(MEASURES)) + "|",
    ]
    limits = {s: thresholds(results, s) for s in sets}
    for fault in FAULTS:
        cells = [_cell(results, s, f"{fault.name}/{fault.nominal:g}", limits[s]) for s in sets]
        found = [_smallest(results, limits, fault, m) for m in MEASURES]
        lines.append(
            f"| `{fault.name}` {fault.nominal:g} {fault.unit} | " + " | ".join([*cells, *found]) + " |"
        )
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


def read_accuracy(path: Path) -> list[dict[str, object]]:
    """What `accuracy.py` wrote."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def render_accuracy(entries: Sequence[Mapping[str, object]]) -> str:
    """Markdown: a row for each task, length and way of grading."""
    lines = ["| task | tokens | how | exact | at least (95 %) | smallest margin |", "|---" * 6 + "|"]
    for e in entries:
        task = f"{e['task']}, marked" if e["marked"] else e["task"]
        lines.append(
            f"| {task} | {e['tokens']} | {e['how']} | {e['exact']} of {e['questions']} | "
            f"{e['lower_bound']:.3f} | {e['smallest_margin']:.2f} |"
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
    found = {
        name: smallest_detected(results, name, fault, measure, limit)
        for name, limit in limits.items()
        if name not in _NOMINAL_ONLY
    }
    return "; ".join(f"{name}: {size:g}" for name, size in found.items() if size is not None) or "none"


def _shown(results: Results) -> list[str]:
    """Sets that were measured; a short one only where no longer one of its task was."""
    measured = [s for s in SETS if (s.name, "stock") in results]
    long_tasks = {s.task for s in measured if s.name not in _SHORT}
    return [s.name for s in measured if s.name not in _SHORT or s.task not in long_tasks]


def _mark(text: str, is_detected: bool) -> str:
    return f"**{text}**" if is_detected else text


if __name__ == "__main__":
    print(render_accuracy(read_accuracy(ACCURACY_FILE)), end="\n\n")
    held = read_results(RESULTS_FILE)
    print(render_thresholds(held), render(held), sep="\n\n")
