"""The sensitivity table of the README, from `sensitivity.jsonl`: `python -m k3_decode.canary.table` prints
it."""

import numpy as np

from k3_decode.canary.faults import FAULTS, Fault
from k3_decode.canary.sensitivity import (
    MEASURES,
    RESULTS_FILE,
    SETS,
    Results,
    detected,
    read_results,
    thresholds,
)

__all__ = ["render", "render_thresholds", "smallest_detected"]


_SHORT = ("chain_504", "mrcr_512")
_NOMINAL_ONLY = tuple(s.name for s in SETS if s.is_nominal_only)


def render(results: Results) -> str:
    """Markdown: what a fault of its nominal size does to each set, and the smallest size that each measure
    detects."""
    sets = _shown(results)
    lines = [
        "| fault, at its nominal size | "
        + " | ".join(f"{s}: exact, drift" for s in sets)
        + " | exact | drift | peak |",
        "|---" * (len(sets) + 4) + "|",
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
        "| set | questions | exact, stock | smallest margin | limit: exact lost | drift | peak |",
        "|---" * 7 + "|",
    ]
    for s in SETS:
        if (s.name, "stock") in results:
            stock, limit = results[s.name, "stock"], thresholds(results, s.name)
            lines.append(
                f"| {s.name} | {len(stock.exact)} | {np.mean(stock.exact):.3f} | {stock.margin:.2f} | "
                f"{limit['exact']:.3f} | {limit['drift']:.5f} | {limit['peak']:.4f} |"
            )
    return "\n".join(lines)


def smallest_detected(
    results: Results, set_name: str, fault: Fault, measure: str, limit: dict[str, float]
) -> float | None:
    """The smallest tried size such that it and all grosser ones are detected; None: not even the grossest."""
    found = None
    for size in fault.sizes:
        result = results.get((set_name, f"{fault.name}/{size:g}"))
        if result is None:
            continue
        if not detected(result, results[set_name, "stock"], limit)[measure]:
            break
        found = size
    return found


def _cell(results: Results, set_name: str, arm: str, limit: dict[str, float]) -> str:
    result = results.get((set_name, arm))
    if result is None:
        return "not run"
    stock = results[set_name, "stock"]
    seen = detected(result, stock, limit)
    drop = float(np.mean(stock.exact) - np.mean(result.exact))
    drift = float(np.mean(result.drift))
    shown = "NaN" if drift > 100 else f"{drift:.4f}"
    return f"{_mark(f'{-drop:+.2f}' if drop else '0', seen['exact'])}, {_mark(shown, seen['drift'])}"


def _smallest(results: Results, limits: dict[str, dict[str, float]], fault: Fault, measure: str) -> str:
    found = {
        name: smallest_detected(results, name, fault, measure, limit)
        for name, limit in limits.items()
        if name not in _NOMINAL_ONLY
    }
    return "; ".join(f"{name}: {size:g}" for name, size in found.items() if size is not None) or "none"


def _shown(results: Results) -> list[str]:
    """Sets that were measured; the short ones only where no longer ones were."""
    measured = [s.name for s in SETS if (s.name, "stock") in results]
    return [name for name in measured if name not in _SHORT] or measured


def _mark(text: str, is_detected: bool) -> str:
    return f"**{text}**" if is_detected else text


if __name__ == "__main__":
    held = read_results(RESULTS_FILE)
    print(render_thresholds(held), render(held), sep="\n\n")
