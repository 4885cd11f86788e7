"""Bounds of launch sizes hold for what the kernels' own modules say, and for every rank's weights."""

import importlib.util

import pytest
from k3_decode import launch_sizes
from k3_decode.shapes import K3

EXPERTS = (("latent", "activation"), ("out", "output"))


def test_places_are_named_by_tensors_and_by_arguments_behind_them() -> None:
    assert launch_sizes.launch_sizes("router", ()) == (("logits.0", "tokens"),)
    assert launch_sizes.launch_sizes("experts", EXPERTS) == (("a2", "1..160"), ("a3", "1..160"))
    assert dict(launch_sizes.launch_sizes("exchange", EXPERTS))["part.0"] == "ranks"
    assert launch_sizes.launch_sizes("unknown", ()) == ()


def test_the_largest_weight_is_all_experts_first_matrix_of_a_whole_model() -> None:
    assert launch_sizes._weight_bytes(K3.rank(1)) == 896 * 3072 * 3584
    (bound,) = launch_sizes.launch_sizes("prefetch", EXPERTS)
    assert bound == ("a4", f"1..{896 * 3072 * 3584 // (32 * 4096)}")


def test_rows_and_heads_cover_every_rank() -> None:
    bounds = dict(launch_sizes.launch_sizes("mla_attend", EXPERTS))
    assert bounds["query.1"] == "1..96"
    assert bounds["a2"] == "rows"
    divided = dict(launch_sizes.launch_sizes("exchange", EXPERTS))
    assert [divided[f"partial.{axis}"] for axis in (0, 2, 3)] == ["ranks", "tokens", "1..96"]
    assert [divided[f"uv_weight.{axis}"] for axis in (0, 1)] == ["ranks", "1..96"]
    assert dict(launch_sizes.launch_sizes("projection", ()))["weight.0"] == "1..163840"


@pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="CuTe DSL (nvidia-cutlass-dsl) is not installed"
)
def test_figures_of_kernel_modules_are_theirs() -> None:
    from k3_decode.cute import exchange, mla_partials, prefetch

    splits = [
        mla_partials.splits_of(requests, rows, heads)
        for requests in range(1, 65)
        for rows in range(1, 9)
        for heads in (1, 6, 12, 24, 48, 96)
    ]
    assert max(splits) == launch_sizes.MOST_SPLITS
    blocks = [exchange.blocks_of(vectors, local) * local for vectors in (1, 10**6) for local in range(1, 17)]
    assert max(blocks) == launch_sizes.MOST_EXCHANGE_BLOCKS
    assert prefetch.pieces_of(launch_sizes.PREFETCHED_A_BLOCK)[1] == 1
    assert prefetch.pieces_of(launch_sizes.PREFETCHED_A_BLOCK + 16)[1] == 2
