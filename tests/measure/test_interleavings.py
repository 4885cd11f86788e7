"""Every order of the steps of several ranks."""

from harness.domain.collective_model import CollectiveModel, Program, Step
from harness.measure.interleavings import explore, walk


def _write(name: str, value: int) -> Step:
    def run(state: dict) -> None:
        state[name] = value

    return Step(f"writes {name}", run)


def _read(name: str, want: int) -> Step:
    return Step(f"reads {name}", lambda s: None if s[name] == want else f"read {s[name]} for {want}")


def _wait(name: str) -> Step:
    return Step(f"waits for {name}", lambda _: None, lambda state: state[name] == 1)


def _model(*ranks: Program) -> CollectiveModel:
    return CollectiveModel("m", {"data": 0, "flag": 0, "other": 0}, ranks, ranks)


def test_a_flag_after_the_data_is_right_in_every_order() -> None:
    model = _model((_write("data", 7), _write("flag", 1)), (_wait("flag"), _read("data", 7)))
    # (places of rank 0, rank 1): 0,0 1,0 2,0 2,1 2,2
    assert explore(model, model.ranks) == (5, True, None)


def test_a_flag_before_the_data_is_wrong_in_one_order_which_is_told() -> None:
    model = _model((_write("flag", 1), _write("data", 7)), (_wait("flag"), _read("data", 7)))
    found = explore(model, model.ranks)
    assert found.fault == "read 0 for 7 after rank 0 writes flag, rank 1 waits for flag, rank 1 reads data"


def test_ranks_that_wait_for_each_other_are_a_deadlock_with_rank_and_step() -> None:
    model = _model((_wait("flag"), _write("other", 1)), (_wait("other"), _write("flag", 1)))
    assert (
        explore(model, model.ranks).fault
        == "deadlock: rank 0 at waits for flag, rank 1 at waits for other after "
    )


def test_a_walk_tells_what_one_order_gave() -> None:
    wrong = _model((_write("flag", 1), _write("data", 7)), (_wait("flag"), _read("data", 7)))
    right = _model((_write("data", 7), _write("flag", 1)), (_wait("flag"), _read("data", 7)))
    assert [walk(right, right.ranks, seed) for seed in range(20)] == [None] * 20
    assert "read 0 for 7 after rank 1 reads data" in {walk(wrong, wrong.ranks, seed) for seed in range(20)}
