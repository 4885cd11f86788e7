"""The loss curve of a training log as an SVG: `python -m k3_decode.canary.curve LOG... --out
loss_curve.svg`."""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main", "render"]

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 760, 340, 60, 40
_SERIES = (
    ("mrcr_excess", "#1f77b4", "mrcr_canary"),
    ("chain_excess", "#d62728", "chain_canary"),
)
_LOWEST, _HIGHEST = 1e-4, 10.0


def render(entries: Sequence[dict[str, float]]) -> str:
    """SVG of excess loss (nats, logarithmic) over training minutes; `entries` are `train` events in order."""
    minutes = [e["elapsed_s"] / 60 for e in entries]
    last = max(minutes)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
    ]
    for power in range(-4, 2):
        y = _y(10.0**power)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">1e{power}</text>')
    for minute in range(math.floor(last) + 1):
        x = _x(minute, last)
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 18}" text-anchor="middle">{minute}</text>')
    for place, (key, colour, label) in enumerate(_SERIES):
        points = " ".join(
            f"{_x(m, last):.1f},{_y(e[key]):.1f}" for m, e in zip(minutes, entries, strict=True)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(f'<text x="{_WIDTH - 120}" y="{24 + 16 * place}" fill="{colour}">{label}</text>')
    parts.append(
        f'<text x="{_WIDTH / 2:.0f}" y="{_HEIGHT - 3}" text-anchor="middle">minutes of training</text>'
    )
    parts.append(f'<text x="{_LEFT}" y="14">loss less the entropy of its target, nats a token</text></svg>')
    return "\n".join(parts) + "\n"


def main(arguments: list[str] | None = None) -> None:
    """Command line; several logs follow one another on the time axis."""
    parser = argparse.ArgumentParser(prog="python -m k3_decode.canary.curve", description=__doc__)
    parser.add_argument("logs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(arguments)
    entries: list[dict[str, float]] = []
    for log in args.logs:
        before = entries[-1]["elapsed_s"] if entries else 0.0
        for line in log.read_text().splitlines():
            entry = json.loads(line)
            if entry["event"] == "train":
                entries.append({**entry, "elapsed_s": entry["elapsed_s"] + before})
    args.out.write_text(render(entries))


def _x(minute: float, last: float) -> float:
    return _LEFT + (_WIDTH - 10 - _LEFT) * minute / last


def _y(value: float) -> float:
    low, high = math.log10(_LOWEST), math.log10(_HIGHEST)
    share = (math.log10(min(max(value, _LOWEST), _HIGHEST)) - low) / (high - low)
    return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - 20) * share


if __name__ == "__main__":
    main()
