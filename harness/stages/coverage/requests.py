"""What happens in a request's life: drafts rejected, prompts found in the prefix cache, slots used again, and
the features that a claim keeps.

Each kind compares a run with one that took the long way (decode one by one, a cold prefill, a fresh session),
since a fault that both arms share shows in no comparison between arms. Tables beside the witnesses':
`divergence`, and for prefixes `prefixes` (the cache's counters by arm).
"""

from collections.abc import Sequence
from typing import Any

from harness.domain.check import SampleTable
from harness.stages.coverage.probe import Probe, Row, divergences

__all__ = [
    "ACCEPTED",
    "chooser",
    "sample_feature",
    "sample_prefix",
    "sample_reuse",
    "sample_uneven",
    "sample_verify",
]

ACCEPTED = (3, 1, 2, 4, 1)
"""Rows kept of each verify step: all but one, only the request's own, half, all."""
ROWS = 4
PREFIX = 64
"""Tokens of a prompt that a later one shares; a page of every pack so far."""
TAIL = 5
STEPS = 4
TEMPERATURE = 0.8
CHUNK = 7
ALLOWED_STRIDE = 3


def sample_verify(probe: Probe) -> tuple[SampleTable, ...]:
    """Verify steps of which some rows are kept, against the oracle and against decoding one by one.

    Arm `planted` keeps a row fewer than it says, as a faulty engine would.
    """
    from harness.engines.in_process import force, open_session

    length = probe.cell.context + sum(ACCEPTED) + ROWS
    fields = {"drafts": ROWS - 1, "max_context": length + ROWS, "max_requests": 2}
    stock = probe.request("stock", **fields)
    with open_session(probe.context.pack, stock.model_copy(update={"is_oracle": True}), None) as session:
        texts = probe.random_texts(session.vocab_size, 2, length)
        prompts = [text[: probe.cell.context] for text in texts]
        rest = [text[probe.cell.context : probe.cell.context + sum(ACCEPTED)] for text in texts]
        oracle = force(session, prompts, rest)
    with probe.session("off", stock) as session:
        one_by_one = force(session, prompts, rest)
    request = probe.request("optimised", **fields)
    with probe.session("on", request) as session:
        verified = _verified(session, prompts, texts, probe.cell.context, 0)
    with open_session(probe.context.pack, request, None) as session:
        planted = _verified(session, prompts, texts, probe.cell.context, 1)
    pairs = {
        "stock": ([o[1:] for o in oracle], [s[1:] for s in one_by_one]),
        "on": ([o[1:] for o in oracle], verified),
        "planted": ([o[1:] for o in oracle], planted),
    }
    return (*probe.tables(), divergences(pairs))


def sample_prefix(probe: Probe) -> tuple[SampleTable, ...]:
    """A prompt that finds its prefix, against the same prompt cold in another session; then decode steps.

    Arm `planted` continues from another prompt's prefix, which is what a wrong state would look like.
    """
    from harness.engines.in_process import open_session

    length = PREFIX + TAIL + STEPS
    fields = {"kept_prefixes": 4, "max_context": length + 8, "max_requests": 1}
    request = probe.request("optimised", **fields)
    runs: dict[str, list[Any]] = {}
    counters: list[Row] = []
    with open_session(probe.context.pack, request, None) as session:
        vocab = session.vocab_size
        text, other = probe.random_texts(vocab, 2, length)
        runs["cold"] = [_decoded(session, text)]
        counters.append(("cold", *session.prefix_counters()))
    with probe.session("on", request) as session:
        _decoded(session, (*text[:PREFIX], *other[PREFIX:]))
        runs["hit"] = [_decoded(session, text)]
        counters.append(("on", *session.prefix_counters()))
    with open_session(probe.context.pack, request, None) as session:
        runs["planted"] = [_decoded(session, (*other[:PREFIX], *text[PREFIX:]))]
    pairs = {"on": (runs["cold"], runs["hit"]), "planted": (runs["cold"], runs["planted"])}
    table = SampleTable(name="prefixes", columns=("arm", "queries", "hits", "reused"), rows=tuple(counters))
    return (*probe.tables(), table, divergences(pairs))


def sample_reuse(probe: Probe) -> tuple[SampleTable, ...]:
    """A request in a slot that another one left, against the same request in a fresh session.

    Arm `planted` answers the former owner's prompt: what leftovers would look like.
    """
    from harness.engines.in_process import open_session

    length = probe.cell.context + STEPS
    fields = {"max_context": length + 8, "max_requests": 1}
    request = probe.request("optimised", **fields)
    with open_session(probe.context.pack, request, None) as session:
        text, former = probe.random_texts(session.vocab_size, 2, length)
        fresh = [_decoded(session, text, probe.cell.context)]
    with probe.session("on", request) as session:
        owner = [_decoded(session, former, probe.cell.context)]
        reused = [_decoded(session, text, probe.cell.context)]
    return (*probe.tables(), divergences({"on": (fresh, reused), "planted": (fresh, owner)}))


def sample_uneven(probe: Probe) -> tuple[SampleTable, ...]:
    """A verify step whose requests have unlike numbers of rows, and a twin in which they are alike."""
    pairs = {}
    found = {}
    for label, arm, rows in (
        ("on", "optimised", (ROWS, ROWS - 2)),
        ("off", "stock", (ROWS, ROWS - 2)),
        ("twin", "optimised", (ROWS - 2, ROWS - 2)),
    ):
        length = probe.cell.context + 2 * ROWS
        request = probe.request(arm, drafts=ROWS - 1, max_context=length + 8, max_requests=2)  # type: ignore[arg-type]  # one of two words
        with probe.session(label, request) as session:
            texts = probe.random_texts(session.vocab_size, 2, length)
            requests, _ = session.prefill([text[: probe.cell.context] for text in texts])
            drafts = [list(t[probe.cell.context :][:n]) for t, n in zip(texts, rows, strict=True)]
            out = session.verify(requests, drafts, [len(d) for d in drafts]).float()
            found[label] = [out]
            session.finish(requests)
    pairs["on"] = (found["off"], found["on"])
    return (*probe.tables(), divergences(pairs))


def sample_feature(probe: Probe) -> tuple[SampleTable, ...]:
    """A feature at work on the optimised path; stock is forced along its tokens, and so is a poisoned arm.

    Table `choices`: whether each token was one that the feature allows.
    """
    from harness.engines.in_process import force, generate

    name = str(probe.check.subject)
    fields: dict[str, Any] = {"prefill_chunk": CHUNK} if name == "chunked_prefill" else {}
    fields["max_context"] = probe.cell.context + probe.planned_steps + 8
    with probe.session("on", probe.request("optimised", **fields)) as session:
        prompts = probe.random_texts(session.vocab_size, probe.cell.batch, probe.cell.context)
        choose, allowed = chooser(name, session.vocab_size, int(probe.check.parameter("seed") or 0))
        texts, on = generate(session, prompts, probe.planned_steps, choose)
    fields.pop("prefill_chunk", None)
    with probe.session("off", probe.request("stock", **fields)) as session:
        off = force(session, prompts, texts)
    first = probe.context.pack.ops()[0].name
    with probe.session("planted", probe.request("optimised", poisoned_op=first, **fields)) as session:
        planted = force(session, prompts, texts)
    rows = tuple(
        (request, step, token, token in allowed(step))
        for request, text in enumerate(texts)
        for step, token in enumerate(text)
    )
    choices = SampleTable(name="choices", columns=("request", "step", "token", "is_allowed"), rows=rows)
    return (*probe.tables(), choices, divergences({"on": (off, on), "planted": (off, planted)}))


def _verified(
    session: Any, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], at: int, lost: int
) -> list[Any]:
    """Log-probabilities behind every kept row; rejected rows hold tokens of no text. `lost` rows of those
    said to be kept are not."""
    requests, _ = session.prefill(prompts)
    kept_rows: list[list[Any]] = [[] for _ in texts]
    vocab = session.vocab_size
    for kept in ACCEPTED:
        drafts = [[t[at + i] if i < kept else (t[at + i] + 1) % vocab for i in range(ROWS)] for t in texts]
        out = session.verify(requests, drafts, [max(1, kept - lost)] * len(texts)).float()
        for i, rows in enumerate(kept_rows):
            rows += out[i * ROWS : i * ROWS + kept].unbind(0)
        at += kept
    session.finish(requests)
    return [_stack(rows) for rows in kept_rows]


def _decoded(session: Any, text: Sequence[int], prompt: int = PREFIX + TAIL) -> Any:
    """Log-probabilities [steps + 1, vocab] of one request that lives and ends here."""
    requests, first = session.prefill([text[:prompt]])
    rows = [session.decode(requests, [token])[0].float().clone() for token in text[prompt:]]
    session.finish(requests)
    return _stack([first[0].float(), *rows])


def _stack(rows: Sequence[Any]) -> Any:
    from harness.engines.in_process import stack_rows

    return stack_rows(rows)


def chooser(name: str, vocab: int, seed: int) -> Any:
    """(what picks a token, which tokens the feature allows at a step)."""
    from harness.engines.in_process import among, drawn_at

    def every(_step: int) -> range:
        return range(vocab)

    def some(step: int) -> range:
        return range(step % ALLOWED_STRIDE, vocab, ALLOWED_STRIDE)

    if name == "structured_output":
        return among(some), some
    if name == "temperature_sampling":
        return drawn_at(TEMPERATURE, seed), every
    return among(every), every
