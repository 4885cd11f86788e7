"""Whole layers as the harness times them: a layer that differs from run to run is none to time."""

import pytest
import torch
from k3_decode.peers.layer_slice import _require_same_bits


def test_runs_that_differ_are_refused_and_the_buffers_named() -> None:
    first = {"core": torch.zeros(2, 8, dtype=torch.bfloat16), "ids": torch.zeros(2, 4, dtype=torch.int32)}
    again = {name: buffer.clone() for name, buffer in first.items()}
    _require_same_bits(first, again)
    again["core"][1, 3] = 1.0
    with pytest.raises(ValueError, match="differs from run to run on equal inputs: core in 2 bytes"):
        _require_same_bits(first, again)


def test_a_zero_of_the_other_sign_is_another_bit() -> None:
    with pytest.raises(ValueError, match="x in 1 bytes"):
        _require_same_bits({"x": torch.zeros(4)}, {"x": torch.tensor([0.0, -0.0, 0.0, 0.0])})
