"""Run the arms of an eval on the same questions and keep every answer and every log-probability that judging
needs.

Where lm-eval is installed its evaluator drives the tasks; a bare worker asks the same prompts directly.
Tables: `drift` (KL by arm and position), `items` (answers in tokens) or `answers` (in text) by arm and
item, `flips` (where answers part), `steps`, `cells`, `loads` and `counters` (what the engine did),
`settings`, `data`, `driver`.
"""

from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from harness.domain.check import Check, Outcome, Samples, SampleTable
from harness.domain.pack import SessionRequest
from harness.domain.record import Scalar, sha256_hex
from harness.domain.stage import StageContext
from harness.engines.serving import StepTotal
from harness.stages.evals.data import load_text
from harness.stages.evals.engine_sampling import sample_engine
from harness.stages.evals.features import sample_feature
from harness.stages.evals.judging import judge
from harness.stages.evals.ledger_tables import ledger_tables
from harness.stages.evals.opening import arm_request
from harness.stages.evals.tasks import sample_embedded, sample_official

__all__ = ["run", "sample"]

Row = tuple[Scalar, ...]
ZEN = (
    "Beautiful is better than ugly. Explicit is better than implicit. Simple is better than complex. "
    "Complex is better than complicated. Flat is better than nested. Sparse is better than dense. "
    "Readability counts. Special cases are not special enough to break the rules. "
)
"""From PEP 20 (public domain): a real text that every Python ships, one byte a token."""
SAMPLERS = {"task": sample_embedded, "official": sample_official, "feature": sample_feature}


def run(check: Check, context: StageContext) -> Outcome:
    """`sample` and `judge` in sequence."""
    return judge(check, sample(check, context))


def sample(check: Check, context: StageContext) -> Samples:
    """Samples of one eval."""
    kind = str(check.parameter("kind"))
    if kind == "engine":
        return sample_engine(check, context)
    tables = _sample_drift(_Recorder(check, context)) if kind == "drift" else SAMPLERS[kind](check, context)
    return Samples(check=check.id, tier=context.tier, tables=tables)


class _Recorder:
    """Opens sessions for one check and totals their ledgers."""

    def __init__(self, check: Check, context: StageContext) -> None:
        self.check, self.context = check, context
        self.steps: Counter[tuple[str, StepTotal]] = Counter()

    def number(self, name: str) -> int:
        """An integer parameter of the check."""
        return int(self.check.parameter(name) or 0)

    def request(self, arm: str, max_requests: int, max_context: int) -> SessionRequest:
        """The session of an arm: stock, optimised, oracle, or poison."""
        request = arm_request(self.check, max_requests, max_context)
        poison = self.context.pack.ops()[0].name if arm == "poison" else None
        changed = {
            "arm": "stock" if arm in ("stock", "oracle") else "optimised",
            "is_oracle": arm == "oracle",
            "poisoned_op": poison,
        }
        return request.model_copy(update=changed)

    def open(self, arm: str, max_requests: int, max_context: int) -> Any:
        """A session of an arm whose decisions are counted; the oracle has none."""
        from harness.engines.in_process import open_session

        def observe(d: Any) -> None:
            self.steps[arm, StepTotal.of(d)] += d.tokens

        observer = None if arm == "oracle" else observe
        return open_session(self.context.pack, self.request(arm, max_requests, max_context), observer)


def _sample_drift(recorder: _Recorder) -> tuple[SampleTable, ...]:
    from harness.engines.in_process import divergence

    steps, prompt = recorder.number("steps"), recorder.number("prompt")
    length = steps + prompt + 1
    text, kind = _real_text(recorder)
    forced: dict[str, list[Any]] = {}
    driver = "direct"
    for arm in ("oracle", "stock", "optimised", "poison"):
        recorder.context.progress(f"drift, {arm} arm")
        with recorder.open(arm, 2, length + 8) as session:
            texts = _drift_texts(text, session.vocab_size, length, recorder.number("seed"))
            forced[arm], driver = _force_texts(recorder, session, texts, prompt)
    rows: list[Row] = []
    for arm in ("stock", "optimised", "poison"):
        for request, (ref, got) in enumerate(zip(forced["oracle"], forced[arm], strict=True)):
            found = divergence(ref, got)
            for position, values in enumerate(zip(found.kl, found.max_gap, found.is_top1_equal, strict=True)):
                rows.append((arm, request, prompt + position, *values))
    columns = ("arm", "request", "position", "kl", "max_gap", "is_top1_equal")
    pair: list[Row] = []
    for request, (one, two) in enumerate(zip(forced["stock"], forced["optimised"], strict=True)):
        found = divergence(one, two)
        places = enumerate(zip(found.kl, found.is_top1_equal, strict=True))
        pair += [(request, prompt + position, *values) for position, values in places]
    return (
        SampleTable(name="drift", columns=columns, rows=tuple(rows)),
        SampleTable(name="pair", columns=("request", "position", "kl", "is_top1_equal"), rows=tuple(pair)),
        SampleTable(name="text", columns=("kind", "digest"), rows=((kind, sha256_hex(text)),)),
        SampleTable(name="driver", columns=("driver",), rows=((driver,),)),
        *ledger_tables(recorder.steps),
    )


def _real_text(recorder: _Recorder) -> tuple[bytes, str]:
    """The text to force, and whether somebody brought it; raises `InputError` where the file is missing."""
    if dict(recorder.check.parameters).get("text") != "local":
        return ZEN.encode(), "embedded"
    return load_text(), "local"


def _drift_texts(text: bytes, vocab: int, length: int, seed: int) -> list[tuple[int, ...]]:
    """A real text in bytes, and random tokens: the model sees both habits and surprises."""
    from harness.engines.in_process import random_texts

    whole = (text * (length // len(text) + 1))[:length]
    return [tuple(byte % vocab for byte in whole), *random_texts(vocab, 1, length, seed)]


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
