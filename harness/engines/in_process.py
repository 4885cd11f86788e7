"""Drive a pack's model in this process: forced text, greedy answers, and how far two arms are apart.

Sessions are the pack's; this module only feeds them tokens in the same order for every arm and compares what
comes back. Log-probabilities are natural, fp32, [positions, vocab].
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from harness.domain.pack import Arm, Decision, Generation, Pack, Session, SessionRequest

__all__ = [
    "Divergence",
    "answer",
    "divergence",
    "force",
    "force_verify",
    "open_session",
    "planted_write",
    "random_texts",
    "watched_digests",
]

Tensor = torch.Tensor
WORD_BYTES = 8
WEIGHT_STEP = 2 * 2654435761
"""Even, so that weights are odd; from Knuth's multiplicative hashing, so that neighbours differ much."""


class Divergence(NamedTuple):
    """How far an arm is from a reference, by position. Non-finite log-probabilities give None."""

    kl: tuple[float | None, ...]
    """KL(reference || arm) in nats."""
    is_top1_equal: tuple[bool, ...]
    max_gap: tuple[float | None, ...]
    """Largest difference of log-probability among the reference's 16 likeliest tokens."""


@contextmanager
def open_session(
    pack: Pack, request: SessionRequest, observer: Callable[[Decision], None] | None = None
) -> Iterator[Session]:
    """A session that is closed whatever happens."""
    session = pack.open_session(request, observer)
    try:
        yield session
    finally:
        session.close()


def random_texts(vocab: int, count: int, length: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """`count` token sequences of `length`, uniform over the vocabulary; equal for equal seeds."""
    source = random.Random(seed)
    return tuple(tuple(source.randrange(vocab) for _ in range(length)) for _ in range(count))


def force(
    session: Session,
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
    switch: Callable[[int], Arm] | None = None,
) -> list[Tensor]:
    """Log-probabilities of the next token along forced text, one tensor [steps + 1, vocab] a request.

    All requests decode together; continuations have one length. `switch` may name the arm for each step.
    """  # fmt: skip
    requests, first = session.prefill(prompts)
    rows = [first.float()]
    for step in range(len(continuations[0])):
        if switch is not None:
            session.switch(switch(step))
        rows.append(session.decode(requests, [text[step] for text in continuations]).float())
    session.finish(requests)
    stacked = torch.stack(rows, dim=1)
    return [stacked[i].clone() for i in range(len(prompts))]


def force_verify(
    session: Session, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]], rows: int
) -> list[Tensor]:
    """As `force`, in verify steps of `rows` tokens that are all accepted; continuations divide by `rows`."""
    requests, first = session.prefill(prompts)
    parts = [[first[i : i + 1].float()] for i in range(len(prompts))]
    for start in range(0, len(continuations[0]), rows):
        drafts = [list(text[start : start + rows]) for text in continuations]
        out = session.verify(requests, drafts, [len(d) for d in drafts]).float()
        for i in range(len(prompts)):
            parts[i].append(out[i * rows : (i + 1) * rows])
    session.finish(requests)
    return [torch.cat(part) for part in parts]


def answer(
    session: Session, items: Sequence[tuple[str, Sequence[int], int]], stop: int, batch: int
) -> tuple[Generation, ...]:
    """Greedy answers to (id, prompt, most tokens), `batch` at a time, in the order given."""
    answers: list[Generation] = []
    for start in range(0, len(items), batch):
        answers += _answer_batch(session, items[start : start + batch], stop)
    return tuple(answers)


def divergence(reference: Tensor, other: Tensor) -> Divergence:
    """Position by position; both [positions, vocab] log-probabilities."""
    ref, arm = reference.double(), other.double()
    finite = torch.isfinite(ref).all(-1) & torch.isfinite(arm).all(-1)
    kl = (ref.exp() * (ref - arm)).sum(-1)
    likeliest = ref.topk(min(16, ref.shape[-1]), dim=-1).indices
    gap = (ref.gather(-1, likeliest) - arm.gather(-1, likeliest)).abs().amax(-1)
    top1 = ref.argmax(-1) == arm.argmax(-1)
    ok = finite.tolist()
    return Divergence(
        tuple(max(0.0, v) if good else None for v, good in zip(kl.tolist(), ok, strict=True)),
        tuple(bool(v) and good for v, good in zip(top1.tolist(), ok, strict=True)),
        tuple(v if good else None for v, good in zip(gap.tolist(), ok, strict=True)),
    )


def watched_digests(session: Session, writable: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """(checksum of what `writable` does not cover, number of such elements) by watched tensor."""
    return {name: _checksum(tensor, writable.get(name)) for name, tensor in session.watched().items()}


@contextmanager
def planted_write(session: Session, writable: Mapping[str, Tensor]) -> Iterator[str]:
    """Change one watched element that `writable` does not cover, give its tensor's name, and put it back."""
    for name, tensor in sorted(session.watched().items()):
        mask = writable.get(name)
        is_free = mask is None or not bool(mask.reshape(-1)[0])
        if is_free and tensor.numel() and tensor.dtype in (torch.float64, torch.float32, torch.bfloat16):
            element = tensor.reshape(-1)
            kept = element[0].clone()
            element[0] += 1.0
            try:
                yield name
            finally:
                element[0] = kept
            return
    raise AssertionError("every watched element is declared writable: isolation could show nothing")


def _checksum(tensor: Tensor, writable: Tensor | None) -> tuple[int, int]:
    """Order-sensitive checksum over the raw bytes of the elements outside `writable`, in words of 8 bytes.

    Sums are modulo 2^64 and every weight is odd, so that a change of one word always shows.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    if writable is not None:
        flat = flat[~writable.reshape(-1)]
    raw = flat.contiguous().view(torch.uint8)
    if raw.numel() == 0:
        return 0, 0
    words = torch.nn.functional.pad(raw, (0, -raw.numel() % WORD_BYTES)).view(torch.int64)
    weights = torch.arange(words.numel(), device=raw.device, dtype=torch.int64) * WEIGHT_STEP + 1
    return int((words * weights).sum().item()), int(flat.numel())


def _answer_batch(
    session: Session, items: Sequence[tuple[str, Sequence[int], int]], stop: int
) -> list[Generation]:
    requests, logprobs = session.prefill([prompt for _, prompt, _ in items])
    texts: list[list[int]] = [[] for _ in items]
    ends: list[str | None] = [None] * len(items)
    while True:
        picks = torch.where(torch.isfinite(logprobs).any(-1), logprobs.argmax(-1), -1).tolist()
        active = [i for i in range(len(items)) if ends[i] is None]
        for row, i in enumerate(active):
            ends[i] = _take(texts[i], picks[row], stop, items[i][2])
        going = [i for i in active if ends[i] is None]
        if not going:
            break
        session.finish([requests[i] for i in active if ends[i] is not None])
        logprobs = session.decode([requests[i] for i in going], [texts[i][-1] for i in going])
    session.finish([requests[i] for i in active])
    return [
        Generation.model_validate({"item": item[0], "tokens": tuple(text), "finish": end})
        for item, text, end in zip(items, texts, ends, strict=True)
    ]


def _take(text: list[int], token: int, stop: int, most: int) -> str | None:
    """Append a token; the reason why the answer ends here, if it does."""
    if token < 0:
        return "error"
    text.append(token)
    if token == stop:
        return "stop"
    return "length" if len(text) >= most else None
