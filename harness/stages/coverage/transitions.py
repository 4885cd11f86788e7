"""Optimised to stock and back inside one request: by the switch, as the batch grows past the envelope, as a
prefill joins, and as drafts are rejected.

Each scenario runs with the switch off (`off`), optimised without what makes it switch (`always`: what sound
paths differ by), switching (`switching`), and switching with an op made wrong (`planted`). The same tokens of
the same requests are forced in all and compared with `off`: how far sound paths differ depends on the text
more than on anything else.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

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
Way = Literal["off", "always", "switching"]


def sample_transition(probe: Probe) -> tuple[SampleTable, ...]:
    """All arms of one scenario."""
    scenario = SCENARIOS[str(probe.check.subject)]
    first_op = probe.context.pack.ops()[0].name
    arms: tuple[tuple[str, Way, str | None], ...] = (
        ("off", "off", None),
        ("always", "always", None),
        ("switching", "switching", None),
        ("planted", "switching", first_op),
    )
    found = {label: scenario(probe, label, way, poisoned) for label, way, poisoned in arms}
    pairs = {label: (found["off"], found[label]) for label in ("always", "switching", "planted")}
    return (*probe.tables(), divergences(pairs))


def _arm(way: Way) -> Arm:
    return "stock" if way == "off" else "optimised"


def _by_the_switch(probe: Probe, label: str, way: Way, poisoned: str | None) -> list[Any]:
    def turn(step: int) -> Arm:
        return "optimised" if step % 4 < 2 else "stock"

    if way == "always":
        return probe.run_arm(label, "optimised", poisoned)
    return probe.run_arm(label, "stock", poisoned, None if way == "off" else turn)


def _batch_grows(probe: Probe, label: str, way: Way, poisoned: str | None) -> list[Any]:
    """As many requests as the envelope holds, then one more, then as many as before."""
    most = probe.context.claim.envelope.batch.max
    length = probe.cell.context + 3 * JOIN_STEPS
    request = probe.request(_arm(way), poisoned_op=poisoned, max_requests=most + 1, max_context=length + 8)
    log: Log = {}
    with probe.session(label, request) as session:
        texts = probe.random_texts(session.vocab_size, most + 1, length)
        prompt = texts[0][: probe.cell.context]
        ids, _ = session.prefill([prompt] * most)
        at = _decode(session, ids, texts, probe.cell.context, JOIN_STEPS, log)
        more = session.prefill([prompt])[0] if way != "always" else []
        late = [*texts[:most], (*prompt, *texts[most][probe.cell.context :])]
        at = _decode(session, [*ids, *more], late, at, JOIN_STEPS, log)
        if more:
            session.finish(more)
        _decode(session, ids, texts, at, JOIN_STEPS, log)
        session.finish(ids)
    return _stacked(log, range(most))


def _prefill_joins(probe: Probe, label: str, way: Way, poisoned: str | None) -> list[Any]:
    """A request joins while two decode: a stock prefill stands between two optimised steps."""
    length = probe.cell.context + 2 * JOIN_STEPS
    request = probe.request(_arm(way), poisoned_op=poisoned, max_requests=3, max_context=length + 8)
    log: Log = {}
    with probe.session(label, request) as session:
        texts = probe.random_texts(session.vocab_size, 3, length)
        first = [text[: probe.cell.context] for text in texts[:2]]
        late = [texts[2][: probe.cell.context + JOIN_STEPS]]
        ids, _ = session.prefill([*first, *late] if way == "always" else first)
        ids, more = ids[:2], ids[2:]
        at = _decode(session, ids, texts, probe.cell.context, JOIN_STEPS, log)
        more = more or session.prefill(late)[0]
        _decode(session, [*ids, *more], texts, at, JOIN_STEPS, log)
        session.finish([*ids, *more])
    return _stacked(log, range(3))


def _draft_rejected(probe: Probe, label: str, way: Way, poisoned: str | None) -> list[Any]:
    """Verify steps that keep some rows; every second one is stock's, and reads the state that was kept."""
    length = probe.cell.context + sum(KEPT) + DRAFTS + 1
    request = probe.request(
        _arm(way), poisoned_op=poisoned, drafts=DRAFTS, max_requests=2, max_context=length + 8
    )
    log: Log = {}
    with probe.session(label, request) as session:
        texts = probe.random_texts(session.vocab_size, 2, length)
        ids, _ = session.prefill([text[: probe.cell.context] for text in texts])
        at = probe.cell.context
        for step, kept in enumerate(KEPT):
            if way == "switching":
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


SCENARIOS: dict[str, Callable[[Probe, str, Way, str | None], list[Any]]] = {
    "optimised_stock_optimised": _by_the_switch,
    "batch_grows": _batch_grows,
    "prefill_joins": _prefill_joins,
    "draft_rejected": _draft_rejected,
}
"""By the name of the check's subject."""
