"""Sample tasks with questions and answers: embedded ones in tokens, official ones in text.

Both arms are asked in the same batches, arms alternating; the control asks the first questions of a
poisoned arm. Where lm-eval is installed it gives the prompts and its own scores; else the same prompts are
asked directly.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, TypeVar

from harness.domain.check import Check, SampleTable
from harness.domain.errors import InputError
from harness.domain.pack import EvalItem
from harness.domain.record import Scalar
from harness.domain.resources import data_folder
from harness.domain.stage import StageContext
from harness.engines.serving import Ask, Engine, Reply, StepTotal
from harness.engines.text_codec import TextCodec, TokenCodec, WordCodec
from harness.stages.evals.asking import Transcript, ask_arms, batches
from harness.stages.evals.data import Rows, load_rows, o200k_counter, sources, write_rows
from harness.stages.evals.fixtures import aime_rows, mrcr_rows
from harness.stages.evals.ledger_tables import ledger_tables
from harness.stages.evals.opening import closing_engine, codec_of, journal_of, open_engine
from harness.stages.evals.questions import Question, pick_by_band, read_aime, read_mrcr

__all__ = ["asked_tables", "sample_embedded", "sample_official"]

Row = tuple[Scalar, ...]
Asked = TypeVar("Asked")
NEEDLES = {"mrcr_2needle": 2, "mrcr_4needle": 4, "mrcr_8needle": 8}


class _Asked(NamedTuple):
    """Everything that was asked and answered."""

    main: Transcript
    poison: Transcript | None
    driver: str


def sample_embedded(check: Check, context: StageContext) -> tuple[SampleTable, ...]:
    """Answers to a pack's own task, in tokens."""
    asked = dict(check.parameters)
    items = context.pack.eval_items(str(check.subject), int(asked["items"] or 0), int(asked["seed"] or 0))
    asks = [Ask(item=item.id, tokens=item.prompt, max_tokens=item.max_tokens) for item in items]
    codec = TokenCodec(int(asked["stop"] or 0))
    engine = open_engine(check, context, codec, asks, max(_sizes(check)))
    found = _ask(
        check, context, engine, asks, lambda ask_all: _drive_embedded(check, context, items, ask_all)
    )
    rows = [
        (arm, i.id, i.context, _ids(i.target), _ids(reply.tokens), reply.finish, i.prefix_tokens, *place)
        for arm, transcript in _arms(found)
        for i, reply, place in _told(transcript, arm, [(item.id, 0, item) for item in items])
    ]
    columns = (
        "arm", "item", "context", "target", "answer", "finish", "prefix_tokens", "turn", "batch", "prompt",
    )  # fmt: skip
    return (
        SampleTable(name="items", columns=columns, rows=tuple(rows)),
        *asked_tables(engine, found.main, found.poison),
        SampleTable(name="driver", columns=("driver",), rows=((found.driver,),)),
    )


def sample_official(check: Check, context: StageContext) -> tuple[SampleTable, ...]:
    """Answers to an official task, in text, with lm-eval's own score where lm-eval is there."""
    asked = dict(check.parameters)
    codec = codec_of(str(asked["model"]))
    rows = _rows(check, context, codec)
    questions = _questions(check, rows, codec)
    repeats = range(int(asked["repeats"] or 1))
    most = int(asked["max_tokens"] or 0)
    asks = [
        Ask(
            item=q.id, repeat=repeat, messages=q.messages, text="" if q.messages else q.prompt,
            max_tokens=most, temperature=float(asked["temperature"] or 0), seed=int(asked["seed"] or 0),
            stop=_stops(check),
        )
        for repeat in repeats
        for q in questions
    ]  # fmt: skip
    scorer: list[Callable[[dict[str, str], str], float]] = []

    def drive(ask_all: Callable[[], Transcript]) -> str:
        return _drive_official(check, context, questions, ask_all, scorer)

    with closing_engine(open_engine(check, context, codec, asks, max(_sizes(check)))) as engine:
        found = _ask(check, context, engine, asks, drive)
        told = asked_tables(engine, found.main, found.poison)
    table = [
        (
            arm, q.id, reply.repeat, q.context, q.target, q.prefix, reply.text, reply.finish,
            len(reply.tokens), scorer[0](dict(q.document), reply.text) if scorer else None, *place,
        )
        for arm, transcript in _arms(found)
        for q, reply, place in _told(transcript, arm, [(q.id, r, q) for r in repeats for q in questions])
    ]  # fmt: skip
    columns = (
        "arm", "item", "repeat", "context", "target", "prefix", "answer", "finish", "tokens", "lm_eval",
        "turn", "batch", "prompt",
    )  # fmt: skip
    return (
        SampleTable(name="answers", columns=columns, rows=tuple(table)),
        _data_table(check, rows),
        *told,
        SampleTable(name="driver", columns=("driver",), rows=((found.driver,),)),
    )


def asked_tables(engine: Engine, main: Transcript, poison: Transcript | None) -> tuple[SampleTable, ...]:
    """What the engine did, and where the arms' answers part."""
    transcripts = [main, *([poison] if poison is not None else [])]
    steps: Counter[tuple[str, StepTotal]] = Counter()
    counters: dict[tuple[str, str], int] = {}
    for transcript in transcripts:
        steps.update(transcript.steps())
        for name, value in transcript.counters().items():
            counters[name] = counters.get(name, 0) + value
    arms = [arm for arm in engine.arms if arm != "poison" or poison is not None]
    settings = [(arm, name, value) for arm in arms for name, value in engine.description(arm)]
    return (
        *ledger_tables(steps, has_loads=True),
        _table("counters", ("arm", "name", "value"), _sorted(counters)),
        _table("settings", ("arm", "name", "value"), settings),
        _table(
            "flips",
            ("item", "repeat", "position", "stock_gap", "optimised_gap", "step", "path"),
            _flips(main),
        ),
    )


def _ask(
    check: Check, context: StageContext, engine: Engine, asks: Sequence[Ask], drive: Callable[..., str]
) -> _Asked:
    """Both arms through `drive`, then the poisoned arm on the first questions."""
    journal = journal_of(check, context, "main")
    groups = list(batches(asks, _sizes(check)))
    answered: list[Transcript] = []

    def ask_all() -> Transcript:
        answered.append(ask_arms(engine, groups, ("stock", "optimised"), journal, context.progress))
        return answered[-1]

    driver = drive(ask_all)
    poison = None
    count = int(check.number("poison_items"))
    if "poison" in engine.arms and count > 0:
        context.progress(f"{check.subject}, poisoned arm")
        poison_journal = journal_of(check, context, "poison")
        widest = max(_sizes(check))
        first = [asks[:count][place : place + widest] for place in range(0, len(asks[:count]), widest)]
        poison = ask_arms(engine, first, ("poison",), poison_journal, context.progress)
        poison_journal.done()
    journal.done()
    return _Asked(answered[0], poison, driver)


def _drive_embedded(
    check: Check, context: StageContext, items: Sequence[EvalItem], ask_all: Callable[[], Transcript]
) -> str:
    if find_spec("lm_eval") is None:
        ask_all()
        return "direct"
    from harness.engines.lm_eval_model import FasttrackLM, encode_ids, run_task

    def answer(prompts: Sequence[str]) -> list[str]:
        _require_prompts(prompts, [encode_ids(item.prompt) for item in items])
        replies = ask_all().replies("stock")
        return [encode_ids(replies[item.id, 0].tokens) for item in items]

    documents = [{"prompt": encode_ids(i.prompt), "target": encode_ids(i.target)} for i in items]
    most = max(item.max_tokens for item in items)
    model = FasttrackLM(answer_all=answer)
    with _documents_folder(context) as folder:
        run_task(model, str(check.subject), documents, is_rolling=False, max_tokens=most, folder=folder)
    return "lm-eval"


def _drive_official(
    check: Check,
    context: StageContext,
    questions: Sequence[Question],
    ask_all: Callable[[], Transcript],
    scorer: list[Callable[[dict[str, str], str], float]],
) -> str:
    if find_spec("lm_eval") is None:
        ask_all()
        return "direct"
    from harness.engines.lm_eval_model import FasttrackLM, run_yaml_task, task_file

    def answer(prompts: Sequence[str]) -> list[str]:
        _require_prompts(prompts, [question.prompt for question in questions])
        replies = ask_all().replies("stock")
        return [replies[question.id, 0].text for question in questions]

    task = str(check.parameter("task"))
    file = task_file("aime/aime25") if task == "aime25" else data_folder("evals") / "mrcr" / f"{task}.yaml"
    documents = [dict(question.document) for question in questions]
    with _documents_folder(context) as folder:
        scorer.append(run_yaml_task(FasttrackLM(answer_all=answer), file, documents, folder))
    return "lm-eval"


@contextmanager
def _documents_folder(context: StageContext) -> Iterator[Path]:
    """A folder for the copies that lm-eval makes of the documents, gone afterwards: long ones take
    gigabytes.
    """
    parent = context.cache / "evals"
    parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=parent, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _require_prompts(given: Sequence[str], expected: Sequence[str]) -> None:
    """lm-eval must ask what would be asked without it, or a bare worker's answers are to other questions."""
    wrong = [n for n, (a, b) in enumerate(zip(given, expected, strict=True)) if a != b]
    if wrong:
        raise AssertionError(f"lm-eval's prompt of document {wrong[0]} is another than the harness's own")


def _rows(check: Check, context: StageContext, codec: TextCodec) -> Rows:
    """The task's rows, from where the check says."""
    asked = dict(check.parameters)
    task, data = str(asked["task"]), str(asked["data"])
    if data != "generated":
        return load_rows(task, "local" if data == "local" else "official")
    if not isinstance(codec, WordCodec):
        raise InputError(
            f"data can be generated for a model with a word list only, and {asked['model']} has none; choose "
            "another with a list under evals/, or bring data with `--data FILE`"
        )
    words, count, seed = codec.words, int(asked["questions"] or 0), int(asked["seed"] or 0)
    is_aime = task == "aime25"
    items = context.pack.eval_items(words.chain_task if is_aime else words.retrieval_task, count, seed)
    rows = aime_rows(items, codec) if is_aime else mrcr_rows(items, codec)
    return write_rows(rows, context.cache / "evals" / "generated", task)


def _questions(check: Check, rows: Rows, codec: TextCodec) -> tuple[Question, ...]:
    asked = dict(check.parameters)
    task, most = str(asked["task"]), int(asked["questions"] or 0)
    if task == "aime25":
        return read_aime(rows.rows)[: most or None]
    needles = None if asked["data"] == "generated" else NEEDLES[task]
    count = o200k_counter() if asked["length_unit"] == "o200k_base" else _model_counter(codec)
    questions = read_mrcr(rows.rows, needles, count)
    bands = str(asked["bands"] or "")
    return pick_by_band(questions, bands.split(","), most) if bands else questions[: most or None]


def _model_counter(codec: TextCodec) -> Callable[[str], int]:
    return lambda text: len(codec.encode(Ask(item="length", text=text, max_tokens=1))) if text.strip() else 0


def _data_table(check: Check, rows: Rows) -> SampleTable:
    source = sources()[str(check.parameter("task"))]
    unit = str(dict(check.parameters)["length_unit"])
    row = (source.dataset, source.revision, rows.kind, rows.digest, unit)
    return _table("data", ("dataset", "revision", "kind", "digest", "length_unit"), [row])


def _stops(check: Check) -> tuple[str, ...]:
    """lm-eval's stop texts of the task, without the special tokens that only other models write."""
    return ("Question:",) if check.parameter("task") == "aime25" else ()


def _sizes(check: Check) -> list[int]:
    """Batch sizes that take turns."""
    asked = dict(check.parameters)
    return [int(size) for size in str(asked.get("batches") or asked.get("batch") or 1).split(",")]


def _arms(found: _Asked) -> list[tuple[str, Transcript]]:
    arms = [("stock", found.main), ("optimised", found.main)]
    return arms if found.poison is None else [*arms, ("poison", found.poison)]


def _told(
    transcript: Transcript, arm: str, asked: Sequence[tuple[str, int, Asked]]
) -> list[tuple[Asked, Reply, tuple[int, int, str]]]:
    """(question, reply, (turn, batch, digest of the prompt)) of what an arm answered, in the order asked."""
    replies, turns, prompts = transcript.replies(arm), transcript.turns(arm), transcript.prompts(arm)
    return [
        (what, replies[item, repeat], (*turns[item, repeat], prompts[item, repeat]))
        for item, repeat, what in asked
        if (item, repeat) in replies
    ]


def _flips(main: Transcript) -> list[Row]:
    """Where the answers of the two arms part, and what either thought of the other's token there."""
    stock, optimised = main.replies("stock"), main.replies("optimised")
    rows: list[Row] = []
    for key, one in sorted(stock.items()):
        two = optimised[key]
        if one.tokens == two.tokens:
            continue
        pairs = zip(one.tokens, two.tokens, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one.tokens), len(two.tokens)))
        step = two.steps[at] if at < len(two.steps) else None
        path = two.paths[at] if at < len(two.paths) else ""
        rows.append((*key, at, _gap(one, two, at), _gap(two, one, at), step, path))
    return rows


def _gap(own: Reply, other: Reply, at: int) -> float | None:
    """Size of an arm's log-probability of its token over that of the other arm's; None where it is not
    told.
    """
    if at >= len(own.likeliest) or at >= len(other.tokens):
        return None
    told = {token: float(value) for token, value in own.likeliest[at]}
    mine, theirs = told.get(own.tokens[at]), told.get(other.tokens[at])
    return None if mine is None or theirs is None else abs(mine - theirs)


def _ids(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def _sorted(counts: dict[tuple[str, str], int]) -> list[Row]:
    return [(*key, value) for key, value in sorted(counts.items())]


def _table(name: str, columns: tuple[str, ...], rows: Sequence[Row]) -> SampleTable:
    return SampleTable(name=name, columns=columns, rows=tuple(rows))
