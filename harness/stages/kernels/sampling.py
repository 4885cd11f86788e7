"""Sample one op in one cell, or the pack's guard at the envelope's edges.

Tables (raw; judged elsewhere):
- `errors` (regime, output, token, stock_l2, optimised_l2, stock_worst, optimised_worst, ulp, least):
inexact outputs, state;
- `exact` (regime, output, elements, mismatches): outputs and state that must equal the oracle bit for bit;
- `mates`, `mates_exact`: the same for healthy requests in a step with a poisoned one;
- `touches` (regime, arm, argument, kind, bytes): what was changed that must not be, and outputs left
unwritten;
- `launches` (regime, counted): how far the launch counter rose;
- `repeats` (output, elements, differing): two runs of the candidate on the same inputs;
- `spread` (arm, over, output, elements, differing): how far either arm's own answers differ;
- `jitter` (reader, round, delay_us, is_cold, is_busy, output, elements, differing): on a GPU, behind a late
predecessor;
- `process` (arm, name): functions, flags and device settings that were replaced meanwhile;
- `operations` (arm, count, shared): torch operations, and the share of stock's that are among them;
- `control_errors`, `control_exact`, `control_touches`: the same, after the control's name, on a spoiled
result;
- `guard` (cell, must_take, takes): what the pack's guard says.
"""

import time

from harness.domain.cell import Cell
from harness.domain.check import Check, Samples, SampleTable
from harness.domain.pack import OpContract
from harness.domain.stage import StageContext
from harness.measure.spoil import Bounds, spoil
from harness.measure.spread import try_spread
from harness.measure.tamper import watched_process
from harness.measure.trial import Rows, Trial, release_memory, try_regime, without_gradients
from harness.stages.kernels.collectives import IMPLEMENTATION, sample_collective
from harness.stages.kernels.growth import GROWTH, sample_growth
from harness.stages.kernels.planning import edge_cells, outside_cells

__all__ = ["sample"]

ERRORS = (
    "regime", "output", "token", "stock_l2", "optimised_l2", "stock_worst", "optimised_worst", "ulp", "least",
)  # fmt: skip
EXACT = ("regime", "output", "elements", "mismatches")
TOUCHES = ("regime", "arm", "argument", "kind", "bytes")
COLUMNS = {
    "errors": ERRORS,
    "exact": EXACT,
    "mates": ERRORS,
    "mates_exact": EXACT,
    "touches": TOUCHES,
    "launches": ("regime", "counted"),
    "repeats": ("output", "elements", "differing"),
    "spread": ("arm", "over", "output", "elements", "differing"),
    "jitter": ("reader", "round", "delay_us", "is_cold", "is_busy", "output", "elements", "differing"),
    "process": ("arm", "name"),
    "operations": ("arm", "count", "shared"),
    "control_errors": ("control", *ERRORS),
    "control_exact": ("control", *EXACT),
    "control_touches": ("control", *TOUCHES),
    "guard": ("cell", "must_take", "takes"),
}


def sample(check: Check, context: StageContext) -> Samples:
    """Samples of one op in one cell, or of its guard."""
    if check.parameter("implementation") == IMPLEMENTATION:
        return sample_collective(check, context)
    begun = time.monotonic()
    rows = Rows()
    contract = next(o for o in context.pack.ops() if o.name == check.op)
    if dict(check.parameters).get("part") == GROWTH:
        return sample_growth(check, contract, context)
    cell = check.cell
    if cell is None:
        raise AssertionError(f"{check.id} was planned without a cell")
    if check.parameter("implementation") == "guard":
        _ask_guard(contract, cell, context, rows)
    elif check.parameter("model") is not None:
        _try_op(check, contract, cell, context, rows)
    tables = tuple(SampleTable(name=n, columns=COLUMNS[n], rows=tuple(r)) for n, r in rows.tables.items())
    return Samples(check=check.id, tier=context.tier, tables=tables, duration_s=time.monotonic() - begun)


def _try_op(check: Check, contract: OpContract, cell: Cell, context: StageContext, rows: Rows) -> None:
    trial = Trial(
        pack=context.pack,
        contract=contract,
        cell=cell,
        model=str(check.parameter("model")),
        implementation=str(check.parameter("implementation")),
        seed=int(check.parameter("seed") or 0),
        device="cpu" if cell.arch == "cpu" else "cuda",
    )
    bounds = Bounds(check.number("factor"), check.number("floor_ulp"), check.number("control_step"))
    with without_gradients(), watched_process(rows):
        for number, regime in enumerate(str(check.parameter("regimes")).split(",")):
            pair = try_regime(trial, regime, number, rows)
            if number == 0:
                if check.parameter("spread"):
                    try_spread(trial, regime, pair, rows)
                if trial.device != "cpu" and check.parameter("replays"):
                    from harness.measure.replays import try_replays  # needs a GPU

                    try_replays(trial, regime, pair, rows)
                spoil(trial, regime, pair, bounds, rows)
    release_memory()


def _ask_guard(contract: OpContract, cell: Cell, context: StageContext, rows: Rows) -> None:
    envelope = context.claim.envelope
    for inside in edge_cells(envelope, cell.arch, is_smoke=False):
        rows.add("guard", inside.label(), True, context.pack.admits_op(contract.name, inside))
    for outside in outside_cells(envelope, cell.arch):
        rows.add("guard", outside.label(), False, context.pack.admits_op(contract.name, outside))
