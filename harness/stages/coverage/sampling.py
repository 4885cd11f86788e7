"""Run the arms of a coverage check and keep what each witness says of them. Nothing is judged here.

`probe` opens sessions and keeps ledgers, counters and traces; this module says which arms each kind of check
needs. Kinds about a request's life are in `requests`, run-time isolation in `isolation`.
"""

from contextlib import closing

from harness.domain.cell import Cell
from harness.domain.check import Check, Outcome, Samples, SampleTable
from harness.domain.pack import Arm, LayerRequest
from harness.domain.stage import StageContext
from harness.stages.coverage.causal import sample_causal
from harness.stages.coverage.judging import judge
from harness.stages.coverage.probe import (
    DRAWN_LAYER,
    Probe,
    Row,
    divergences,
    kernel_rows,
    span_rows,
    trace_tables,
)
from harness.stages.coverage.rebuild import sample_rebuild
from harness.stages.coverage.requests import (
    sample_feature,
    sample_prefix,
    sample_reuse,
    sample_uneven,
    sample_verify,
)
from harness.stages.coverage.state import sample_ledger, sample_state
from harness.stages.coverage.transitions import sample_transition

__all__ = ["run", "sample"]

CONTROL_STEPS = 6
"""Of a long run's switched-off arm, which shows nothing more in its hundredth step."""


def run(check: Check, context: StageContext) -> Outcome:
    """`sample` and `judge` in sequence."""
    return judge(check, sample(check, context))


def sample(check: Check, context: StageContext) -> Samples:
    """Samples of one coverage check."""
    recorders = {
        "path": _sample_path,
        "decline": _sample_decline,
        "uneven": sample_uneven,
        "poison": _sample_poison,
        "transition": sample_transition,
        "state": sample_state,
        "ledger": sample_ledger,
        "verify": sample_verify,
        "prefix": sample_prefix,
        "reuse": sample_reuse,
        "feature": sample_feature,
        "collective": _sample_collective,
        "layer": _sample_layer,
        "rebuild": sample_rebuild,
        "causal": sample_causal,
    }
    tables = recorders[str(check.parameter("kind"))](Probe(check, context))
    return Samples(check=check.id, tier=context.tier, tables=tables)


def _sample_path(probe: Probe) -> tuple[SampleTable, ...]:
    """Both arms, each traced, with the digest of the build that ran it."""
    is_traced = bool(probe.check.parameter("is_traced"))
    builds: list[Row] = []
    results = {}
    arms: tuple[tuple[str, Arm], ...] = (("on", "optimised"), ("off", "stock"))
    for label, arm in arms:
        if label == "off":
            probe.steps = min(probe.steps, CONTROL_STEPS)
        is_wanted = is_traced and (label == "on" or bool(probe.check.parameter("is_drawn")))
        results[label] = probe.run_arm(label, arm, is_traced=is_wanted)
        builds.append((label, _build_digest(probe.context)))
    table = SampleTable(name="builds", columns=("arm", "digest"), rows=tuple(builds))
    on = [row[: len(ref)] for ref, row in zip(results["off"], results["on"], strict=True)]
    compared = divergences({"on": (results["off"], on)})
    return (*probe.tables(), *probe.traces(), table, compared)


def _sample_decline(probe: Probe) -> tuple[SampleTable, ...]:
    on = probe.run_arm("on", "optimised")
    off = probe.run_arm("off", "stock")
    inside = Probe(probe.check, probe.context, Cell.model_validate({"arch": probe.cell.arch, "context": 24}))
    inside.run_arm("twin", "optimised")
    probe.ledger_rows += inside.ledger_rows
    probe.launch_rows += inside.launch_rows
    return (*probe.tables(), divergences({"on": (off, on)}))


def _sample_poison(probe: Probe) -> tuple[SampleTable, ...]:
    stock = probe.run_arm("off", "stock")
    clean = probe.run_arm("on", "optimised")
    poisoned = probe.run_arm("poison", "optimised", poisoned=probe.check.op)
    return (*probe.tables(), divergences({"clean": (stock, clean), "poison": (stock, poisoned)}))


def _sample_collective(probe: Probe) -> tuple[SampleTable, ...]:
    """Sums over ranks of parts whose exact sum is known, as each rank received them."""
    from harness.measure.rank_sums import observe_sums

    ranks = int(probe.check.parameter("ranks") or 0)
    device = "cpu" if probe.cell.arch == "cpu" else "cuda"
    rows = observe_sums(probe.context.pack.rank_sums, ranks, int(probe.check.parameter("seed") or 0), device)
    columns = ("arm", "case", "rank", "worst_ulp", "is_alike")
    return (SampleTable(name="sums", columns=columns, rows=tuple(rows)),)


def _sample_layer(probe: Probe) -> tuple[SampleTable, ...]:
    """Both arms of a pass over full-width layers, traced inside graph replays."""
    from harness.measure.kernel_trace import tracer_for

    check, pack, cell = probe.check, probe.context.pack, probe.cell
    request = LayerRequest(
        kind=str(check.parameter("layer_kind")), layout=str(check.parameter("layout")), tp=cell.tp,
        batch=cell.batch, context=cell.context, layers=int(check.parameter("layers") or 0),
        seed=int(check.parameter("seed") or 0), cache=str(probe.context.cache),
    )  # fmt: skip
    manifest = pack.layer_manifest(request)
    kernels: list[Row] = []
    traces: list[Row] = []
    spans: list[Row] = []
    with closing(pack.open_layers(request)) as layers:
        for label, arm in (("on", "optimised"), ("off", layers.stock_arms[0])):
            replay = layers.replay(arm)
            layers.reset(arm)
            replay()
            tracer = tracer_for(cell.arch, pack.root, (), ())
            for step in range(2):
                layers.reset(arm)
                with tracer.step(step):
                    replay()
            trace = tracer.result()
            for step in range(2):
                events = [event for event in trace.events if event.step == step]
                kernels += kernel_rows(label, step, events, manifest, None, is_listed=True)
            traces.append((label, *trace.sentinel, trace.blind, sum(trace.graph_launches.values()), 2, ""))
            spans += span_rows(label, trace.events, manifest, DRAWN_LAYER)
        counts = layers.counts("optimised")
    path = "optimised" if counts.is_optimised else "stock"
    steps = SampleTable(
        name="layer_steps", columns=("arm", "path", "tokens"), rows=(("on", path, cell.batch),)
    )
    return (*trace_tables(kernels, traces, spans), steps)


def _build_digest(context: StageContext) -> str:
    """Of the pack's modules as they are loaded in this process, and of their files as they lie on disk."""
    from harness.engines.packs import loaded_digest

    return loaded_digest(context.pack)
