"""What the canary is trained on and when: batch layout, lengths by progress, learning rate, share of the
right token."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from k3_decode.canary.tasks import (
    CHAIN_PROMPT,
    QUERY_PROMPT,
    QUERY_TOKENS,
    ROUND_TOKENS,
    Rows,
    chain_rows,
    mrcr_rows,
)

__all__ = ["KINDS", "USUAL_ALARMS", "Batch", "Layout", "Schedule", "make_batch"]

_LONGEST_CHAIN = 4096
_COUNTERFACTUAL_PART = 8
"""One row in this many is counterfactual: one part of the network is wrong in some of its answers, and the
right token and its distractor change places there. So these faults turn answers wrong by training, not by
luck."""
KINDS = ("own_row", "expert", "scale")
"""What is wrong in a counterfactual row: MLA's own row is hidden, the last chosen expert is left out, the
softmax scale is too large."""
USUAL_ALARMS = KINDS[:2]
"""An alarm on the softmax scale spoils long chains (README)."""
_SCALE_ERRORS = (0.06, 0.3)
"""Log-uniform; gross ones show the way to small ones. With 2 % as the least, the alarm rang in fault-free
chains."""


class Layout(NamedTuple):
    """Rows of one batch, in order: mrcr counterfactual, chain counterfactual, mrcr, chain."""

    length: int
    mrcr: int
    chain: int

    @classmethod
    def of(cls, length: int, tokens: int) -> "Layout":
        """Half the rows for each task; past the longest chain all for mrcr."""
        rows = tokens // length
        return cls(length, rows, 0) if length > _LONGEST_CHAIN else cls(length, rows // 2, rows - rows // 2)

    @property
    def counterfactual(self) -> tuple[int, int]:
        """Counterfactual rows of mrcr and of chain."""
        part = tuple(max(1, n // _COUNTERFACTUAL_PART) if n else 0 for n in (self.mrcr, self.chain))
        return part[0], part[1]

    @property
    def is_mrcr(self) -> npt.NDArray[np.bool_]:
        """[rows]: which rows are mrcr, in batch order."""
        a, b = self.counterfactual
        return np.repeat([True, False, True, False], [a, b, self.mrcr - a, self.chain - b])


class Batch(NamedTuple):
    """One training batch as it crosses the queue from a worker."""

    layout: int
    """Index of its layout."""
    tokens: npt.NDArray[np.int16]
    supervised: npt.NDArray[np.bool_]
    wrong: npt.NDArray[np.bool_]
    """[3, counterfactual rows, T]: where which of `KINDS` is wrong."""
    scale_error: npt.NDArray[np.float32]
    """[counterfactual rows]: relative error of the softmax scale, where that is wrong."""
    experts_only: npt.NDArray[np.bool_]
    """[rows, T]: where the dense FFN and the shared expert are off."""


def make_batch(
    rng: np.random.Generator,
    layouts: Sequence[Layout],
    index: int,
    alarms: Sequence[str] = USUAL_ALARMS,
    experts_share: float = 0.5,
) -> Batch:
    """A batch of layout `index`, its counterfactual rows of the kinds `alarms`; in `experts_share` of its
    chains the experts alone look facts up."""
    layout = layouts[index]
    mrcr = mrcr_rows(rng, layout.mrcr, layout.length)
    chain = chain_rows(rng, layout.chain, layout.length) if layout.chain else _none(layout.length)
    a, b = layout.counterfactual

    def ordered(x: npt.NDArray[np.generic], y: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        return np.concatenate([x[:a], y[:b], x[a:], y[b:]])

    wrong = np.concatenate([_hidden_answers(rng, mrcr, a), _hidden_tail(rng, chain, b)])
    kind = rng.choice([KINDS.index(alarm) for alarm in alarms], a + b)
    return Batch(
        index,
        ordered(mrcr.tokens, chain.tokens).astype(np.int16),
        ordered(mrcr.supervised, chain.supervised).astype(np.bool_),
        np.stack([wrong & (kind == i)[:, None] for i in range(len(KINDS))]),
        np.exp(rng.uniform(math.log(_SCALE_ERRORS[0]), math.log(_SCALE_ERRORS[1]), a + b)).astype(np.float32),
        ordered(np.zeros_like(mrcr.supervised), _facts_by_experts(rng, chain, experts_share)).astype(
            np.bool_
        ),
    )


@dataclass(frozen=True, slots=True)
class Schedule:
    """Settings as functions of progress (0 to 1 of the training clock)."""

    rate: float
    right_share: float
    """Share of the right token in the late target; its distractor gets the rest."""
    is_continued: bool
    """Continues trained weights: every length and the late target from the start, the rate falling at
    once."""

    def mix(self, progress: float, lengths: int) -> npt.NDArray[np.float64]:
        """Probability of each layout."""
        stage = _CONTINUED if self.is_continued else [mix for start, mix in _STAGES if start <= progress][-1]
        chosen = (*stage, *(0.0 for _ in range(lengths)))[:lengths]
        weights = np.array(chosen, np.float64)
        return np.asarray(weights / weights.sum(), np.float64)

    def rate_at(self, progress: float, step: int) -> float:
        """Warm-up over 150 steps; constant to half, then linear to 1 %."""
        flat = 0.0 if self.is_continued else 0.5
        fall = 1.0 if progress < flat else max(0.01, (1 - progress) / (1 - flat))
        return self.rate * min(1.0, (step + 1) / 150) * fall

    def right_share_at(self, progress: float) -> float:
        """1 (a plain target, fast to learn) at first, then `right_share`."""
        return self.right_share if self.is_narrow(progress) else 1.0

    def is_narrow(self, progress: float) -> bool:
        """Whether the late target and the counterfactual rows are on."""
        return self.is_continued or progress >= _NARROW_FROM


_NARROW_FROM = 0.32
_STAGES: tuple[tuple[float, tuple[float, ...]], ...] = (
    (0.00, (1.0,)),
    (0.15, (0.5, 0.5)),
    (0.26, (0.25, 0.35, 0.4)),
    (0.40, (0.15, 0.2, 0.3, 0.35)),
    (0.55, (0.1, 0.15, 0.2, 0.25, 0.3)),
    (0.72, (0.1, 0.12, 0.16, 0.22, 0.26, 0.14)),
)
_CONTINUED = (0.06, 0.08, 0.12, 0.2, 0.4, 0.14)
"""Short first: training starts at 256 tokens and doubles. A model that starts long does not learn to
retrieve. A continued run leans on 4096, where chains are longest."""


def _hidden_answers(rng: np.random.Generator, rows: Rows, count: int) -> npt.NDArray[np.bool_]:
    """Half the answers of the first `count` dialogues: the alarm must come from within the answer."""
    hidden = np.zeros_like(rows.supervised[:count])
    for b in range(count):
        for first in range(int(rows.starts[b]), hidden.shape[1] - QUERY_TOKENS + 2, QUERY_TOKENS):
            hidden[b, first + QUERY_PROMPT - 1 : first + QUERY_TOKENS - 1] = rng.random() < 0.5
    return hidden & rows.supervised[:count]


def _hidden_tail(rng: np.random.Generator, rows: Rows, count: int) -> npt.NDArray[np.bool_]:
    """The first `count` chains from a random point on, half of them from the start."""
    supervised = rows.supervised[:count]
    start = rng.integers(0, supervised.shape[1], count) * (rng.random(count) < 0.5)
    return supervised & (np.arange(supervised.shape[1]) >= start[:, None])


def _facts_by_experts(rng: np.random.Generator, rows: Rows, share: float) -> npt.NDArray[np.bool_]:
    """The part of each round that looks facts up and adds them (from R's hundreds on), in a share of the
    chains."""
    place = (np.arange(rows.supervised.shape[1]) - CHAIN_PROMPT) % ROUND_TOKENS
    is_chosen = rng.random((rows.supervised.shape[0], 1)) < share
    return rows.supervised & is_chosen & ((place >= 5) & (place < 11))


def _none(length: int) -> Rows:
    return Rows(np.zeros((0, length + 1), np.int64), np.zeros((0, length), np.bool_), np.zeros(0, np.int64))
