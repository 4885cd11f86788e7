"""Optimised to stock and back inside one request: by the switch, as the batch grows past the envelope, as a
prefill joins, and as drafts are rejected.

Each scenario runs once with the switch off (`off`), once on (`switching`), and once on with an op made wrong
(`planted`); the same tokens are forced in all. `always` is a plain optimised run: what sound paths differ by.
"""

from collections.abc import Callable, Sequence
from typing import Any

from harness.domain.cell import Cell
from harness.domain.check import SampleTable
from harness.domain.pack import Arm
from harness.stages.coverage.probe import Probe, divergences

__all__ = ["SCENARIOS", "sample_transition"]

Log = dict[int, list[Any]]
"""Log-probabilities by request, in order."""
JOIN_STEPS = 1
"""Steps before, with and after what joins."""
DRAFTS = 3
KEPT = (2, 1, 4)


def sample_transition(probe: Probe) -> tuple[SampleTable, ...]:
    """All arms of one scenario."""
    scenario = SCENARIOS[str(probe.check.subject)]
    first_op = probe.context.pack.ops()[0].name
    arms: tuple[tuple[str, Arm, str | None], ...] = (
        ("off", "stock", None),
        ("switching", "optimised", None),
        ("planted", "optimised", first_op),
    )
    found = {label: scenario(probe, label, arm, poisoned) for label, arm, poisoned in arms}
    plain = Probe(probe.check, probe.context, Cell.model_validate({"arch": probe.cell.arch, "context": 24}))
    plain.steps = min(probe.steps, 4)
    stock, always = plain.run_arm("plain", "stock"), plain.run_arm("always", "optimised")
    pairs = {
        "always": (stock, always),
        "switching": (found["off"], found["switching"]),
        "planted": (found["off"], found["planted"]),
    }
    return (*probe.tables(), divergences(pairs))


def _by_the_switch(probe: Probe, label: str, arm: Arm, poisoned: str | None) -> list[Any]:
    def turn(step: int) -> Arm:
        return "optimised" if step % 4 < 2 else "stock"

    return probe.run_arm(label, "stock", poisoned, None if arm == "stock" else turn)


def _batch_grows(probe: Probe, label: str, arm: Arm, poisoned: str | None) -> list[Any]:
    """As many requests as the envelope holds, then one more, then as many as before."""
    most = probe.context.claim.envelope.batch.max
    length = probe.cell.context + 3 * JOIN_STEPS
    request = probe.request(arm, poisoned_op=poisoned, max_requests=most + 1, max_context=length + 8)
    log: Log = {}
    with probe.session(label, request) as session:
        texts = probe.random_texts(session.vocab_size, most + 1, length)
        prompt = texts[0][: probe.cell.context]
        ids, _ = session.prefill([prompt] * most)
        at = _decode(session, ids, texts, probe.cell.context, JOIN_STEPS, log)
        more, _ = session.prefill([prompt])
        late = [*texts[:most], (*prompt, *texts[most][probe.cell.context :])]
        at = _decode(session, [*ids, *more], late, at, JOIN_STEPS, log)
        session.finish(more)
        _decode(session, ids, texts, at, JOIN_STEPS, log)
        session.finish(ids)
    return _stacked(log, range(most))


def _prefill_joins(probe: Probe, label: str, arm: Arm, poisoned: str | None) -> list[Any]:
    """A request joins while two decode: a stock prefill stands between two optimised steps."""
    length = probe.cell.context + 2 * JOIN_STEPS
    request = probe.request(arm, poisoned_op=poisoned, max_requests=3, max_context=length + 8)
    log: Log = {}
    with probe.session(label, request) as session:
        texts = probe.random_texts(session.vocab_size, 3, length)
        ids, _ = session.prefill([text[: probe.cell.context] for text in texts[:2]])
        at = _decode(session, ids, texts, probe.cell.context, JOIN_STEPS, log)
        more, _ = session.prefill([texts[2][:at]])
        _decode(session, [*ids, *more], texts, at, JOIN_STEPS, log)
        session.finish([*ids, *more])
    return _stacked(log, range(3))


def _draft_rejected(probe: Probe, label: str, arm: Arm, poisoned: str | None) -> list[Any]:
    """Verify steps that keep some rows; every second one is stock's, and reads the state that was kept."""
    length = probe.cell.context + sum(KEPT) + DRAFTS + 1
    request = probe.request(arm, poisoned_op=poisoned, drafts=DRAFTS, max_requests=2, max_context=length + 8)
    log: Log = {}
    with probe.session(label, request) as session:
        texts = probe.random_texts(session.vocab_size, 2, length)
        ids, _ = session.prefill([text[: probe.cell.context] for text in texts])
        at = probe.cell.context
        for step, kept in enumerate(KEPT):
            if arm == "optimised":
                session.switch("stock" if step % 2 else "optimised")
            rows = DRAFTS + 1
            out = session.verify(ids, [list(t[at : at + rows]) for t in texts], [kept] * 2).float()
            for place in range(2):
                kept_rows = out[place * rows : place * rows + kept]
                log.setdefault(place, []).extend(row.clone() for row in kept_rows)
            at += kept
        session.finish(ids)
    return _stacked(log, range(2))


def _decode(
    session: Any, ids: Sequence[int], texts: Sequence[Sequence[int]], at: int, steps: int, log: Log
) -> int:
    """Forces `steps` tokens of each text from position `at` on; gives the position behind them."""
    for step in range(at, at + steps):
        out = session.decode(ids, [text[step] for text in texts[: len(ids)]]).float()
        for place in range(len(ids)):
            log.setdefault(place, []).append(out[place].clone())
    return at + steps


def _stacked(log: Log, places: range) -> list[Any]:
    from harness.engines.in_process import stack_rows

    return [stack_rows(log[place]) for place in places]


SCENARIOS: dict[str, Callable[[Probe, str, Arm, str | None], list[Any]]] = {
    "optimised_stock_optimised": _by_the_switch,
    "batch_grows": _batch_grows,
    "prefill_joins": _prefill_joins,
    "draft_rejected": _draft_rejected,
}
"""By the name of the check's subject."""
