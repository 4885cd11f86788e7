"""Run both arms of a coverage check and keep what each witness says.

Tables: `steps` (the ledger by arm), `launches` (counted and expected by arm and op), `divergence` (KL by
position and pair of arms), `writes` (undeclared changes by arm). Nothing is judged here.
"""

from collections.abc import Callable, Sequence
from typing import Any

from harness.domain.cell import Cell
from harness.domain.check import Check, Outcome, Samples, SampleTable
from harness.domain.pack import Arm, Decision, SessionRequest
from harness.domain.record import Scalar
from harness.domain.stage import StageContext
from harness.stages.coverage.judging import judge

__all__ = ["run", "sample"]

STEP_COLUMNS = ("arm", "step", "phase", "requests", "rows", "tokens", "bucket", "path", "reason", "layers")
Row = tuple[Scalar, ...]


def run(check: Check, context: StageContext) -> Outcome:
    """`sample` and `judge` in sequence."""
    return judge(check, sample(check, context))


def sample(check: Check, context: StageContext) -> Samples:
    """Samples of one coverage check."""
    recorders = {
        "path": _sample_path,
        "decline": _sample_decline,
        "poison": _sample_poison,
        "transition": _sample_transition,
        "state": _sample_state,
    }
    tables = recorders[str(check.parameter("kind"))](_Probe(check, context))
    return Samples(check=check.id, tier=context.tier, tables=tables)


class _Probe:
    """One check's texts and sessions; owns nothing that outlives a call."""

    def __init__(self, check: Check, context: StageContext) -> None:
        if check.cell is None:
            raise AssertionError(f"{check.id} was planned without a cell")
        self.check, self.context, self.cell = check, context, check.cell
        self.steps = int(check.parameter("steps") or 0)
        self.rows = self.cell.drafts + 1
        self.ledger_rows: list[Row] = []
        self.launch_rows: list[Row] = []

    def request(self, arm: Arm, poisoned: str | None = None) -> SessionRequest:
        """The session that this cell asks for."""
        cell = self.cell
        return SessionRequest.model_validate(
            {
                "model": self.check.parameter("model"), "arm": arm, "poisoned_op": poisoned,
                "poison_scale": self.check.parameter("poison_scale"), "tp": cell.tp,
                "implementation": self.check.parameter("implementation"), "max_requests": cell.batch,
                "max_context": cell.context + self.steps * self.rows + 8, "drafts": cell.drafts,
                "kv_dtype": cell.kv_dtype, "seed": self.check.parameter("seed"),
            }
        )  # fmt: skip

    def run_arm(
        self, label: str, arm: Arm, poisoned: str | None = None, switch: Callable[[int], Arm] | None = None
    ) -> list[Any]:
        """Forced log-probabilities by request, with ledger and counters kept under `label`."""
        from harness.engines.in_process import open_session
        from harness.engines.ledger import Ledger

        request = self.request(arm, poisoned)
        log = self.context.ledger / f"{self.check.id.replace('/', '.')}.{label}.jsonl"
        log.unlink(missing_ok=True)
        with Ledger(log) as ledger, open_session(self.context.pack, request, ledger) as session:
            prompts, texts = self.texts(session.vocab_size)
            results = self.drive(session, prompts, texts, switch)
            self._keep(label, request, ledger.decisions, session.launches())
        return results

    def texts(self, vocab: int) -> tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]]:
        """One prompt for all requests, up to the cell's context, and a forced continuation for each."""
        from harness.engines.in_process import random_texts

        length = self.cell.context + self.steps * self.rows
        texts = random_texts(vocab, self.cell.batch, length, int(self.check.parameter("seed") or 0))
        return [texts[0][: self.cell.context]] * len(texts), [t[self.cell.context :] for t in texts]

    def drive(
        self,
        session: Any,
        prompts: Sequence[Sequence[int]],
        texts: Sequence[Sequence[int]],
        switch: Callable[[int], Arm] | None,
    ) -> list[Any]:
        """The cell's phase: prefill only, decode steps, or verify steps."""  # fmt: skip
        from harness.engines.in_process import force, force_verify

        if self.cell.phase == "prefill":
            requests, logprobs = session.prefill(prompts)
            session.finish(requests)
            return [logprobs[i : i + 1].float() for i in range(len(prompts))]
        if self.cell.phase == "verify":
            return force_verify(session, prompts, texts, self.rows)
        return force(session, prompts, texts, switch)

    def _keep(self, label: str, request: SessionRequest, decisions: Sequence[Decision], counted: Any) -> None:
        for d in decisions:
            row = (
                label,
                d.step,
                d.phase,
                d.requests,
                d.rows,
                d.tokens,
                d.batch_bucket,
                d.path,
                d.reason,
                d.layer_paths,
            )
            self.ledger_rows.append(row)
        expected: dict[str, int] = {}
        for d in decisions:
            if d.path == "optimised":
                for op, count in self.context.pack.launch_manifest(request, d.requests, d.rows).items():
                    expected[op] = expected.get(op, 0) + count
        for op in sorted(set(expected) | set(counted)):
            self.launch_rows.append((label, op, int(counted.get(op, 0)), expected.get(op, 0)))

    def witness_tables(self) -> tuple[SampleTable, ...]:
        """What ledger and counters said."""
        return (
            SampleTable(name="steps", columns=STEP_COLUMNS, rows=tuple(self.ledger_rows)),
            SampleTable(
                name="launches", columns=("arm", "op", "counted", "expected"), rows=tuple(self.launch_rows)
            ),
        )


def _sample_path(probe: _Probe) -> tuple[SampleTable, ...]:
    on = probe.run_arm("on", "optimised")
    off = probe.run_arm("off", "stock")
    return (*probe.witness_tables(), _divergences({"on": (off, on)}))


def _sample_decline(probe: _Probe) -> tuple[SampleTable, ...]:
    on = probe.run_arm("on", "optimised")
    off = probe.run_arm("off", "stock")
    inside = _Probe(
        probe.check.model_copy(
            update={"cell": Cell.model_validate({"arch": probe.cell.arch, "context": 24})}
        ),
        probe.context,
    )
    inside.run_arm("twin", "optimised")
    tables = probe.witness_tables()
    extra = inside.witness_tables()
    merged = tuple(a.model_copy(update={"rows": a.rows + b.rows}) for a, b in zip(tables, extra, strict=True))
    return (*merged, _divergences({"on": (off, on)}))


def _sample_poison(probe: _Probe) -> tuple[SampleTable, ...]:
    stock = probe.run_arm("off", "stock")
    clean = probe.run_arm("on", "optimised")
    poisoned = probe.run_arm("poison", "optimised", poisoned=probe.check.op)
    return (*probe.witness_tables(), _divergences({"clean": (stock, clean), "poison": (stock, poisoned)}))


def _sample_transition(probe: _Probe) -> tuple[SampleTable, ...]:
    stock = probe.run_arm("off", "stock")
    always = probe.run_arm("on", "optimised")
    switching = probe.run_arm(
        "switching", "stock", switch=lambda step: "optimised" if step % 4 < 2 else "stock"
    )
    first_op = probe.context.pack.ops()[0].name
    planted = probe.run_arm(
        "planted", "stock", poisoned=first_op, switch=lambda step: "optimised" if step % 4 < 2 else "stock"
    )
    pairs = {"always": (stock, always), "switching": (stock, switching), "planted": (stock, planted)}
    return (*probe.witness_tables(), _divergences(pairs))


def _sample_state(probe: _Probe) -> tuple[SampleTable, ...]:
    """Checksums of everything watched around each step, and of the process around the whole run."""
    from harness.engines.in_process import open_session, planted_write, watched_digests
    from harness.measure.process_state import changed_names, snapshot

    rows: list[Row] = []
    before = snapshot()
    with open_session(probe.context.pack, probe.request("optimised"), None) as session:
        prompts, texts = probe.texts(session.vocab_size)
        requests, _ = session.prefill(prompts)
        for step in range(probe.steps):
            may_write = session.writable(requests)
            sums = watched_digests(session, may_write)
            session.decode(requests, [text[step] for text in texts])
            after_step = watched_digests(session, may_write)
            rows += [("on", step, name) for name in _differing(sums, after_step)]
            rows.append(
                ("watched", step, f"{len(sums)} tensors, {sum(n for _, n in sums.values())} elements")
            )
        may_write = session.writable(requests)
        sums = watched_digests(session, may_write)
        with planted_write(session, may_write) as where:
            seen = _differing(sums, watched_digests(session, may_write))
        rows += [("planted", probe.steps, name) for name in seen]
        rows.append(("planted_where", probe.steps, where))
        session.finish(requests)
    rows += [("process", probe.steps, name) for name in changed_names(before, snapshot())]
    return (SampleTable(name="writes", columns=("arm", "step", "what"), rows=tuple(rows)),)


def _differing(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> list[str]:
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def _divergences(pairs: dict[str, tuple[list[Any], list[Any]]]) -> SampleTable:
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
