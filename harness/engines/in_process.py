"""Drive a pack's model in this process: forced text, written answers, and how far two arms are apart.

Sessions are the pack's; this module only feeds them tokens in the same order for every arm and compares what
comes back. Log-probabilities are natural, fp32, [positions, vocab].
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch

from harness.domain.pack import Arm, Decision, Pack, Session, SessionRequest
from harness.engines.ledger import Ledger

__all__ = [
    "Divergence",
    "among",
    "divergence",
    "drawn_at",
    "finished",
    "force",
    "force_verify",
    "generate",
    "open_session",
    "planted_write",
    "random_texts",
    "stack_rows",
    "versions",
    "watched_digests",
]

Tensor = torch.Tensor
Around = Callable[[int], AbstractContextManager[None]]
"""What a step runs inside, by its number."""
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


def _unwatched(_step: int) -> AbstractContextManager[None]:
    return nullcontext()


def finished(result: Tensor) -> Tensor:
    """What a step gave, once it is there: a device may still be at work when a step returns."""
    if result.is_cuda:
        torch.cuda.synchronize(result.device)
    return result


@contextmanager
def open_session(
    pack: Pack, request: SessionRequest, observer: Callable[[Decision], None] | None = None
) -> Iterator[Session]:
    """A session that is closed whatever happens. The observer hears records; a `Ledger` takes what the pack
    says as it is.
    """
    tell = observer
    if observer is not None and not isinstance(observer, Ledger):
        wanted = observer

        def tell(decided: object) -> None:
            wanted(Decision.of(decided))

    session = pack.open_session(request, tell)
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
    around: Around = _unwatched,
) -> list[Tensor]:
    """Log-probabilities of the next token along forced text, one tensor [steps + 1, vocab] a request.

    All requests decode together; continuations have one length. `switch` may name the arm for each step, and
    each step runs inside `around(step)`.
    """  # fmt: skip
    requests, first = session.prefill(prompts)
    rows = [first.float()]
    for step in range(len(continuations[0])):
        if switch is not None:
            session.switch(switch(step))
        with around(step):
            out = session.decode(requests, [text[step] for text in continuations])
        rows.append(out.float())
    session.finish(requests)
    stacked = torch.stack(rows, dim=1)
    return [stacked[i].clone() for i in range(len(prompts))]


def force_verify(
    session: Session,
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
    rows: int,
    around: Around = _unwatched,
) -> list[Tensor]:
    """As `force`, in verify steps of `rows` tokens that are all accepted; continuations divide by `rows`."""
    requests, first = session.prefill(prompts)
    parts = [[first[i : i + 1].float()] for i in range(len(prompts))]
    for start in range(0, len(continuations[0]), rows):
        drafts = [list(text[start : start + rows]) for text in continuations]
        with around(start // rows):
            out = session.verify(requests, drafts, [len(d) for d in drafts])
        out = out.float()
        for i in range(len(prompts)):
            parts[i].append(out[i * rows : (i + 1) * rows])
    session.finish(requests)
    return [torch.cat(part) for part in parts]


def generate(
    session: Session, prompts: Sequence[Sequence[int]], steps: int, choose: Callable[[Tensor, int], int]
) -> tuple[list[list[int]], list[Tensor]]:
    """Tokens that `choose(log-probabilities [vocab], step)` picks, and as `force` the log-probabilities along
    them.
    """
    requests, logprobs = session.prefill(prompts)
    rows, texts = [logprobs.float()], [list[int]() for _ in prompts]
    for step in range(steps):
        for text, row in zip(texts, rows[-1], strict=True):
            text.append(choose(row, step))
        rows.append(session.decode(requests, [text[-1] for text in texts]).float())
    session.finish(requests)
    stacked = torch.stack(rows, dim=1)
    return texts, [stacked[i].clone() for i in range(len(prompts))]


def drawn_at(temperature: float, seed: int) -> Callable[[Tensor, int], int]:
    """A chooser that draws at a temperature; equal draws for equal seeds, whatever the log-probabilities."""
    source = random.Random(seed)

    def choose(row: Tensor, _step: int) -> int:
        shares = torch.softmax(row.double() / temperature, dim=0).cumsum(0)
        return int(torch.searchsorted(shares, source.random() * float(shares[-1])).clamp(max=len(row) - 1))

    return choose


def among(allowed: Callable[[int], Sequence[int]]) -> Callable[[Tensor, int], int]:
    """A chooser of the likeliest token that a grammar allows at a step."""

    def choose(row: Tensor, step: int) -> int:
        tokens = list(allowed(step))
        return tokens[int(row[tokens].argmax())]

    return choose


def stack_rows(rows: Sequence[Tensor]) -> Tensor:
    """[positions, vocab] of single positions."""
    return torch.stack(list(rows))


def divergence(reference: Tensor, other: Tensor) -> Divergence:
    """Position by position; both [positions, vocab] log-probabilities."""
    ref, arm = reference.double().cpu(), other.double().cpu()  # an oracle lives on the CPU
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


def versions(session: Session, writable: Mapping[str, Tensor]) -> dict[str, int]:
    """How often each watched tensor was written in place, where `writable` covers none of it; this also shows
    a write that was undone.
    """
    return {
        name: tensor._version  # the counter has no public name
        for name, tensor in session.watched().items()
        if name not in writable
    }


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
