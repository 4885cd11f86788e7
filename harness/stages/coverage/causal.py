"""The causal matrix, one eval at a time: which ops, made wrong, change its answers.

The eval's questions, all at once, are answered by stock, by the optimised path, and by the optimised path
with each op in turn made wrong. An op whose poison changes no more answers than the path itself does is not
covered by that eval, and the outcome names it. Drift has a check for each op (`poison`), as every change
needs it; these are for full runs, and for a GPU. Tables: `answers` (arm, op, item, tokens, digest, is_right)
and `ran` (op, launches).
"""

from collections.abc import Iterator, Sequence
from typing import Any

from harness.domain.check import Check, Control, Figure, Outcome, Samples, SampleTable, Status, judged
from harness.domain.record import sha256_hex
from harness.stages.coverage.next_steps import next_steps
from harness.stages.coverage.probe import Probe, Row
from harness.stages.coverage.requests import chooser
from harness.stages.coverage.witnesses import records

__all__ = ["judge_causal", "sample_causal"]

MAX_ANSWER = 24
"""Tokens of an answer: an op that is wrong shows in the first ones."""
FEATURE_VOCAB = 64
Question = tuple[str, Sequence[int], Sequence[int], int]
"""Item, prompt, expected tokens (none: any are right) and most tokens of an answer."""


def sample_causal(probe: Probe) -> tuple[SampleTable, ...]:
    """Every arm's answers to the same questions."""
    rows: list[Row] = []
    ran: list[Row] = []
    ops = [op.name for op in probe.context.pack.ops()]
    for arm, op in (("stock", ""), ("clean", ""), *(("poison", op) for op in ops)):
        probe.context.progress(f"{probe.check.subject}, {arm} {op}".strip())
        answers, launches = _answers(probe, arm, op)
        rows += [(arm, op, *row) for row in answers]
        if arm == "poison":
            ran.append((op, launches))
    columns = ("arm", "op", "item", "tokens", "digest", "is_right")
    return (
        SampleTable(name="answers", columns=columns, rows=tuple(rows)),
        SampleTable(name="ran", columns=("op", "launches"), rows=tuple(ran)),
    )


def _answers(probe: Probe, arm: str, op: str) -> tuple[list[Row], int]:
    """(one row a question; launches of the op) of one arm."""
    from harness.engines.in_process import open_session

    seed = int(probe.check.parameter("seed") or 0)
    name = str(probe.check.subject)
    stop = probe.check.parameter("stop_token")
    questions = list(_questions(probe, name, seed))
    longest = max(len(prompt) + most for _, prompt, _, most in questions)
    request = probe.request(
        "stock" if arm == "stock" else "optimised",
        max_requests=len(questions),
        max_context=longest + 8,
        poisoned_op=op or None,
    )
    with open_session(probe.context.pack, request, None) as session:
        choices = [chooser(name, session.vocab_size, seed)[0] for _ in questions]
        texts = _written(session, questions, choices, stop)
        launches = int(session.launches().get(op, 0))
    rows: list[Row] = [
        (
            item, len(tokens), sha256_hex(repr(tokens).encode()),
            not target or tuple(tokens) == tuple(target)[:most],
        )
        for (item, _, target, most), tokens in zip(questions, texts, strict=True)
    ]  # fmt: skip
    return rows, launches


def _questions(probe: Probe, name: str, seed: int) -> Iterator[Question]:
    """An embedded task's items, or random prompts for a feature of sampling."""
    from harness.engines.in_process import random_texts

    pack = probe.context.pack
    task = next((t for t in pack.eval_tasks() if t.name == name), None)
    if task is None:
        prompts = random_texts(FEATURE_VOCAB, probe.cell.batch, probe.cell.context, seed)
        for number, prompt in enumerate(prompts):
            yield f"{name}-{number}", prompt, (), probe.planned_steps
        return
    for item in pack.eval_items(name, min(task.smoke_items, probe.cell.batch), seed):
        yield item.id, item.prompt, item.target, min(item.max_tokens, MAX_ANSWER)


def _written(
    session: Any, questions: Sequence[Question], choices: Sequence[Any], stop: object
) -> list[list[int]]:
    """Tokens of each answer, up to its stop token; every request stays in the batch to the end, so that no
    answer changes another's."""
    requests, rows = session.prefill([prompt for _, prompt, _, _ in questions])
    texts = [[choose(row.float(), 0)] for choose, row in zip(choices, rows, strict=True)]
    longest = max(most for *_, most in questions)
    while len(texts[0]) < longest:
        rows = session.decode(requests, [text[-1] for text in texts])
        for text, choose, row in zip(texts, choices, rows, strict=True):
            text.append(choose(row.float(), len(text)))
    session.finish(requests)
    return [_until(text[:most], stop) for text, (*_, most) in zip(texts, questions, strict=True)]


def _until(text: list[int], stop: object) -> list[int]:
    """A text up to its first stop token, that included."""
    return text[: text.index(stop) + 1] if stop in text else text


def judge_causal(check: Check, samples: Samples) -> Outcome:
    """PASS where every op changes answers when it is wrong; else the ops that the eval is blind to."""
    answers = {
        arm: {str(r["item"]): str(r["digest"]) for r in records(samples, "answers") if r["arm"] == arm}
        for arm in ("stock", "clean")
    }
    clean = answers["clean"]
    right = sum(bool(r["is_right"]) for r in records(samples, "answers") if r["arm"] == "clean")
    noise = _changed(clean, answers["stock"])
    changed: dict[str, int] = {}
    idle = []
    for row in records(samples, "ran"):
        op = str(row["op"])
        poisoned = {
            str(r["item"]): str(r["digest"])
            for r in records(samples, "answers")
            if r["arm"] == "poison" and r["op"] == op
        }
        if poisoned.keys() != clean.keys():
            continue
        if row["launches"]:
            changed[op] = _changed(clean, poisoned)
        else:
            idle.append(op)
    blind = [op for op, count in changed.items() if count <= noise]
    control = Control(
        kind="poison", description="each op in turn made wrong by a visible amount",
        failed=bool(changed) and len(blind) < len(changed),
        observed=", ".join(f"{op} {n} of {len(clean)}" for op, n in changed.items())[:500] or "nothing ran",
    )  # fmt: skip
    counts = {"clean_right": right, "stock_changed": noise} | {
        f"changed_{op}": n for op, n in changed.items()
    }
    figures = tuple(Figure(name=name, value=n, note=f"of {len(clean)} answers") for name, n in counts.items())
    if not clean or answers["stock"].keys() != clean.keys():
        status, words = Status.NO_EVIDENCE, "the arms did not answer the same questions"
    elif not changed:
        status, words = Status.NO_EVIDENCE, "no op of the path ran in this eval"
    elif blind or idle:
        said = [f"{', '.join(blind)} when wrong"] if blind else []
        said += [f"{', '.join(idle)}, which never ran"] if idle else []
        status = Status.NO_EVIDENCE
        words = f"{check.subject} does not notice {' or '.join(said)}: it is no evidence about them"
    else:
        status = Status.PASS
        words = (
            f"{check.subject} notices each of {len(changed)} ops being wrong; stock changes {noise} answers"
        )
    return judged(check, samples, status, words, next_steps(check), control, figures)


def _changed(one: dict[str, str], other: dict[str, str]) -> int:
    return sum(other.get(item) != digest for item, digest in one.items())
