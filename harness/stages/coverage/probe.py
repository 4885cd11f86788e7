"""Sessions of one coverage check, and what each witness said of them.

Tables: `steps` (the ledger by arm), `launches` (counted and expected by arm and op), and of traced arms
`kernels` (what a trace saw, the manifest declares and the counters count, by step), `traces` (whether the
trace was sound) and `spans` (one layer, event by event). Nothing is judged here.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from harness.domain.cell import Cell
from harness.domain.check import Check, SampleTable
from harness.domain.pack import Arm, Decision, KernelManifest, SessionRequest
from harness.domain.record import Scalar
from harness.domain.stage import StageContext

__all__ = ["DRAWN_LAYER", "Probe", "Row", "Tracing", "divergences", "trace_tables"]

Row = tuple[Scalar, ...]
STEP_COLUMNS = (
    "arm", "step", "phase", "requests", "rows", "tokens", "bucket", "path", "reason", "layers", "is_graph",
    "collective", "tp", "dcp", "drafts", "context_min", "context_max",
)  # fmt: skip
TRACE_COLUMNS = (
    "arm", "sentinel_seen", "sentinel_planted", "blind", "graph_launches", "steps", "collective",
)  # fmt: skip
KERNEL_COLUMNS = ("arm", "step", "op", "name", "place", "seen", "declared", "counted")
TRACED_STEPS = {"cpu": 1}
"""The last ones of an arm, by architecture: by then everything is compiled and captured."""
TRACED_REPLAYS = 2
"""On a GPU, where two replays must show the same."""
DRAWN_LAYER = 1
"""Layer 0 has a dense FFN and is like no other."""
MAX_SPANS = 400
MAX_NAME = 100


class Probe:
    """One check's texts and sessions; owns nothing that outlives a call."""

    def __init__(self, check: Check, context: StageContext, cell: Cell | None = None) -> None:
        if check.cell is None:
            raise AssertionError(f"{check.id} was planned without a cell")
        self.check, self.context, self.cell = check, context, cell or check.cell
        self.steps = self.planned_steps = int(check.parameter("steps") or 0)
        self.rows = self.cell.drafts + 1
        self.ledger_rows: list[Row] = []
        self.launch_rows: list[Row] = []
        self.kernel_rows: list[Row] = []
        self.trace_rows: list[Row] = []
        self.span_rows: list[Row] = []

    def request(self, arm: Arm, **fields: Any) -> SessionRequest:
        """The session that this cell asks for; `fields` stand in place of the cell's."""
        cell = self.cell
        is_gpu = self.check.parameter("implementation") == "cute"
        return SessionRequest.model_validate(
            {
                "model": self.check.parameter("model"), "arm": arm,
                "poison_scale": self.check.parameter("poison_scale"), "tp": cell.tp,
                "implementation": self.check.parameter("implementation"), "max_requests": cell.batch,
                "max_context": cell.context + self.steps * self.rows + 8, "drafts": cell.drafts,
                "kv_dtype": cell.kv_dtype, "seed": self.check.parameter("seed"), "is_graph": is_gpu,
                "cache": str(self.context.cache / "kernels") if is_gpu else "",
                **fields,
            }
        )  # fmt: skip

    def run_arm(
        self,
        label: str,
        arm: Arm,
        poisoned: str | None = None,
        switch: Callable[[int], Arm] | None = None,
        *,
        is_traced: bool = False,
    ) -> list[Any]:
        """Forced log-probabilities by request, with every witness's word kept under `label`."""
        request = self.request(arm, poisoned_op=poisoned)
        with self.session(label, request) as session:
            prompts, texts = self.texts(session.vocab_size)
            tracing = Tracing(self, label, request, session) if is_traced else None
            results = self.drive(session, prompts, texts, switch, tracing)
            if tracing is not None:
                tracing.keep()
        return results

    @contextmanager
    def session(self, label: str, request: SessionRequest) -> Iterator[Any]:
        """An open session whose ledger and counters are kept under `label` when it ends."""
        from harness.engines.in_process import open_session
        from harness.engines.ledger import Ledger

        log = self.context.ledger / f"{self.check.id.replace('/', '.')}.{label}.jsonl"
        log.unlink(missing_ok=True)
        with Ledger(log) as ledger, open_session(self.context.pack, request, ledger) as session:
            yield session
            self._keep(label, request, ledger.decisions, session.launches())

    def texts(self, vocab: int) -> tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]]:
        """One prompt for all requests, up to the cell's context, and a forced continuation for each."""
        length = self.cell.context + self.planned_steps * self.rows
        texts = self.random_texts(vocab, self.cell.batch, length)
        prompts = [texts[0][: self.cell.context]] * len(texts)
        return prompts, [t[self.cell.context :][: self.steps * self.rows] for t in texts]

    def random_texts(self, vocab: int, count: int, length: int) -> tuple[tuple[int, ...], ...]:
        """Token sequences from the check's seed."""
        from harness.engines.in_process import random_texts

        return random_texts(vocab, count, length, int(self.check.parameter("seed") or 0))

    def drive(
        self,
        session: Any,
        prompts: Sequence[Sequence[int]],
        texts: Sequence[Sequence[int]],
        switch: Callable[[int], Arm] | None,
        tracing: "Tracing | None" = None,
    ) -> list[Any]:
        """The cell's phase: prefill only, decode steps, or verify steps."""
        from harness.engines.in_process import force, force_verify

        def around(step: int) -> AbstractContextManager[None]:
            traced = TRACED_STEPS.get(self.cell.arch, TRACED_REPLAYS)
            if tracing is None or step < self.steps - traced:
                return nullcontext()
            return tracing.step(step)

        if self.cell.phase == "prefill":
            requests, logprobs = session.prefill(prompts)
            session.finish(requests)
            return [logprobs[i : i + 1].float() for i in range(len(prompts))]
        if self.cell.phase == "verify":
            return force_verify(session, prompts, texts, self.rows, around)
        return force(session, prompts, texts, switch, around)

    def _keep(self, label: str, request: SessionRequest, decisions: Sequence[Decision], counted: Any) -> None:
        expected: Counter[str] = Counter()
        for d in decisions:
            self.ledger_rows.append(
                (
                    label, d.step, d.phase, d.requests, d.rows, d.tokens, d.batch_bucket, d.path, d.reason,
                    d.layer_paths, d.is_graph, d.collective, d.tp, d.dcp, d.drafts, d.context_min,
                    d.context_max,
                )
            )  # fmt: skip
            if d.path == "optimised":
                expected.update(self.context.pack.launch_manifest(request, d.requests, d.rows))
        for op in sorted(set(expected) | set(counted)):
            self.launch_rows.append((label, op, int(counted.get(op, 0)), expected.get(op, 0)))

    def tables(self) -> tuple[SampleTable, ...]:
        """What ledger and counters said."""
        return (
            SampleTable(name="steps", columns=STEP_COLUMNS, rows=tuple(self.ledger_rows)),
            SampleTable(
                name="launches", columns=("arm", "op", "counted", "expected"), rows=tuple(self.launch_rows)
            ),
        )

    def traces(self) -> tuple[SampleTable, ...]:
        """What the traces said."""
        return trace_tables(self.kernel_rows, self.trace_rows, self.span_rows)


class Tracing:
    """One arm's traced steps, with the counters' word on each."""

    def __init__(self, probe: Probe, label: str, request: SessionRequest, session: Any) -> None:
        from harness.measure.kernel_trace import tracer_for

        pack, cell = probe.context.pack, probe.cell
        self._probe, self._label, self._session = probe, label, session
        self._manifest = pack.kernel_manifest(request, cell.batch, probe.rows)
        functions = [p for use in self._manifest.kernels if use.count for p in use.patterns]
        marks = [p for use in self._manifest.kernels if not use.count for p in use.patterns]
        self._tracer = tracer_for(cell.arch, pack.root, functions, marks)
        self._counted: dict[int, dict[str, int]] = {}

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """One traced step."""
        before = dict(self._session.launches())
        with self._tracer.step(number):
            yield
        after = self._session.launches()
        self._counted[number] = {op: after[op] - before.get(op, 0) for op in after}

    def keep(self) -> None:
        """Ends the trace and puts its rows into the probe."""
        trace, probe, label = self._tracer.result(), self._probe, self._label
        is_on = label == "on"
        for number, counted in sorted(self._counted.items()):
            events = [event for event in trace.events if event.step == number]
            probe.kernel_rows += kernel_rows(label, number, events, self._manifest, counted, is_listed=is_on)
        launches = sum(trace.graph_launches.values())
        met = self._manifest.collective if is_on else ""
        probe.trace_rows.append((label, *trace.sentinel, trace.blind, launches, len(self._counted), met))
        if probe.check.parameter("is_drawn"):
            probe.span_rows += span_rows(label, trace.events, self._manifest, DRAWN_LAYER)


def kernel_rows(
    label: str,
    step: int,
    events: Sequence[Any],
    manifest: KernelManifest,
    counted: Mapping[str, int] | None,
    *,
    is_listed: bool,
) -> list[Row]:
    """What one step ran, by declared op and place; the rest by name where it is to be listed.

    `counted` is what the counters say of the step, None where they say nothing of single ops.
    """
    from harness.measure.kernel_trace import fits

    expected, seen, others = manifest.expected(), Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for event in events:
        if event.is_memory:
            continue
        op = next((use.op for use in manifest.kernels if fits(event.name, use.patterns)), None)
        if op is not None:
            seen[op, event.place] += 1
        elif event.place != "eager" or not fits(event.name, manifest.around):
            others[event.name[:MAX_NAME] if is_listed else "other kernels", event.place] += 1
    rows: list[Row] = []
    is_declared = label == "on"
    fused = {use.op for use in manifest.kernels if use.is_fused}
    for op, count in sorted(expected.items()):
        places = [place for place in ("graph", "eager") if seen[op, place]] or ["none"]
        for nth, place in enumerate(places):
            declared = count if is_declared and nth == 0 else 0
            has_witness = counted is not None and op in fused and nth == 0
            witness = counted.get(op, 0) if counted is not None and has_witness else None
            rows.append((label, step, op, op, place, seen[op, place], declared, witness))
    rows += [(label, step, "", name, place, n, 0, None) for (name, place), n in sorted(others.items())]
    return rows


def span_rows(label: str, events: Sequence[Any], manifest: KernelManifest, layer: int) -> list[Row]:
    """One layer of the first traced step, kernel by kernel; memory operations are left out."""
    from harness.measure.kernel_trace import cut_layer, fits

    first = min((event.step for event in events), default=0)
    of_step = [event for event in events if event.step == first]
    cut = cut_layer(of_step, manifest.layer_marks, manifest.marks_per_layer, layer)
    notes = [pattern for use in manifest.kernels if not use.count for pattern in use.patterns]
    kernels = [event for event in cut if not event.is_memory and not fits(event.name, notes)]
    rows: list[Row] = []
    for number, event in enumerate(kernels[:MAX_SPANS]):
        op = next((use.op for use in manifest.kernels if fits(event.name, use.patterns)), "")
        times = (round(event.start_us, 3), round(event.duration_us, 3))
        rows.append((label, number, event.name[:MAX_NAME], op, event.stream, *times))
    return rows


def trace_tables(
    kernels: Sequence[Row], traces: Sequence[Row], spans: Sequence[Row]
) -> tuple[SampleTable, ...]:
    """The tables of what traces saw."""
    return (
        SampleTable(name="kernels", columns=KERNEL_COLUMNS, rows=tuple(kernels)),
        SampleTable(
            name="traces",
            columns=TRACE_COLUMNS,
            rows=tuple(traces),
        ),
        SampleTable(
            name="spans",
            columns=("arm", "number", "name", "op", "stream", "start_us", "duration_us"),
            rows=tuple(spans),
        ),
    )


def divergences(pairs: Mapping[str, tuple[list[Any], list[Any]]]) -> SampleTable:
    """KL, gap and top-1 agreement by pair, request and position."""
    from harness.engines.in_process import divergence

    rows: list[Row] = []
    for pair, (reference, other) in pairs.items():
        for request, (ref, arm) in enumerate(zip(reference, other, strict=True)):
            found = divergence(ref, arm)
            for position, values in enumerate(zip(found.kl, found.max_gap, found.is_top1_equal, strict=True)):
                rows.append((pair, request, position, *values))
    columns = ("pair", "request", "position", "kl", "max_gap", "is_top1_equal")
    return SampleTable(name="divergence", columns=columns, rows=tuple(rows))
