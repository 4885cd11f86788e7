"""Run-time isolation, and what keeping a ledger costs.

Around every optimised step: checksums of all watched tensors outside what the claim lets the step write, the
version counters of those it may not write at all, and everything of `measure.process_state`. Around the whole
run, and after the path was switched off: the same, deep, beside a session in which it was never on.
"""

import statistics
import time
from typing import Any

from harness.domain.check import SampleTable
from harness.domain.pack import Decision
from harness.stages.coverage.probe import Probe, Row, divergences

__all__ = ["sample_ledger", "sample_state"]

WRITE_COLUMNS = ("arm", "step", "what")
AFTER_STEPS = 3
LEDGER_BATCHES, LEDGER_DECISIONS = 9, 400
PLANTED_VARIABLE = "FASTTRACK_PLANTED_CHANGE"


def sample_state(probe: Probe) -> tuple[SampleTable, ...]:
    """Table `writes`: undeclared changes by step, what was watched, and what a planted change showed;
    `divergence`: a request after the switch was turned off, against one where it was never on.
    """
    from harness.measure.process_state import changed_names, snapshot

    root = probe.context.pack.root
    before = snapshot(root)
    rows = _watched_run(probe)
    rows += [("process", probe.steps, name) for name in changed_names(before, snapshot(root))]
    never, _ = _after(probe, ())
    off, launched = _after(probe, ("optimised", "stock"))
    rows += [("process", probe.steps + 1, name) for name in changed_names(before, snapshot(root))]
    _, left_on = _after(probe, ("optimised",))
    after = SampleTable(
        name="after_off", columns=("arm", "launches"), rows=(("off", launched), ("left_on", left_on))
    )
    compared = divergences({"off": (never, off)})
    return (
        SampleTable(name="writes", columns=WRITE_COLUMNS, rows=tuple(dict.fromkeys(rows))),
        after,
        compared,
    )


def sample_ledger(probe: Probe) -> tuple[SampleTable, ...]:
    """Table `costs`: microseconds of one decode step, and of keeping one decision, by repetition; `planted`
    is a ledger that takes a tenth of a step.
    """
    from harness.engines.in_process import finished, open_session
    from harness.engines.ledger import Ledger

    rows: list[Row] = []
    seen: list[Any] = []
    request = probe.request("optimised")
    with open_session(probe.context.pack, request, seen.append) as session:
        prompts, texts = probe.texts(session.vocab_size)
        requests, _ = session.prefill(prompts)
        for step in range(probe.steps):
            begun = time.perf_counter_ns()
            finished(session.decode(requests, [text[step] for text in texts]))
            rows.append(("step", step, (time.perf_counter_ns() - begun) / 1e3))
        session.finish(requests)
    log = probe.context.ledger / f"{probe.check.id.replace('/', '.')}.cost.jsonl"
    log.unlink(missing_ok=True)
    with Ledger(log) as ledger:
        for batch in range(LEDGER_BATCHES):
            first = batch * LEDGER_DECISIONS
            decisions = [_in_step(seen[-1], first + nth) for nth in range(LEDGER_DECISIONS)]
            begun = time.perf_counter_ns()
            for decision in decisions:
                ledger(decision)
            rows.append(("ledger", batch, (time.perf_counter_ns() - begun) / 1e3 / LEDGER_DECISIONS))
    step_us = statistics.median(float(row[2] or 0) for row in rows if row[0] == "step")
    with Ledger(log) as ledger:
        begun = time.perf_counter_ns()
        while (time.perf_counter_ns() - begun) / 1e3 < step_us / 10:
            ledger(seen[-1])
        rows.append(("planted", 0, (time.perf_counter_ns() - begun) / 1e3))
    log.unlink()
    return (SampleTable(name="costs", columns=("what", "repetition", "us"), rows=tuple(rows)),)


def _in_step(decision: Decision, step: int) -> Decision:
    """The same decision in another step, a token further in its context."""
    context = decision.context_max + step
    return decision.model_copy(update={"step": step, "context_min": context, "context_max": context})


def _watched_run(probe: Probe) -> list[Row]:
    """Every step of an optimised run between two looks at everything."""
    import os

    from harness.engines.in_process import open_session, planted_write, versions, watched_digests
    from harness.measure.process_state import changed_names, snapshot

    rows: list[Row] = []
    with open_session(probe.context.pack, probe.request("optimised"), None) as session:
        prompts, texts = probe.texts(session.vocab_size)
        requests, _ = session.prefill(prompts)
        around = snapshot()
        for step in range(probe.steps):
            may_write = session.writable(requests)
            sums, counts = watched_digests(session, may_write), versions(session, may_write)
            session.decode(requests, [text[step] for text in texts])
            changed = set(_differing(sums, watched_digests(session, may_write)))
            changed |= set(_differing(counts, versions(session, may_write)))
            seen, around = around, snapshot()
            changed |= set(changed_names(seen, around))
            rows += [("on", step, name) for name in sorted(changed)]
            elements = sum(n for _, n in sums.values())
            words = f"{len(sums)} tensors, {elements} elements, {len(around)} process values"
            rows.append(("watched", step, words))
        may_write = session.writable(requests)
        sums = watched_digests(session, may_write)
        with planted_write(session, may_write) as where:
            os.environ[PLANTED_VARIABLE] = "1"
            names = [
                *_differing(sums, watched_digests(session, may_write)),
                *changed_names(around, snapshot()),
            ]
            del os.environ[PLANTED_VARIABLE]
        rows += [("planted", probe.steps, name) for name in names]
        rows += [("planted_where", probe.steps, name) for name in (where, f"env:{PLANTED_VARIABLE}")]
        session.finish(requests)
    return rows


def _after(probe: Probe, arms: tuple[Any, ...]) -> tuple[list[Any], int]:
    """A stock request in a session in which these arms were on before, and the launches it made."""
    from harness.engines.in_process import force, open_session

    with open_session(probe.context.pack, probe.request("stock"), None) as session:
        prompts, texts = probe.texts(session.vocab_size)
        short = [text[:AFTER_STEPS] for text in texts]
        for arm in arms[:1]:
            session.switch(arm)
            force(session, prompts, short)
        for arm in arms[1:]:
            session.switch(arm)
        before = sum(session.launches().values())
        results = force(session, prompts, short)
        return list(results), int(sum(session.launches().values()) - before)


def _differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
