"""Grading on the stock path: the same verdict as a greedy generation, question by question."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from k3_decode.canary import accuracy
from k3_decode.canary.accuracy import (
    Graded,
    PathNotTaken,
    grade,
    groups_on,
    held_out,
    lower_bound,
    main,
    open_engine,
)
from k3_decode.canary.export import write_weights
from k3_decode.canary.network import Network
from k3_decode.canary.table import Score, read_accuracy
from k3_decode.canary.tasks import Sample, chain_samples, mrcr_samples, score_exact
from k3_decode.dispatch import load_guard
from k3_decode.engine import Engine, EngineOptions
from k3_decode.rank_weights import shard
from k3_decode.session import CANARY_FILE
from k3_decode.shapes import CANARY, CANARY_H8
from k3_decode.weights import open_checkpoint


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = open_engine(CANARY, CANARY_FILE, "cpu", requests=2, context=300)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def chains() -> tuple[Sample, ...]:
    return chain_samples(seed=31, count=2, generated=47)


def _on(way: str, samples: Sequence[Sample]) -> Graded:
    """All groups."""
    parts = list(groups_on(way, CANARY, CANARY_FILE, "cpu", samples))
    return Graded([x for p in parts for x in p.exact], [x for p in parts for x in p.margins])


def _generated(engine: Engine, sample: Sample) -> tuple[int, ...]:
    """Greedy, one token a step."""
    ids, logp = engine.prefill([sample.prompt])
    tokens = [int(logp[0].argmax())]
    while len(tokens) < len(sample.answer):
        tokens.append(int(engine.decode(ids, tokens[-1:])[0].argmax()))
    engine.finish(ids)
    return tuple(tokens)


def test_an_answer_verified_whole_is_the_one_that_greedy_generation_writes(
    engine: Engine, chains: tuple[Sample, ...]
) -> None:
    assert [score_exact(s, _generated(engine, s)) for s in chains] == [1.0, 1.0]
    graded = grade(engine, chains)
    assert graded.exact == [True, True]
    assert min(graded.margins) > 0


@pytest.mark.parametrize("place", [0, 8, 46], ids=["first", "first of a step", "last"])
def test_one_wrong_token_spoils_its_own_question_alone(
    engine: Engine, chains: tuple[Sample, ...], place: int
) -> None:
    answer = list(chains[1].answer)
    answer[place] = 0
    spoiled = replace(chains[1], answer=tuple(answer))
    graded = grade(engine, [chains[0], spoiled])
    assert graded.exact == [True, False]
    assert graded.margins[1] < 0 < graded.margins[0]


def test_an_answer_shorter_than_one_step_is_graded_to_its_end(engine: Engine) -> None:
    sample = mrcr_samples(seed=31, count=1, tokens=256)[0]
    short = replace(sample, answer=sample.answer[:5])
    wrong = replace(sample, answer=(*sample.answer[:4], 0))
    assert grade(engine, [short]).exact == [True]
    assert grade(engine, [wrong]).exact == [False]


@pytest.mark.parametrize(("task", "tokens"), [("chain_canary", 103), ("mrcr_canary", 256)])
def test_both_paths_and_a_replay_find_the_same_answers_and_smallest_margin(task: str, tokens: int) -> None:
    samples = held_out(task, tokens, 2)
    stock = _on("stock", samples)
    assert stock.exact == [True, True]
    for way in ("optimised", "replay"):
        other = _on(way, samples)
        assert other.exact == stock.exact
        # the order of sums moves log-probabilities by up to 0.03 where a margin is smallest (measured)
        assert min(other.margins) == pytest.approx(min(stock.margins), abs=0.05)


def test_a_step_that_the_dispatcher_declines_is_no_score_of_the_optimised_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(accuracy._WIDTHS, "optimised", 9)  # 9 x 8 rows; the claim's envelope ends at 64
    with pytest.raises(PathNotTaken, match="did not take the optimised path"):
        _on("optimised", chain_samples(seed=31, count=9, generated=19))


def test_a_run_in_parts_adds_up_and_a_group_told_twice_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "accuracy.jsonl"
    monkeypatch.setattr(accuracy, "groups_on", lambda *_: iter([Graded([True], [0.5])]))
    for skip in ("0", "1", "1"):
        main(["--only", "mrcr_canary:256", "--questions", "1", "--skip", skip, "--out", str(out)])
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [e["first"] for e in lines] == [0, 0, 1, 1, 1, 1]
    assert read_accuracy(out) == [
        Score("stock", "cpu", "mrcr_canary", 256, False, 2, 2, 0.5),
        Score("stock", "cpu", "mrcr_canary", 256, True, 2, 2, 0.5),
    ]


@pytest.mark.parametrize("is_on", [False, True])
def test_the_variant_of_eight_heads_answers_at_tp8_as_at_tp1(tmp_path: Path, is_on: bool) -> None:
    torch.manual_seed(5)
    write_weights(Network(CANARY_H8), tmp_path / "weights.safetensors")
    source = open_checkpoint(tmp_path / "weights.safetensors", CANARY_H8)
    prompt, found = chain_samples(seed=31, count=1, generated=19)[0].prompt[:12], []
    for tp in (1, 8):
        ranks = [shard(source, CANARY_H8.rank(tp), rank, torch.device("cpu")) for rank in range(tp)]
        engine = Engine(ranks, load_guard(), EngineOptions(1, 64, is_on=is_on))
        ids, first = engine.prefill([prompt])
        found.append(torch.cat([first, engine.decode(ids, [200])]))
        engine.close()
    assert found[0].std() > 0.1
    # eight partial sums are rounded to bf16 each, where one rank rounds once
    assert (found[0] - found[1]).abs().max() < 0.05


@pytest.mark.parametrize(
    ("right", "count", "bound"),
    [(59, 59, 0.9505), (58, 58, 0.9497), (96, 96, 0.9693), (95, 96, 0.9515), (0, 8, 0.0)],
)
def test_the_lower_bound_is_the_share_that_does_as_well_in_one_sample_of_twenty(
    right: int, count: int, bound: float
) -> None:
    # all right: 0.05 ** (1 / count); one wrong of 96: p^96 + 96 p^95 (1 - p) = 0.05
    assert lower_bound(right, count) == pytest.approx(bound, abs=5e-5)
