"""Features of serving that an optimisation must keep, each shown at work in both arms.

- `temperature_sampling`: what the optimised arm draws is held to the probabilities that stock states for it.
- `structured_output`: every answer under a schema parses under it.
- `stop_handling`: a stop text ends an answer where it would have come, and is no part of it.
- `full_context`: what stands at the beginning, in the middle and at the end of the longest prompt is found.
- `prefix_caching`: a prompt that finds its prefix cached is answered as one that does not.
- `batch_mates`: a request is answered alone as among others, as nearly as stock does it.

Each has a run that must fail: a poisoned arm, no schema, no stop, no needle, another prompt, a neighbour.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from pydantic import Field

from harness.domain.check import Check, SampleTable
from harness.domain.errors import InputError
from harness.domain.pack import EvalItem
from harness.domain.record import Record, Scalar
from harness.domain.stage import StageContext
from harness.engines.serving import Ask, Engine, Reply, StepTotal
from harness.engines.text_codec import TextCodec, WordCodec
from harness.engines.vllm_server import draw_among
from harness.measure.goodness import Draw
from harness.stages.evals.ledger_tables import ledger_tables
from harness.stages.evals.opening import closing_engine, codec_of, open_engine, open_server
from harness.stages.evals.served_asks import Needle, needle_asks, served_asks

__all__ = ["FEATURES", "StructuredAnswer", "sample_feature"]

Row = tuple[Scalar, ...]
Feature = Literal[
    "temperature_sampling",
    "structured_output",
    "stop_handling",
    "full_context",
    "prefix_caching",
    "batch_mates",
]
FEATURES: Mapping[Feature, str] = {
    "temperature_sampling": "tokens drawn on the optimised path follow the probabilities that stock states",
    "structured_output": "every answer under a schema parses under it, in both arms",
    "stop_handling": "a stop text ends an answer where it would have come, in both arms",
    "full_context": "both arms find what stands at 0, 50 and 99 % of the longest prompt",
    "prefix_caching": "a prompt with a cached prefix is answered as a cold one, within stock's own spread",
    "batch_mates": "a request is answered alone as among others, as nearly as stock does it",
}
"""What a PASS of each says."""
DEPTHS = (0, 50, 99)
LIKELY = -4.6
"""Natural logarithm of 1 %: rounding moves what is far less likely by much, and nobody draws it."""
STOP_AT = 5
"""Word of the unstopped answer that the stopped one ends at."""


class StructuredAnswer(Record):
    """What an answer under a schema must be: short, and with every kind of place that goes wrong."""

    unit: Literal["us", "ms"]
    name: str = Field(pattern=r"^[a-z]{3}$")
    is_fast: bool


class _Run(NamedTuple):
    """One check's engine and questions."""

    engine: Engine
    codec: TextCodec
    asks: tuple[Ask, ...]
    steps: dict[tuple[str, StepTotal], int]
    counters: dict[tuple[str, str], int]

    def answer(self, arm: str, groups: Sequence[Sequence[Ask]]) -> list[tuple[Reply, ...]]:
        """Groups one after another on a fresh start of an arm; its ledger is added up."""
        with self.engine.open(arm) as server:
            replies = [server.answer(group) for group in groups]
            for kind, tokens in server.ledger().items():
                self.steps[arm, kind] = self.steps.get((arm, kind), 0) + tokens
            for name, value in server.counters().items():
                self.counters[arm, name] = self.counters.get((arm, name), 0) + value
        return replies

    def counters_table(self) -> SampleTable:
        """What the engine counted."""
        rows = tuple((*key, value) for key, value in sorted(self.counters.items()))
        return SampleTable(name="counters", columns=("arm", "name", "value"), rows=rows)


def sample_feature(check: Check, context: StageContext) -> tuple[SampleTable, ...]:
    """Samples of one feature."""
    name = str(check.subject)
    sampler = {
        "temperature_sampling": _sample_temperature,
        "structured_output": _sample_structured,
        "stop_handling": _sample_stop,
        "full_context": _sample_full_context,
        "prefix_caching": _sample_prefix,
        "batch_mates": _sample_mates,
    }[name]
    if dict(check.parameters)["engine"] == "vllm":
        return _sample_served(check, context, sampler)
    codec = codec_of(str(dict(check.parameters)["model"]))
    asks = tuple(_asks(check, context, codec))
    run = _Run(open_engine(check, context, codec, asks, max(len(asks), 2)), codec, asks, {}, {})
    return _tables(run, sampler(check, context, run))


Sampler = Callable[[Check, StageContext, "_Run"], tuple[SampleTable, ...]]


def _sample_served(check: Check, context: StageContext, sampler: Sampler) -> tuple[SampleTable, ...]:
    """The same of servers: what is asked is in their own tokens, so that stock is up before it is known."""
    engine = open_server(check, context)
    with closing_engine(engine):
        context.progress(f"{check.subject}, stock server starts")
        with engine.open("stock") as server:
            if check.subject == "full_context":
                needles = needle_asks(check, server)
            elif check.subject == "structured_output":
                asks = tuple(_asks(check, context, codec_of("served")))
            else:
                asks = tuple(served_asks(check, server))
        if check.subject == "full_context":
            run = _Run(engine, codec_of("served"), (), {}, {})
            tables = _sample_needles(check, context, run, needles)
        else:
            run = _Run(engine, codec_of("served"), asks, {}, {})
            tables = sampler(check, context, run)
        settings = [(arm, name, value) for arm in engine.arms for name, value in engine.description(arm)]
        table = SampleTable(name="settings", columns=("arm", "name", "value"), rows=tuple(settings))
        return (*_tables(run, tables), table)


def _tables(run: "_Run", tables: tuple[SampleTable, ...]) -> tuple[SampleTable, ...]:
    driver = SampleTable(name="driver", columns=("driver",), rows=(("direct",),))
    return (*tables, *ledger_tables(run.steps), run.counters_table(), driver)


def _asks(check: Check, context: StageContext, codec: TextCodec) -> list[Ask]:
    """The questions that a feature is shown on."""
    asked = dict(check.parameters)
    name, count, seed = str(check.subject), int(asked["items"] or 0), int(asked["seed"] or 0)
    most = int(asked["max_tokens"] or 0)
    if name == "structured_output":
        schema = _schema()
        return [
            Ask(item=f"{name}-{n}", text=f"{seed + n}: ", max_tokens=most, answer_schema=schema)
            for n in range(count)
        ]
    if not isinstance(codec, WordCodec):
        raise InputError(
            f"{check.id}: {asked['model']} has no word list under evals/, so nothing can be asked of it"
        )
    words = codec.words
    if name in ("full_context", "prefix_caching"):
        items = context.pack.eval_items(words.retrieval_task, max(count, 1) * 8, seed)
        longest = max(items, key=lambda item: item.context)
        if name == "full_context":
            return [_at_depth(longest, depth, words.query, codec) for depth in DEPTHS]
        return [Ask(item=longest.id, tokens=longest.prompt, max_tokens=most)]
    items = context.pack.eval_items(words.chain_task, count, seed)
    temperature = float(asked["temperature"] or 0)
    return [
        Ask(item=i.id, tokens=i.prompt, max_tokens=most, temperature=temperature, seed=seed) for i in items
    ]


def _schema() -> str:
    import json

    return json.dumps(StructuredAnswer.model_json_schema())


def _sample_temperature(check: Check, context: StageContext, run: _Run) -> tuple[SampleTable, ...]:
    """Draws of the optimised arm and of a control, each with its place in what stock states. The control is
    the poisoned arm; where there is none, the optimised arm's draws held to the place behind their own.
    """
    drawn: dict[str, tuple[Reply, ...]] = {}
    for arm in ("optimised", "poison"):
        if arm in run.engine.arms:
            context.progress(f"{check.subject}, {arm} arm")
            drawn[arm] = run.answer(arm, [run.asks])[0]
    rows: list[Row] = []
    with run.engine.open("stock") as stock:
        for arm, replies in drawn.items():
            stated = _stated(stock, run.asks, replies)
            rows += _draw_rows(arm, run.asks, replies, stated)
        if "poison" not in drawn:
            moved = tuple(
                reply.model_copy(update={"tokens": (*reply.tokens[1:], *reply.tokens[:1])})
                for reply in drawn["optimised"]
            )
            rows += _draw_rows("poison", run.asks, moved, _among(moved, drawn["optimised"]))
    columns = ("arm", "item", "position", "token", "above", "own")
    return (SampleTable(name="draws", columns=columns, rows=tuple(rows)),)


def _draw_rows(
    arm: str, asks: Sequence[Ask], replies: Sequence[Reply], stated: Sequence[Sequence[Draw | None]]
) -> list[Row]:
    return [
        (arm, ask.item, place, token, draw and draw.above, draw and draw.own)
        for ask, reply, draws in zip(asks, replies, stated, strict=True)
        for place, (token, draw) in enumerate(zip(reply.tokens, draws, strict=True))
    ]


def _stated(stock: Any, asks: Sequence[Ask], replies: Sequence[Reply]) -> list[list[Draw | None]]:
    """What stock states for tokens that another arm drew: by forcing them through stock where the engine
    can, else what the drawing arm stated itself among its likeliest tokens.
    """
    if hasattr(stock, "stated"):
        return list(stock.stated(asks, replies))
    return _among(replies, replies)


def _among(drawn: Sequence[Reply], told: Sequence[Reply]) -> list[list[Draw | None]]:
    """The places of drawn tokens among the likeliest ones that replies tell, place by place."""
    return [
        [draw_among(token, likely) for token, likely in zip(r.tokens, t.likeliest, strict=False)]
        for r, t in zip(drawn, told, strict=True)
    ]


def _sample_structured(check: Check, context: StageContext, run: _Run) -> tuple[SampleTable, ...]:
    rows: list[Row] = []
    for arm in ("stock", "optimised"):
        context.progress(f"{check.subject}, {arm} arm")
        rows += [(arm, r.item, "", r.text, r.finish) for r in run.answer(arm, [run.asks])[0]]
    free = [ask.model_copy(update={"answer_schema": ""}) for ask in run.asks[:2]]
    rows += [("control", r.item, "", r.text, r.finish) for r in run.answer("optimised", [free])[0]]
    return (_texts(rows),)


def _sample_stop(check: Check, context: StageContext, run: _Run) -> tuple[SampleTable, ...]:
    rows: list[Row] = []
    for arm in ("stock", "optimised"):
        context.progress(f"{check.subject}, {arm} arm")
        free = run.answer(arm, [run.asks])[0]
        stops = [r.text.split()[STOP_AT] if len(r.text.split()) > STOP_AT else "\n" for r in free]
        asks = [a.model_copy(update={"stop": (s,)}) for a, s in zip(run.asks, stops, strict=True)]
        found = run.answer(arm, [asks])[0]
        rows += [
            (arm, r.item, whole.text[: whole.text.find(stop)], r.text, r.finish)
            for r, whole, stop in zip(found, free, stops, strict=True)
        ]
        if arm == "optimised":
            rows += [
                ("control", whole.item, whole.text[: whole.text.find(stop)], whole.text, whole.finish)
                for whole, stop in zip(free, stops, strict=True)
            ]
    return (_texts(rows),)


def _sample_full_context(check: Check, context: StageContext, run: _Run) -> tuple[SampleTable, ...]:
    rows: list[Row] = []
    targets = {ask.item: _target(ask) for ask in run.asks}
    asks = [ask.model_copy(update={"item": ask.item.partition("|")[0]}) for ask in run.asks]
    names = {a.item: b.item for a, b in zip(asks, run.asks, strict=True)}
    for arm in ("stock", "optimised"):
        context.progress(f"{check.subject}, {arm} arm")
        found = [r for group in run.answer(arm, [[ask] for ask in asks]) for r in group]
        rows += [(arm, r.item, run.codec.decode(targets[names[r.item]]), r.text, r.finish) for r in found]
    lost = asks[0].model_copy(update={"tokens": _without_needle(asks[0].tokens, targets[run.asks[0].item])})
    found = list(run.answer("optimised", [[lost]])[0])
    rows += [("control", r.item, run.codec.decode(targets[names[r.item]]), r.text, r.finish) for r in found]
    return (_texts(rows),)


def _sample_prefix(check: Check, context: StageContext, run: _Run) -> tuple[SampleTable, ...]:
    rows: list[Row] = []
    (ask,) = run.asks
    tail = 12
    other = ask.model_copy(
        update={"item": "other", "tokens": (*ask.tokens[:-tail], *reversed(ask.tokens[-tail:]))}
    )
    for arm in ("stock", "optimised"):
        context.progress(f"{check.subject}, {arm} arm")
        cold = run.answer(arm, [[ask]])[0][0]
        strange, hit = (group[0] for group in run.answer(arm, [[other], [ask]]))
        rows += [(arm, ask.item, *row) for row in _gaps(cold, hit)]
        if arm == "optimised":
            rows += [("control", ask.item, *row) for row in _gaps(cold, strange)]
    return (_spreads(rows),)


def _sample_mates(check: Check, context: StageContext, run: _Run) -> tuple[SampleTable, ...]:
    rows: list[Row] = []
    for arm in ("stock", "optimised"):
        context.progress(f"{check.subject}, {arm} arm")
        alone = run.answer(arm, [[ask] for ask in run.asks[:2]])
        among = run.answer(arm, [run.asks])[0]
        for one, together in zip([group[0] for group in alone], among, strict=False):
            rows += [(arm, one.item, *row) for row in _gaps(one, together)]
        if arm == "optimised":
            rows += [("control", alone[0][0].item, *row) for row in _gaps(alone[0][0], among[1])]
    return (_spreads(rows),)


def _gaps(one: Reply, two: Reply) -> list[tuple[int, float | None]]:
    """(position, largest difference of log-probability among likely tokens that both tell), until the answers
    part.
    """
    rows: list[tuple[int, float | None]] = []
    places = zip(one.tokens, two.tokens, one.likeliest, two.likeliest, strict=False)
    for place, (a, b, told_one, told_two) in enumerate(places):
        first, second = dict(told_one), dict(told_two)
        shared = [t for t in first.keys() & second.keys() if max(first[t], second[t]) >= LIKELY]
        gaps = [abs(float(first[t]) - float(second[t])) for t in shared]
        rows.append((place, max(gaps) if gaps else None))
        if a != b:
            break
    return rows or [(0, None)]


def _sample_needles(
    check: Check, context: StageContext, run: _Run, needles: Sequence[Needle]
) -> tuple[SampleTable, ...]:
    """What servers find in their longest prompt. An answer that holds the code counts as the code."""
    rows: list[Row] = []
    for arm in ("stock", "optimised"):
        context.progress(f"{check.subject}, {arm} arm")
        found = [group[0] for group in run.answer(arm, [[needle.ask] for needle in needles])]
        rows += [
            (arm, reply.item, needle.expected, *_code_in(reply, needle.expected))
            for needle, reply in zip(needles, found, strict=True)
        ]
    lost = run.answer("optimised", [[needles[0].without]])[0][0]
    rows.append(("control", lost.item, needles[0].expected, *_code_in(lost, needles[0].expected)))
    return (_texts(rows),)


def _code_in(reply: Reply, code: str) -> tuple[str, str]:
    """(answer, how it ended): the code alone where the answer has it."""
    return (code, "stop") if code in reply.text else (reply.text, reply.finish)


def _at_depth(item: EvalItem, depth: int, query: int, codec: WordCodec) -> Ask:
    """The dialogue with the turn that is asked for at this share of it, and one like turn elsewhere."""
    words = codec.words
    start = item.prompt.index(query)
    question = list(item.prompt[start:])
    turns = _split(item.prompt[1:start], words.user)
    request = tuple(question[1:3])
    like = [turn for turn in turns if tuple(turn[1:3]) == request]
    rest = [turn for turn in turns if tuple(turn[1:3]) != request]
    needle, decoy = like[0], like[1]
    at = min(len(rest), round(len(rest) * depth / 100))
    if depth == 0:
        rest, ordinal = [needle, *rest, decoy], 0
    elif depth == 99:
        rest, ordinal = [decoy, *rest, needle], 1
    else:
        rest, ordinal = [decoy, *rest[:at], needle, *rest[at:]], 1
    question[3] = words.ordinal + ordinal
    prefix = question[5 : 5 + words.prefix_tokens]
    answer = needle[needle.index(words.assistant) + 1 :]
    target = (*prefix, *answer, words.end)
    prompt = (words.begin, *(token for turn in rest for token in turn), *question)
    name = f"depth-{depth}|{' '.join(map(str, target))}"
    return Ask(item=name, tokens=prompt, max_tokens=len(target) + 8)


def _target(ask: Ask) -> tuple[int, ...]:
    return tuple(int(token) for token in ask.item.partition("|")[2].split())


def _without_needle(prompt: Sequence[int], target: Sequence[int]) -> tuple[int, ...]:
    """The prompt in which the needle's answer is written backwards, so that it cannot be read from it."""
    body = list(target[3:-1])
    text = list(prompt)
    for place in range(len(text) - len(body)):
        if text[place : place + len(body)] == body:
            text[place : place + len(body)] = body[::-1]
            break
    return tuple(text)


def _split(tokens: Sequence[int], begin: int) -> list[list[int]]:
    """Turns of a dialogue, each from the token that begins one."""
    turns: list[list[int]] = []
    for token in tokens:
        if token == begin:
            turns.append([])
        turns[-1].append(token)
    return turns


def _texts(rows: Sequence[Row]) -> SampleTable:
    columns = ("arm", "item", "expected", "answer", "finish")
    return SampleTable(name="texts", columns=columns, rows=tuple(rows))


def _spreads(rows: Sequence[Row]) -> SampleTable:
    return SampleTable(name="spreads", columns=("arm", "item", "position", "gap"), rows=tuple(rows))
