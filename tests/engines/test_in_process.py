"""Watching an engine's tensors: any change outside what may be written shows."""

from collections.abc import Mapping

import pytest
import torch

from harness.engines.in_process import planted_write, watched_digests

SIZES = (1, 3, 8, 13, 4096)


class Watched:
    """A session of one tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def watched(self) -> Mapping[str, torch.Tensor]:
        return {"weights": self.tensor}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
def test_a_change_of_any_element_shows(size: int, dtype: torch.dtype) -> None:
    session = Watched(torch.zeros(size, dtype=dtype))
    before = watched_digests(session, {})  # type: ignore[arg-type]  # only `watched` is asked for
    for place in {0, size // 2, size - 1}:
        session.tensor[place] = 1
        assert watched_digests(session, {}) != before  # type: ignore[arg-type]  # as above
        session.tensor[place] = 0
    assert watched_digests(session, {}) == before  # type: ignore[arg-type]  # as above


def test_two_elements_that_change_places_show() -> None:
    session = Watched(torch.arange(64, dtype=torch.float32))
    before = watched_digests(session, {})  # type: ignore[arg-type]  # only `watched` is asked for
    session.tensor[[3, 40]] = session.tensor[[40, 3]]
    assert watched_digests(session, {}) != before  # type: ignore[arg-type]  # as above


def test_what_may_be_written_does_not_show_and_its_neighbour_does() -> None:
    session = Watched(torch.zeros(10))
    mask = {"weights": torch.arange(10) == 4}
    before = watched_digests(session, mask)  # type: ignore[arg-type]  # only `watched` is asked for
    assert before["weights"][1] == 9
    session.tensor[4] = 7.0
    assert watched_digests(session, mask) == before  # type: ignore[arg-type]  # as above
    session.tensor[5] = 7.0
    assert watched_digests(session, mask) != before  # type: ignore[arg-type]  # as above


def test_a_planted_write_is_named_shows_and_is_taken_back() -> None:
    session = Watched(torch.zeros(6))
    before = watched_digests(session, {})  # type: ignore[arg-type]  # only `watched` is asked for
    with planted_write(session, {}) as where:  # type: ignore[arg-type]  # as above
        assert where == "weights"
        assert watched_digests(session, {}) != before  # type: ignore[arg-type]  # as above
    assert watched_digests(session, {}) == before  # type: ignore[arg-type]  # as above
