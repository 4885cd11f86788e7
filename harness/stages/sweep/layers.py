"""Whole layers of one rank, or its single ops: how they are timed, and what times and errors amount to.

A pack offers the layers (`domain.pack.LayerSlice`); this module orders the arms, plants the slow-down and
judges. The best of stock's ways is found first and is what the optimised arm is compared with. Tables beside
`timings` and `steps`: `stock_arms` (every way's time), `errors` (every token of the layers compared with
float64), `counts` (kernels, bytes and experts by arm), and of the instrument `known` (known durations as the
same units tell them), `flushed` (single passes behind a flush) and `gpu` (clocks, power and who else is on
the card, where NVML can be read).
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from harness.domain.check import Check, Figure, Samples, SampleTable
from harness.domain.pack import LayerCounts, LayerRequest
from harness.domain.record import Scalar
from harness.domain.stage import StageContext
from harness.measure.gpu_watch import GpuReading, GpuWatch, disturbance, watched_gpu
from harness.measure.interleaved import time_arms
from harness.measure.known_times import KnownTime
from harness.stages.sweep.likeness import has_threshold

__all__ = ["chosen_stock", "layer_figures", "layer_objection", "layer_unfit", "sample_layers"]

TRIALS = 5
"""Samples of each of stock's ways before one of them is chosen."""
LARGE_SET_CACHES = 3
"""A pass over more than so many caches finds none of it; over two of them single passes still scattered."""
LEAST_EXCESS_US = 3.0
"""Less than that cannot be told from the scatter of single passes; a set of 20 MB shows by more."""
CACHE_BYTES = {"sm_90a": 50 * 2**20}
"""L2 of an architecture; `LARGEST_CACHE_BYTES` for any other."""
LARGEST_CACHE_BYTES = 126e6
"""Of the claimed architectures: sm_103a's L2."""
CACHE_MARGIN = 1.25
"""A longer excess than the whole cache saves, by this much, has another cause: single passes scatter."""
ALONE_MARGIN = 1.1
"""By how much more than stock's passes another arm's may slow down alone: clocks and memory slow both."""
KNOWN = "known"
"""In `flushed`: the short known duration, beside the arms."""


def sample_layers(check: Check, context: StageContext) -> Samples:
    """Times, errors and counts of one cell."""
    from harness.measure.layers import (
        card_uuid,
        flushed_known_times,
        flushed_times,
        graph_unit,
        known_graph_times,
        slowed_unit,
    )

    request = _request(check, str(context.cache))
    with closing(context.pack.open_layers(request)) as layers, watched_gpu(card_uuid()) as watch:
        known = known_graph_times(request.layers)
        errors = tuple((e.arm, e.layer, e.token, e.error) for e in layers.errors())

        def unit(arm: str) -> Any:
            return graph_unit(layers.replay(arm), lambda: layers.reset(arm), request.layers)

        trials = {name: unit(name) for name in layers.stock_arms}
        first = {name: statistics.median(trial() for _ in range(TRIALS)) for name, trial in trials.items()}
        best = min(first, key=lambda name: first[name])
        stock = trials[best]
        planted = slowed_unit(
            layers.replay(best),
            lambda: layers.reset(best),
            request.layers,
            first[best],
            check.number("planted_slowdown"),
        )
        units = {"stock": stock, "optimised": unit("optimised"), "null": stock, "slow": planted}
        rows = time_arms(units, int(check.number("blocks")), partial(_looked, watch))
        cold = {"stock": best, "optimised": "optimised"}
        flushed = {
            arm: flushed_times(layers.replay(way), partial(layers.reset, way), request.layers)
            for arm, way in cold.items()
        } | {KNOWN: flushed_known_times(request.layers)}
        counts = {"stock": layers.counts(best), "optimised": layers.counts("optimised")}
        read = layers.read_gb_per_s()
    path = "optimised" if counts["optimised"].is_optimised else "stock"
    return Samples(
        check=check.id,
        tier=context.tier,
        tables=(
            SampleTable(name="timings", columns=("arm", "block", "us"), rows=rows),
            SampleTable(
                name="steps",
                columns=("arm", "phase", "path", "tokens"),
                rows=(("optimised", "decode", path, request.batch),),
            ),
            SampleTable(
                name="stock_arms",
                columns=("name", "us", "is_chosen"),
                rows=tuple((name, us, name == best) for name, us in first.items()),
            ),
            SampleTable(name="errors", columns=("arm", "layer", "token", "error"), rows=errors),
            SampleTable(
                name="counts", columns=("arm", "name", "value"), rows=tuple(_count_rows(counts, read))
            ),
            SampleTable(name="known", columns=KnownTime._fields, rows=known),
            SampleTable(
                name="flushed",
                columns=("arm", "number", "us"),
                rows=tuple((arm, n, us) for arm, times in flushed.items() for n, us in enumerate(times)),
            ),
            SampleTable(
                name="gpu",
                columns=GpuReading._fields,
                rows=() if watch is None else tuple(watch.readings[1:]),
            ),
        ),
    )


def layer_unfit(check: Check, samples: Samples, times: Mapping[str, float]) -> str | None:
    """Why the times are no evidence of anything, in words; None where they are. `times`: median by arm."""
    if has_threshold(check, "cold_tolerance") and (warm := _too_warm(check, samples, times)):
        return warm
    table = samples.table("gpu")
    return None if table is None else disturbance(table.rows)


def layer_objection(check: Check, samples: Samples, optimised_us: float, noise: float) -> str | None:
    """What makes a cell FAIL whatever its ratio: a token too far from float64, or a time that memory
    does not allow.
    """
    bad = _worse_tokens(check, samples)
    if bad:
        factor = check.number("error_factor")
        return f"{len(bad)} tokens are further from float64 than {factor:g} x stock: {', '.join(bad[:3])}"
    share = _roofline(samples, optimised_us)
    if share is not None and share > 1 + noise:
        return f"faster than memory: {share:.0%} of the read rate measured beside it"
    return None


def layer_figures(samples: Samples, optimised_us: float, stock_us: float) -> tuple[Figure, ...]:
    """Kernels, bytes, experts, errors and the fraction of the read roofline."""
    counts = _counts(samples)
    found = [
        Figure(name=f"{arm}_{name}", value=value, note="a layer, of one graph replay")
        for (arm, name), value in sorted(counts.items())
        if name != "read_gb_per_s"
    ]
    for arm, us in (("stock", stock_us), ("optimised", optimised_us)):
        share = _roofline(samples, us, arm)
        found.append(
            Figure(
                name=f"{arm}_roofline",
                value=share,
                missing=None if share is not None else "no read rate was measured",
                note="bytes that the arm's design must move over its time, of the read rate in the same run",
            )
        )
    for arm, errors in _errors(samples).items():
        found.append(
            Figure(name=f"{arm}_worst_error", value=max(errors.values()), note="relative L2 of a token")
        )
    return tuple(found)


def chosen_stock(samples: Samples) -> str | None:
    """Which of stock's ways was compared with."""
    table = samples.table("stock_arms")
    rows = [] if table is None else table.records()
    return next((str(row["name"]) for row in rows if row["is_chosen"]), None)


def _request(check: Check, cache: str) -> LayerRequest:
    cell = check.cell
    if cell is None:
        raise AssertionError(f"{check.id} was planned without a cell")
    return LayerRequest(
        kind=str(check.parameter("kind")),
        layout=str(check.parameter("layout")),
        tp=cell.tp,
        batch=cell.batch,
        context=cell.context,
        layers=int(check.parameter("layers") or 1),
        seed=int(check.parameter("seed") or 0),
        cache=cache,
    )


def _looked(watch: GpuWatch | None, rows: Sequence[tuple[str, int, float]]) -> bool:
    """One reading of the card behind some blocks; never ends the timing."""
    if watch is not None:
        watch.look(rows[-1][1])
    return False


def _too_warm(check: Check, samples: Samples, times: Mapping[str, float]) -> str | None:
    """Where passes in a row are quicker than single ones behind a flush, although by their bytes nothing
    could stay in the cache from one to the next; and where by more than a cache can save, and by more than
    stock's passes, as work that is left out in a row would do.
    """
    cache_bytes = CACHE_BYTES.get(check.cell.arch, LARGEST_CACHE_BYTES) if check.cell else LARGEST_CACHE_BYTES
    table = samples.table("flushed")
    rows = () if table is None else table.rows
    if not rows:
        return "no pass was timed behind a flush of the cache, so nobody knows whether its data was cold"
    counts, layers = _counts(samples), int(check.parameter("layers") or 1)
    each: dict[str, list[float]] = {}
    for row in rows:
        each.setdefault(str(row[0]), []).append(float(row[2] or 0.0))
    behind = {arm: statistics.median(single) for arm, single in each.items()}
    alone: dict[str, float] = {}
    for arm, us in times.items():
        moved, read = counts.get((arm, "moved_bytes"), 0.0), counts.get((arm, "read_gb_per_s"), 0.0)
        if not read:
            return f"no read rate was measured beside {arm}, so nobody knows what its passes may take"
        if moved * layers < LARGE_SET_CACHES * cache_bytes:
            continue
        if arm not in behind or KNOWN not in behind:
            return f"{arm} was not timed behind a flush of the cache, nor was a known duration"
        # A single pass also waits for its own launch, as the known one does.
        excess_us = (behind[arm] - us - behind[KNOWN] + _told_short(samples)) * layers
        least_us = max(LEAST_EXCESS_US, check.number("cold_tolerance") * moved / read / 1e3)
        most_us = CACHE_MARGIN * cache_bytes / read / 1e3
        alone[arm] = (
            (min(each[arm]) - min(each[KNOWN]) + _told_short(samples)) / us if excess_us > most_us else 1.0
        )
        if least_us < excess_us <= most_us:
            return (
                f"a pass of {arm} takes {excess_us:.1f} us longer behind a flush of the cache than in a row, "
                f"and by its {moved / 1e6:.0f} MB a layer it should not: its data stayed in the cache"
            )
    for arm, longer in alone.items():
        if longer > ALONE_MARGIN * max(1.0, alone.get("stock", 1.0)):
            return (
                f"the quickest pass of {arm} alone takes {longer:.2f}x of one in a row, and stock's "
                f"{alone.get('stock', 1.0):.2f}x: in a row it does less"
            )
    return None


def _told_short(samples: Samples) -> float:
    table = samples.table("known")
    rows = [] if table is None else table.records()
    return next((float(row["told_us"] or 0.0) for row in rows if row["name"] == "short"), 0.0)


def _count_rows(counts: dict[str, LayerCounts], read: float) -> Iterator[tuple[Scalar, ...]]:
    for arm, found in counts.items():
        for name in ("kernels", "prefetches", "memory_operations", "experts", "moved_bytes"):
            yield arm, name, float(getattr(found, name))
        yield arm, "read_gb_per_s", read


def _counts(samples: Samples) -> dict[tuple[str, str], float]:
    table = samples.table("counts")
    rows = [] if table is None else table.records()
    return {(str(row["arm"]), str(row["name"])): float(row["value"] or 0.0) for row in rows}


def _errors(samples: Samples) -> dict[str, dict[tuple[int, int], float]]:
    """Error by (layer, token) of each arm."""
    table = samples.table("errors")
    found: dict[str, dict[tuple[int, int], float]] = {}
    for row in [] if table is None else table.records():
        place = (int(row["layer"] or 0), int(row["token"] or 0))
        found.setdefault(str(row["arm"]), {})[place] = float(row["error"] or 0.0)
    return found


def _worse_tokens(check: Check, samples: Samples) -> list[str]:
    errors = _errors(samples)
    factor, floor = check.number("error_factor"), check.number("error_floor")
    bad = []
    for (layer, token), error in sorted(errors.get("optimised", {}).items()):
        stock = errors.get("stock", {}).get((layer, token))
        if stock is None or error > factor * stock + floor:
            beside = "stock has none" if stock is None else f"stock {stock:.2e}"
            bad.append(f"layer {layer} token {token}: {error:.2e} ({beside})")
    return bad


def _roofline(samples: Samples, us: float, arm: str = "optimised") -> float | None:
    counts = _counts(samples)
    moved, read = counts.get((arm, "moved_bytes")), counts.get((arm, "read_gb_per_s"))
    return moved / us / 1e3 / read if moved and read else None
