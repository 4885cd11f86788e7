"""Meetings answered by exchanges: two ranks on threads, the kernels stood for by the reference of each."""

import threading
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL (nvidia-cutlass-dsl) is not installed")

import torch
from k3_decode.collectives import Exchange, exchanged, gather, reduce
from k3_decode.collectives.exchanged import Exchanged
from k3_decode.collectives.groups import ExchangeGroup
from k3_decode.ops.exchange import rank_ordered_sum
from k3_decode.ops.mailbox import MailboxLayout

RANKS, ROWS = 2, 3


class Link:
    """Two ranks' parts, brought together launch by launch."""

    def __init__(self) -> None:
        self.barrier, self.brought = threading.Barrier(RANKS), [[], []]  # type: ignore[var-annotated]
        self.launched: list[list[str]] = [[], []]

    def together(self, rank: int, name: str, part: Any) -> list[Any]:
        self.launched[rank].append(name)
        self.brought[rank] = part
        self.barrier.wait(10)
        both = [[one.clone() for one in other] for other in self.brought]
        self.barrier.wait(10)
        return both

    def exchange(
        self, *, part: torch.Tensor, out: torch.Tensor, form: str, first_rank: int, **_: Any
    ) -> None:
        both = self.together(first_rank, form, [part[0]])
        out[0] = rank_ordered_sum(torch.stack([one[0] for one in both]))

    def exchange_parts(
        self, *, part: torch.Tensor, extra: torch.Tensor | None, out: torch.Tensor,
        extra_out: torch.Tensor | None, first_rank: int, **_: Any,
    ) -> None:  # fmt: skip
        mine = [part[0, 0]] if extra is None else [part[0, 0], extra[0, 0]]
        both = self.together(first_rank, f"gather of {len(mine)}", mine)
        for rank in range(RANKS):
            out[0, rank] = both[rank][0]
            if extra_out is not None:
                extra_out[0, rank] = both[rank][1]


def _group(rank: int) -> ExchangeGroup:
    nothing = torch.zeros((1, 8), dtype=torch.int32)
    return ExchangeGroup(MailboxLayout(RANKS, 1024), rank, nothing, nothing, nothing)


def _forward(rank: int) -> Exchange:
    """A sum, scores and latents of which each rank has its columns, and a last sum."""
    first = yield from reduce(torch.full((ROWS, 8), 1.0 + rank).to(torch.bfloat16), RANKS)
    scores = torch.zeros((ROWS, 4))
    latents = torch.zeros((ROWS, 16)).to(torch.bfloat16)
    scores[:, 2 * rank : 2 * rank + 2] = 0.1 * (rank + 1)
    latents[:, 8 * rank : 8 * rank + 8] = 10.0 * (rank + 1)
    all_scores = yield from gather(scores[:, 2 * rank : 2 * rank + 2], RANKS, scores)
    all_latents = yield from gather(latents[:, 8 * rank : 8 * rank + 8], RANKS, latents)
    assert all_scores.data_ptr() == scores.data_ptr()
    assert torch.equal(scores[0], torch.tensor([0.1, 0.1, 0.2, 0.2]))
    assert all_latents[0].tolist() == [10.0] * 8 + [20.0] * 8
    return (yield from reduce(first + all_latents[:, 8:], RANKS))


def _run(monkeypatch: pytest.MonkeyPatch, forward: Any) -> tuple[list[Any], Link]:
    link, results = Link(), [None, None]  # type: ignore[var-annotated]
    monkeypatch.setattr(exchanged, "exchange", link.exchange)
    monkeypatch.setattr(exchanged, "exchange_parts", link.exchange_parts)

    def run(rank: int) -> None:
        try:
            results[rank] = Exchanged(_group(rank), torch.zeros(16)).run(forward(rank))
        except Exception as error:  # noqa: BLE001  # the test looks at it
            results[rank] = error
            link.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results, link


def test_both_ranks_get_sums_and_columns_and_scores_ride_with_latents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results, link = _run(monkeypatch, _forward)
    for result in results:
        assert result.tolist() == [[46.0] * 8] * ROWS  # 2 x (1 + 2 + 20)
    assert link.launched == [["one_shot", "gather of 2", "one_shot"]] * 2


def test_a_gather_of_scores_that_nothing_follows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(rank: int) -> Exchange:
        scores = torch.zeros((ROWS, 4))
        return (yield from gather(scores[:, 2 * rank : 2 * rank + 2], RANKS, scores))

    results, _ = _run(monkeypatch, forward)
    assert all("had no bf16 gather to go with" in str(result) for result in results)


def test_a_gather_without_a_buffer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    results, _ = _run(monkeypatch, lambda _rank: gather(torch.zeros((ROWS, 2)), RANKS))
    assert all("no buffer" in str(result) for result in results)
