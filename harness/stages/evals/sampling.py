"""Run both arms of an eval on the same items and keep every answer and every log-probability that judging
needs.

Where lm-eval is installed its evaluator drives the tasks; a bare worker drives the same model class directly.
Tables: `drift` (KL by arm and position), `items` (answers by arm and item), `steps` (ledger totals by arm,
phase, path and reason).
"""

from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from harness.domain.check import Check, Outcome, Samples, SampleTable
from harness.domain.pack import EvalItem, Generation, SessionRequest
from harness.domain.record import Scalar
from harness.domain.stage import StageContext
from harness.stages.evals.judging import judge

__all__ = ["run", "sample"]

Row = tuple[Scalar, ...]
ZEN = (
    "Beautiful is better than ugly. Explicit is better than implicit. Simple is better than complex. "
    "Complex is better than complicated. Flat is better than nested. Sparse is better than dense. "
    "Readability counts. Special cases are not special enough to break the rules. "
)
"""From PEP 20 (public domain): a real text that every Python ships, one byte a token."""


def run(check: Check, context: StageContext) -> Outcome:
    """`sample` and `judge` in sequence."""
    return judge(check, sample(check, context))


def sample(check: Check, context: StageContext) -> Samples:
    """Samples of one eval."""
    recorder = _Recorder(check, context)
    tables = _sample_drift(recorder) if check.parameter("kind") == "drift" else _sample_task(recorder)
    return Samples(check=check.id, tier=context.tier, tables=(*tables, recorder.steps_table()))


class _Recorder:
    """Opens sessions for one check and totals their ledgers."""

    def __init__(self, check: Check, context: StageContext) -> None:
        self.check, self.context = check, context
        self._steps: Counter[tuple[str, str, str, str]] = Counter()

    def number(self, name: str) -> int:
        """An integer parameter of the check."""
        return int(self.check.parameter(name) or 0)

    def request(self, arm: str, max_requests: int, max_context: int) -> SessionRequest:
        """The session of an arm: stock, optimised, oracle, or poison."""
        return SessionRequest.model_validate(
            {
                "model": self.check.parameter("model"), "seed": self.number("seed"),
                "arm": "stock" if arm in ("stock", "oracle") else "optimised",
                "implementation": self.check.parameter("implementation"), "is_oracle": arm == "oracle",
                "poisoned_op": self.poisoned_op() if arm == "poison" else None,
                "poison_scale": self.check.parameter("poison_scale"), "max_requests": max_requests,
                "max_context": max_context,
            }
        )  # fmt: skip

    def poisoned_op(self) -> str:
        """The op that the control makes wrong: the first of the pack's list."""
        return self.context.pack.ops()[0].name

    def open(self, arm: str, max_requests: int, max_context: int) -> Any:
        """A context manager that gives the session of an arm; its decisions are totalled under the arm's
        name.
        """
        from harness.engines.in_process import open_session

        def observe(d: Any) -> None:
            self._steps[(arm, d.phase, d.path, d.reason)] += d.tokens

        observer = None if arm == "oracle" else observe
        return open_session(self.context.pack, self.request(arm, max_requests, max_context), observer)

    def steps_table(self) -> SampleTable:
        """Tokens by arm, phase, path and reason."""
        rows = tuple((*key, count) for key, count in sorted(self._steps.items()))
        return SampleTable(name="steps", columns=("arm", "phase", "path", "reason", "tokens"), rows=rows)


def _sample_drift(recorder: _Recorder) -> tuple[SampleTable, ...]:
    from harness.engines.in_process import divergence

    steps, prompt = recorder.number("steps"), recorder.number("prompt")
    length = steps + prompt + 1
    forced: dict[str, list[Any]] = {}
    driver = "direct"
    for arm in ("oracle", "stock", "optimised", "poison"):
        recorder.context.progress(f"drift, {arm} arm")
        with recorder.open(arm, 2, length + 8) as session:
            texts = _drift_texts(session.vocab_size, length, recorder.number("seed"))
            forced[arm], driver = _force_texts(recorder, session, texts, prompt)
    rows: list[Row] = []
    for arm in ("stock", "optimised", "poison"):
        for request, (ref, got) in enumerate(zip(forced["oracle"], forced[arm], strict=True)):
            found = divergence(ref, got)
            for position, values in enumerate(zip(found.kl, found.max_gap, found.is_top1_equal, strict=True)):
                rows.append((arm, request, prompt + position, *values))
    columns = ("arm", "request", "position", "kl", "max_gap", "is_top1_equal")
    return (
        SampleTable(name="drift", columns=columns, rows=tuple(rows)),
        SampleTable(name="driver", columns=("driver",), rows=((driver,),)),
    )


def _drift_texts(vocab: int, length: int, seed: int) -> list[tuple[int, ...]]:
    """A real text in bytes, and random tokens: the model sees both habits and surprises."""
    from harness.engines.in_process import random_texts

    zen = (ZEN.encode() * (length // len(ZEN) + 1))[:length]
    return [tuple(byte % vocab for byte in zen), *random_texts(vocab, 1, length, seed)]


def _force_texts(
    recorder: _Recorder, session: Any, texts: Sequence[tuple[int, ...]], prompt: int
) -> tuple[list[Any], str]:
    """Log-probabilities along each text from the end of its prompt, and who drove."""
    if find_spec("lm_eval") is None:
        from harness.engines.in_process import force

        rows = force(session, [t[:prompt] for t in texts], [t[prompt:-1] for t in texts])
        return list(rows), "direct"
    from harness.engines.lm_eval_model import FasttrackLM, encode_ids, run_task

    model = FasttrackLM(session, batch=len(texts), prompt_tokens=prompt)
    documents = [{"text": encode_ids(text)} for text in texts]
    run_task(
        model, "drift", documents, is_rolling=True, max_tokens=0, folder=recorder.context.cache / "evals"
    )
    return [model.forced[document["text"]] for document in documents], "lm-eval"


def _sample_task(recorder: _Recorder) -> tuple[SampleTable, ...]:
    check, context = recorder.check, recorder.context
    items = context.pack.eval_items(str(check.subject), recorder.number("items"), recorder.number("seed"))
    rows: list[Row] = []
    driver = "direct"
    poisoned = items[: max(1, int(check.number("poison_items")))]
    for arm, asked in (("stock", items), ("optimised", items), ("poison", poisoned)):
        context.progress(f"{check.subject}, {arm} arm, {len(asked)} items")
        most = max(len(item.prompt) + item.max_tokens for item in asked) + 8
        with recorder.open(arm, recorder.number("batch"), most) as session:
            answers, driver = _answer_items(recorder, session, asked)
        for item, found in zip(asked, answers, strict=True):
            texts = (_text(item.target), _text(found.tokens))
            rows.append((arm, item.id, item.context, *texts, found.finish, item.prefix_tokens))
    columns = ("arm", "item", "context", "target", "answer", "finish", "prefix_tokens")
    return (
        SampleTable(name="items", columns=columns, rows=tuple(rows)),
        SampleTable(name="driver", columns=("driver",), rows=((driver,),)),
    )


def _answer_items(
    recorder: _Recorder, session: Any, items: Sequence[EvalItem]
) -> tuple[list[Generation], str]:
    """Answers in the order of the items, and who drove."""
    stop, batch = recorder.number("stop"), recorder.number("batch")
    if find_spec("lm_eval") is None:
        from harness.engines.in_process import answer

        found = answer(session, [(i.id, i.prompt, i.max_tokens) for i in items], stop, batch)
        return list(found), "direct"
    from harness.engines.lm_eval_model import FasttrackLM, encode_ids, run_task

    model = FasttrackLM(session, batch=batch, stop=stop)
    documents = [{"prompt": encode_ids(i.prompt), "target": encode_ids(i.target)} for i in items]
    most = max(item.max_tokens for item in items)
    folder = recorder.context.cache / "evals"
    run_task(model, str(recorder.check.subject), documents, is_rolling=False, max_tokens=most, folder=folder)
    answers = [model.answers[document["prompt"]] for document in documents]
    return [a.model_copy(update={"item": i.id}) for a, i in zip(answers, items, strict=True)], "lm-eval"


def _text(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))
