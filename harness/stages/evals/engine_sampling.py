"""What a real engine does on both paths, seen from inside it: tables out of the pack's own measurements.

Both arms run the same weights in the same engine; the rest of the arms are what the two are held to. Every
number is kept as it was told: log-probabilities of two batches token by token, replays and steps turn by
turn, layers step by step.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from harness.domain.check import Check, Samples, SampleTable
from harness.domain.errors import InputError
from harness.domain.record import Scalar
from harness.domain.stage import StageContext
from harness.engines.measured import MeasuredEngine, measure_arms
from harness.engines.served import FILE_VARIABLE, load_settings
from harness.engines.vllm_server import without_folders

__all__ = ["COLUMNS", "engine_tables", "sample_engine"]

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "forced": ("arm", "batch", "digest", "positions", "launches"),
    "told": ("arm", "batch", "request", "position", "token", "nats"),
    "decisions": ("arm", "batch", "path", "reason", "steps"),
    "layers": ("arm", "batch", "step", "layer", "kind", "kernels", "us"),
    "kernels": ("arm", "batch", "kernel", "launches", "us"),
    "replays": ("arm", "batch", "turn", "us"),
    "wall": ("arm", "batch", "turn", "us"),
    "settings": ("arm", "name", "value"),
}
"""`launches` are counted by the kernels along the forced tokens; `nats` is minus the log-probability, and
`us` of a layer runs from its first kernel to the next layer's."""
Row = tuple[Scalar, ...]


def sample_engine(check: Check, context: StageContext) -> Samples:
    """Samples of the check; an arm of the candidate's that came to nothing ends them as crashed."""
    place = os.environ.get(FILE_VARIABLE)
    settings = load_settings(Path(place)).measured if place else None
    if settings is None:
        raise InputError(
            f"{check.id} has engines measured, and nobody says how; write `measured` into the server "
            "settings (harness/engines/README.md) and name them with `--server FILE`"
        )
    part = hashlib.sha256(f"{check.digest()}:{context.change.head}".encode()).hexdigest()[:16]
    logs = context.logs / part
    arms, lost = measure_arms(settings, context.cache / "engines" / part, logs, context.progress)
    if lost:
        words = "; ".join(f"the {arm} engine: {why}" for arm, why in lost)
        return Samples(check=check.id, tier=context.tier, ended="crashed", detail=words[:600])
    facts = {str(arm.name): " ".join((*settings.common, *arm.arguments)) for arm in settings.arms}
    told = {int(word) for word in str(check.parameter("told")).split(",")}
    return Samples(check=check.id, tier=context.tier, tables=engine_tables(arms, facts, told))


def engine_tables(
    arms: Mapping[str, MeasuredEngine], commands: Mapping[str, str], told: set[int]
) -> tuple[SampleTable, ...]:
    """Every table; log-probabilities of the batches in `told`. Pure."""
    rows: dict[str, list[Row]] = {name: [] for name in COLUMNS}
    for name, engine in arms.items():
        rows["settings"].append((name, "arguments", without_folders(commands.get(name, ""))))
        rows["settings"] += [
            (name, f"selected.{key}", without_folders(json.dumps(value)))
            for key, value in sorted(engine.selected.items())
        ]
        counted = Counter(engine.decisions)
        rows["decisions"] += [(name, *key, steps) for key, steps in sorted(counted.items())]
        for batch, forced in engine.forced.items():
            ids = hashlib.sha256(json.dumps(forced.ids).encode()).hexdigest()[:16]
            positions = max((len(places) for places in forced.top), default=0)
            rows["forced"].append((name, batch, ids, positions, sum(forced.launches)))
            if batch in told:
                rows["told"] += _told_rows(name, batch, forced.top)
        for batch, cut in engine.cut.items():
            rows["layers"] += [(name, batch, *row) for row in cut.layers]
            rows["kernels"] += [(name, batch, *row) for row in cut.names]
        for table, found in (("replays", engine.replays), ("wall", engine.steps)):
            rows[table] += [
                (name, batch, turn, us)
                for batch, times in found.items()
                for turn, us in enumerate(times.all_us)
            ]
    return tuple(
        SampleTable(name=name, columns=columns, rows=tuple(rows[name])) for name, columns in COLUMNS.items()
    )


def _told_rows(arm: str, batch: int, top: tuple[tuple[dict[int, float], ...], ...]) -> Iterator[Row]:
    for request, places in enumerate(top):
        for position, likely in enumerate(places):
            for token, logprob in sorted(likely.items()):
                yield (arm, batch, request, position, token, max(0.0, -logprob))
