"""Ways for an engine's ranks to meet: two processes over gloo beside one, and what does not go together."""

import json
import multiprocessing
import os
from pathlib import Path

import pytest
import torch
from k3_decode import trial_engine
from k3_decode.collectives.strategies import NAMES, in_process, open_strategy
from k3_decode.dispatch import load_guard
from k3_decode.engine import Engine, EngineOptions
from k3_decode.shapes import NANO

from tests.k3_decode.models import ranks

CPU = torch.device("cpu")


def _serve_one_rank(rank: int, store: str, out: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    lines: list[str] = []
    with torch.no_grad():
        is_right = trial_engine.run_trials(
            2, rank, "processes", CPU, lambda record: lines.append(json.dumps(record))
        )
    torch.distributed.destroy_process_group()
    Path(f"{out}.{rank}").write_text("\n".join([json.dumps(is_right), *lines]))


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # a fork beside other threads
def test_two_processes_over_gloo_serve_what_one_process_serves_bit_for_bit(tmp_path: Path) -> None:
    """And a rank whose sums are left out shows, or the comparison would prove nothing."""
    context = multiprocessing.get_context("fork")
    arguments = (str(tmp_path / "store"), str(tmp_path / "out"))
    both = [context.Process(target=_serve_one_rank, args=(rank, *arguments)) for rank in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [0, 0]
    for rank in range(2):
        is_right, *records = map(json.loads, (tmp_path / f"out.{rank}").read_text().splitlines())
        assert is_right
        assert [(one["trial"], bool(one["wrong_words"]), one["fault"]) for one in records] == [
            ("optimised by processes, 2 ranks", False, ""),
            ("stock by processes, 2 ranks", False, ""),
            ("a rank is left out of every sum, 2 ranks", True, ""),
        ]


def test_a_process_that_holds_some_ranks_of_more_needs_a_way_across_processes() -> None:
    """One alone may be a slice, which meets nobody."""
    with pytest.raises(
        ValueError, match="2 of 4 ranks live in this process, which 'in_process' does not bring"
    ):
        Engine(ranks("nano_h16", 4)[:2], load_guard(), EngineOptions(max_requests=1, max_context=64))


@pytest.mark.parametrize(
    ("name", "count", "words"),
    [
        ("none", 2, "no way for 2 ranks"),
        ("in_process", 1, "no way for 1 ranks"),
        ("processes", 2, "needs an open process group of 2 processes"),
        ("exchange", 2, "needs an open process group"),
        ("exchange_played", 2, "needs a GPU for its mailboxes; a cpu has none"),
        ("multicast", 2, "no strategy 'multicast'; there are none, in_process"),
    ],
)
def test_a_strategy_that_cannot_serve_what_is_here_is_refused(name: str, count: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        open_strategy(name, NANO, count, CPU)  # type: ignore[arg-type]


def test_the_claim_names_strategies_that_exist() -> None:
    assert in_process(1).name == "none"
    assert in_process(3).name == "in_process"
    assert set(load_guard().envelope.collectives) <= set(NAMES)
