"""What two engines' measurements amount to: a layer's kernels and microseconds, steps, and log-probabilities.

    python -m k3_decode.in_vllm.compare FOLDER [--json FILE]

Pure, over the files that `measure` wrote, plain or gzipped: `stock`, `optimised`, the controls `switch_off`
(the plugin loaded, the switch off) and `poison`, and stock's own spread: `spread` and `spread_other`, stock
with another attention, and with all its decode backends exchanged. NAME_even are the same with a router whose
ties are rare (`seeded_weights`), NAME12 with four more KDA layers.

A layer is cut where AttnRes runs: twice a layer and once before the head. Kernels of one graph overlap, so a
layer's time is from its first kernel's start to the next layer's, and never a sum. A profiler costs time by
the kernel; what the graph takes without one is under `replays`, and a KDA layer there is a quarter of what
four more of them add.
"""

import argparse
import gzip
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

__all__ = [
    "ARMS", "Agreement", "Part", "Span", "agreement", "kernel_names", "layer_spans", "load_arms", "parts_of",
    "render_table", "summarise",
]  # fmt: skip

OWN_ARMS = ("stock", "optimised", "switch_off", "spread", "spread_other", "poison")
EVEN, DEEPER, MORE_LAYERS = "_even", "12", 4
ARMS = (*OWN_ARMS, *(f"{name}{EVEN}" for name in OWN_ARMS), f"stock{DEEPER}", f"optimised{DEEPER}")

MIX = re.compile(r"_attn_res_kernel|_mix_rows_")
"""The AttnRes kernels of stock and of the pack."""
KINDS = {"dense": (0,), "mla_moe_first": (3,), "mla_moe": (7,), "kda_moe": (1, 2, 4, 5, 6)}
"""Layers of an eight-layer model by kind; the first MLA layer also plans its attention for the whole step."""
LAYERS = 8
MODEL = "model"
EDGE_STEPS = 1
"""Profiled steps left out at either end, whose neighbours were not recorded."""
Event = tuple[float, float, object, str]
"""Start and duration in microseconds, stream, name."""


class Span(NamedTuple):
    """A part of a step: kernels, and microseconds from its first to the next part's first."""

    kernels: float
    us: float


class Part(NamedTuple):
    """A layer of a profiled step, or as the place behind the last one the whole step of kind `model`."""

    step: int
    layer: int
    kind: str
    kernels: int
    us: float


class Agreement(NamedTuple):
    """Two arms along one forced text, over the tokens that both named among their likeliest."""

    prompt_max: float
    """Largest difference where the prompt's own step gave the logits, which is stock's in every arm."""
    mean: float
    p99: float
    largest: float
    shared: float
    """Tokens among the likeliest of both, on average."""
    positions: int
    same_first: int
    """Positions whose likeliest token is the same."""


def parts_of(events: Sequence[Event], layers: int = LAYERS) -> tuple[Part, ...]:
    """Every layer of whole steps, and the steps; raises `ValueError` where steps cannot be cut."""
    kinds = {layer: kind for kind, places in KINDS.items() for layer in places}
    found: list[Part] = []
    for step, own in enumerate(_steps(events, layers)):
        for layer in range(layers):
            begin, end = own[2 * layer], own[2 * layer + 2]
            us = events[end][0] - events[begin][0]
            found.append(Part(step, layer, kinds.get(layer, "kda_moe"), end - begin, us))
        last = events[own[-1]]
        us = last[0] + last[1] - events[own[0]][0]
        found.append(Part(step, layers, MODEL, own[-1] - own[0] + 1, us))
    return tuple(found)


def kernel_names(events: Sequence[Event], layers: int = LAYERS) -> dict[str, tuple[int, float]]:
    """Launches and microseconds by kernel inside the model's part of whole steps; raises `ValueError` where
    steps cannot be cut.
    """
    found: dict[str, tuple[int, float]] = {}
    for own in _steps(events, layers):
        for _, us, _, name in events[own[0] : own[-1] + 1]:
            count, total = found.get(name, (0, 0.0))
            found[name] = (count + 1, total + us)
    return found


def layer_spans(events: Sequence[Event], layers: int = LAYERS) -> dict[str, Span]:
    """By `layer N` and `model`, medians over whole steps; raises `ValueError` where steps cannot be cut."""
    found: dict[str, list[Span]] = {}
    for part in parts_of(events, layers):
        name = MODEL if part.kind == MODEL else f"layer {part.layer}"
        found.setdefault(name, []).append(Span(part.kernels, part.us))
    return {
        name: Span(median(s.kernels for s in spans), median(s.us for s in spans))
        for name, spans in found.items()
    }


def _steps(events: Sequence[Event], layers: int) -> Iterator[list[int]]:
    """Places of each whole step's AttnRes kernels; raises `ValueError` where there is none."""
    marks = [place for place, event in enumerate(events) if MIX.search(event[3])]
    each = 2 * layers + 1
    if not marks or len(marks) % each:
        raise ValueError(f"{len(marks)} AttnRes kernels are no whole steps of {each}")
    if len(marks) // each <= 2 * EDGE_STEPS:
        raise ValueError("too few steps were profiled")
    for step in range(EDGE_STEPS, len(marks) // each - EDGE_STEPS):
        yield marks[step * each : (step + 1) * each]


def agreement(one: Mapping[str, Any], other: Mapping[str, Any]) -> Agreement:
    """Two `forced` measurements of one batch; raises `ValueError` where they were not forced alike."""
    if not (one["is_forced"] and other["is_forced"]) or one["ids"] != other["ids"]:
        raise ValueError("the arms were not forced along one text")
    prompt, decode, shared, same = list[float](), list[float](), list[int](), list[bool]()
    for ours, theirs in zip(one["top"], other["top"], strict=True):
        for place, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            gaps = [abs(a[token] - b[token]) for token in a.keys() & b.keys()]
            if place == 0:
                prompt += gaps
                continue
            decode += gaps
            shared.append(len(gaps))
            same.append(max(a, key=a.get) == max(b, key=b.get))
    ranked = sorted(decode)
    return Agreement(
        prompt_max=max(prompt, default=0.0), mean=fmean(ranked), p99=ranked[int(0.99 * len(ranked))],
        largest=ranked[-1], shared=fmean(shared), positions=len(same), same_first=sum(same),
    )  # fmt: skip


def summarise(arms: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Everything that the arms in a folder amount to; what is absent or failed is said in words."""
    parts = ("layers", "steps_us", "replays_us", "launches", "agreement", "other")
    found: dict[str, Any] = {part: {} for part in parts}
    for name, arm in arms.items():
        for rows, told in arm.get("kernels", {}).items():
            found["layers"].setdefault(name, {})[rows] = _layers(told)
        found["steps_us"][name] = {r: round(t["us"]) for r, t in arm.get("steps", {}).items() if "us" in t}
        forced = arm.get("forced", {})
        found["launches"][name] = {r: sum(t["launches"]) for r, t in forced.items() if t.get("launches")}
        found["other"][name] = _other(arm)
        replays = arm.get("replays", {})
        found["replays_us"][name] = {r: round(t["us"], 1) for r, t in replays.items() if "us" in t}
        reference = _reference(name)
        if name != reference and reference in arms and forced:
            found["agreement"][name] = _agreements(arms[reference].get("forced", {}), forced)
    found["kda_layer_us"] = {
        name: {
            rows: round((us - found["replays_us"][name][rows]) / MORE_LAYERS, 1) for rows, us in deep.items()
        }
        for name in ("stock", "optimised")
        if (deep := found["replays_us"].get(f"{name}{DEEPER}")) and found["replays_us"].get(name)
    }
    return found


def render_table(found: Mapping[str, Any]) -> str:
    """Markdown for people."""
    return "\n".join([*_layer_rows(found), "", *_replay_rows(found), "", *_agreement_rows(found)])


def load_arms(folder: Path) -> dict[str, Any]:
    """The arms in a folder, each from NAME.json or NAME.json.gz."""
    found: dict[str, Any] = {}
    for name in ARMS:
        plain, packed = folder / f"{name}.json", folder / f"{name}.json.gz"
        if plain.is_file():
            found[name] = json.loads(plain.read_bytes())
        elif packed.is_file():
            found[name] = json.loads(gzip.decompress(packed.read_bytes()))
    return found


def _layer_rows(found: Mapping[str, Any]) -> list[str]:
    lines = _head("rows", "arm", "KDA+MoE", "MLA+MoE", "dense", "model, profiled", "step by wall clock")
    for batch in sorted({int(r) for rows in found["layers"].values() for r in rows}):
        for name, by_rows in found["layers"].items():
            told = by_rows.get(str(batch))
            if isinstance(told, dict):
                cells = [_words(told.get(kind)) for kind in ("kda_moe", "mla_moe", "dense", "model")]
                step = found["steps_us"][name].get(str(batch), "not timed")
                lines.append(_row(str(batch), name, *cells, f"{step} us"))
    return lines


def _replay_rows(found: Mapping[str, Any]) -> list[str]:
    """The model's graph and a KDA+MoE layer in it, without profiler: stock, optimised, gain."""
    lines = _head("rows", "model's graph", "gain", "a KDA+MoE layer", "gain")
    times, layers = found["replays_us"], found["kda_layer_us"]
    for rows in sorted(times.get("stock", {}).keys() & times.get("optimised", {}).keys(), key=int):
        cells = _pair(times["stock"][rows], times["optimised"][rows])
        both = [layers.get(name, {}).get(rows) for name in ("stock", "optimised")]
        lines.append(_row(rows, *cells, *(_pair(*both) if None not in both else ("not measured", ""))))
    return lines


def _agreement_rows(found: Mapping[str, Any]) -> list[str]:
    lines = _head(
        "arm", "against", "rows", "mean", "p99", "largest", "shared", "likeliest token", "prompt's step"
    )
    for name, by_rows in found["agreement"].items():
        for rows, told in by_rows.items():
            start = (name, _reference(name), rows)
            if isinstance(told, str):
                lines.append(_row(*start, told, "", "", "", "", ""))
                continue
            same = f"{told['same_first']} of {told['positions']}"
            numbers = (f"{told['mean']:.4f}", f"{told['p99']:.3f}", f"{told['largest']:.3f}")
            lines.append(_row(*start, *numbers, f"{told['shared']:.1f}", same, f"{told['prompt_max']:.3f}"))
    return lines


def _reference(name: str) -> str:
    """The stock arm of the same weights."""
    return f"stock{EVEN}" if name.endswith(EVEN) else "stock"


def _pair(stock: float, ours: float) -> tuple[str, str]:
    return f"{stock:.1f} / {ours:.1f} us", f"{stock / ours:.2f}x"


def _head(*names: str) -> list[str]:
    return [_row(*names), "|" + "---|" * len(names)]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _layers(told: Mapping[str, Any]) -> dict[str, Any] | str:
    if "events" not in told:
        return str(told.get("failed", "not profiled"))
    try:
        spans = layer_spans([(e[0], e[1], e[2], e[3]) for e in told["events"]])
    except ValueError as error:
        return str(error)
    found: dict[str, Any] = {"model": spans["model"]._asdict()}
    for kind, layers in KINDS.items():
        own = [spans[f"layer {layer}"] for layer in layers]
        found[kind] = {"kernels": median(s.kernels for s in own), "us": median(s.us for s in own)}
    return found


def _agreements(stock: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for rows in sorted(stock.keys() & other.keys(), key=int):
        try:
            found[rows] = agreement(stock[rows], other[rows])._asdict()
        except (KeyError, TypeError, ValueError) as error:
            found[rows] = f"not comparable: {error}"
    return found


def _other(arm: Mapping[str, Any]) -> dict[str, Any]:
    """Selections, draws and answers under a schema."""
    selected = arm.get("selected", {})
    texts = arm.get("structured", {}).get("texts", [])
    return {
        "decode": selected.get("decode"), "graphs": selected.get("graphs"),
        "draws": len(arm.get("draws", {}).get("rows", [])),
        "answers_under_schema": f"{sum(_is_answer(text) for text, _ in texts)} of {len(texts)}",
    }  # fmt: skip


def _is_answer(text: str) -> bool:
    try:
        told = json.loads(text)
    except ValueError:
        return False
    return isinstance(told, dict) and sorted(told) == ["is_fast", "name", "unit"]


def _words(span: Mapping[str, float] | None) -> str:
    return "not cut" if span is None else f"{span['kernels']:g} kernels, {span['us']:.1f} us"


def _main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    arms = load_arms(options.folder)
    found = summarise(arms)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    sys.stdout.write(render_table(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(_main())
