"""How well a network in training does: teacher-forced exact match and margins on held-out seeds.

The right token first at every place that the model writes is the same as an exact greedy generation, up to
the rounding of chunked against recurrent KDA; so that training can be followed without generating.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from k3_decode.canary.network import Network, Pieces, Wrongs, forward
from k3_decode.canary.tasks import QUERY_PROMPT, QUERY_TOKENS, Rows, chain_rows, mrcr_rows

__all__ = ["evaluate"]

_HELD_OUT = 1_000_000
"""Training seeds are below; nothing else draws from this one."""
_TOKENS_AT_ONCE = 65_536
_QUERIES = 4
_SCALE_ERROR = 0.02


@torch.no_grad()
def evaluate(
    network: Network, run: Pieces, task: str, length: int, count: int, wrong: str = ""
) -> dict[str, float | int | list[float]]:
    """Share of exact answers (mrcr: four questions a row; chains end inside the row), and margins of the
    right token.

    `wrong`, where the model writes: one of `curriculum.KINDS` (a softmax scale 2 % too large), or `ffn`,
    which switches the dense FFN and the shared expert off. `margins`: minimum, 0.1 %, 1 % and 50 %
    quantiles of its logit less the best other one.
    """
    rng = np.random.default_rng((_HELD_OUT, length, task == "mrcr"))
    if task == "mrcr":
        rows = mrcr_rows(rng, count, length, queries=min(_QUERIES, length // 100), marked=False)
    else:
        rows = chain_rows(rng, count, length, max(1, (length - 75) // 14))
    device = network.embedding.device
    exact: list[bool] = []
    margins: list[Tensor] = []
    size = max(1, min(count, _TOKENS_AT_ONCE // length))
    for start in range(0, count, size):
        part = Rows(*(x[start : start + size] for x in rows))  # type: ignore[arg-type]  # fields keep their types
        tokens, supervised = (torch.from_numpy(x).to(device) for x in (part.tokens, part.supervised))
        n = tokens.shape[0]
        nowhere = torch.zeros_like(supervised)
        wrongs = Wrongs(
            supervised if wrong == "own_row" else nowhere[:1],
            (supervised if wrong == "expert" else nowhere).reshape(-1),
            (~supervised if wrong == "ffn" else ~nowhere).float().reshape(-1),
            1 + _SCALE_ERROR * (supervised if wrong == "scale" else nowhere).float().reshape(-1),
        )
        position = torch.arange(length, device=device).repeat(n)
        logits = (
            forward(network, tokens[:, :-1], position, run, wrongs if wrong else None)[0]
            .float()
            .view(n, length, -1)
        )
        right = tokens[:, 1:, None]
        best_other = logits.scatter(2, right, -1e9).amax(-1)
        margin = logits.gather(2, right)[..., 0] - best_other
        margins.append(margin[supervised].cpu())
        exact += _exact(margin.cpu().numpy() > 0, part, task)
    every = torch.cat(margins)
    points = torch.tensor([0.0, 0.001, 0.01, 0.5])
    ordered = every.sort().values
    quantiles = ordered[(points * (ordered.numel() - 1)).long()]
    return {
        "exact": round(float(np.mean(exact)), 4), "n": len(exact),
        "token_error": round(float((every <= 0).float().mean()), 7),
        "margins": [round(float(x), 3) for x in quantiles],
    }  # fmt: skip


def _exact(hit: npt.NDArray[np.bool_], rows: Rows, task: str) -> list[bool]:
    if task == "chain":
        return [bool((hit[b] | ~rows.supervised[b]).all()) for b in range(hit.shape[0])]
    found = []
    for b, start in enumerate(rows.starts):
        for first in range(int(start), hit.shape[1] - QUERY_TOKENS + 2, QUERY_TOKENS):
            answer = slice(first + QUERY_PROMPT - 1, first + QUERY_TOKENS - 1)
            if rows.supervised[b, answer].all():
                found.append(bool(hit[b, answer].all()))
    return found
