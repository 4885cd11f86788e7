"""The MLA attention kernel: its source in lockstep on the CPU; compilation; values on a GPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL (nvidia-cutlass-dsl) is not installed")

from k3_decode.cute import mla_attend as op
from k3_decode.cute import mla_partials, mla_tile
from k3_decode.cute.variant import COMPILED, DISPATCHED
from k3_decode.ops.contract import LAUNCH_SLOTS, Args, Cell
from k3_decode.shapes import CANARY, K3

from tests.k3_decode.cute.lockstep import run_kernel
from tests.k3_decode.cute.op_cells import arguments, assert_activations_after_wait, require_close


def run_in_lockstep(splits: int) -> Callable[[Args], None]:
    """Attention in `splits` shards, and the merge, from their source on the CPU."""

    def call(args: Args) -> None:
        query, cache, lengths = args["query"], args["cache"], args["lengths"]
        assert isinstance(query, torch.Tensor)
        assert isinstance(cache, torch.Tensor)
        assert isinstance(lengths, torch.Tensor)
        tokens, heads, _ = query.shape
        is_fp8 = cache.element_size() == 1
        partial = torch.full((splits, tokens, heads, 512), torch.nan, dtype=torch.bfloat16)
        partial_lse = torch.full((splits, tokens, heads), torch.nan)
        launches = torch.zeros(LAUNCH_SLOTS, dtype=torch.int32)
        rows, kv_scale = args["rows"], args["kv_scale"]
        assert isinstance(rows, int)
        scale = args["scale"] * kv_scale  # type: ignore[operator]
        run_kernel(
            op,
            "_attend",
            [
                query,
                cache.view(torch.uint8) if is_fp8 else cache,
                args["block_table"],
                lengths,
                partial,
                partial_lse,
                launches,
                rows,
                scale,
                kv_scale,
                is_fp8,
                op.LOADERS,
                op.stages_of(is_fp8),
            ],
            grid=(-(-heads * rows // mla_tile.PAIRS), splits, lengths.shape[0]),
            cluster=1,
            threads=mla_tile.THREADS + 32 * op.LOADERS,
            dynamic_bytes=op._shared_bytes(is_fp8, op.stages_of(is_fp8)),
        )
        if splits == 1:
            assert not partial.isnan().any()
        run_kernel(
            mla_partials,
            "_merge",
            [partial, partial_lse, args["out"], args["lse"], launches],
            grid=(heads, tokens, 1),
            cluster=1,
            threads=mla_partials.MERGE_PLACES * mla_partials.MERGE_THREADS_A_ROW,
        )
        assert launches.tolist() == [0] * 9 + [2] + [0] * (LAUNCH_SLOTS - 10)

    return call


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
@pytest.mark.parametrize(
    ("model", "tp", "requests", "rows", "context", "regime", "splits"),
    [
        (CANARY, 1, 1, 1, 1, "gaussian", 1),
        (CANARY, 1, 1, 1, 40, "gaussian", 1),
        (CANARY, 1, 2, 3, 150, "poisoned_tail", 2),
        (CANARY, 2, 3, 1, 200, "empty_request", 3),
        (CANARY, 2, 1, 8, 70, "sharp", 5),
        (K3, 8, 1, 2, 130, "strided_query", 1),
    ],
)
def test_the_source_in_lockstep_agrees_with_the_oracle(
    model: Any, tp: int, requests: int, rows: int, context: int, regime: str, splits: int, kv_dtype: str
) -> None:
    args = arguments("mla_attend", Cell(model.rank(tp), requests, rows, context, kv_dtype), regime)
    require_close("mla_attend", args, run_in_lockstep(splits))


@pytest.mark.parametrize(
    ("requests", "rows", "heads", "splits"),
    [
        (1, 1, 12, 128),
        (2, 1, 12, 64),
        (3, 1, 12, 42),
        (64, 1, 12, 2),
        (128, 1, 12, 1),
        (1, 8, 12, 21),
        (200, 1, 2, 1),
    ],
)
def test_splits_fill_the_device_once(requests: int, rows: int, heads: int, splits: int) -> None:
    assert op.splits_of(requests, rows, heads) == splits


def test_a_workspace_holds_the_latents_and_sums_of_every_split() -> None:
    assert op.workspace_bytes(2, 1, 12) == 64 * 2 * 12 * (512 * 2 + 4)


@pytest.mark.parametrize("heads", [1, 2, 6, 12, 24, 48, 96])
def test_one_workspace_serves_every_step_that_is_split(heads: int) -> None:
    sizes = [
        op.workspace_bytes(requests, rows, heads)
        for requests in range(1, 65)
        for rows in range(1, 9)
        if op.splits_of(requests, rows, heads) > 1
    ]
    assert max(sizes) <= op.WORKSPACE_BYTES == 2_105_344


def test_a_workspace_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="need 1579008"):
        mla_partials.split_workspace(torch.zeros(64, dtype=torch.uint8), 128, 1, 12)


@pytest.mark.parametrize("architecture", DISPATCHED + COMPILED)
def test_compiles_and_reads_everything_after_the_wait(
    architecture: str, compile_smoke: Callable[[str, str], dict[str, str]]
) -> None:
    (ptx,) = compile_smoke("mla_attend", architecture).values()
    assert_activations_after_wait(ptx, architecture)
    assert "cp.async.bulk" not in ptx.split("griddepcontrol.wait")[0]
    assert ptx.count("cp.async.bulk") == 1


def launch(args: Args) -> None:
    """One split, straight into out and lse."""
    counts = torch.zeros(LAUNCH_SLOTS, dtype=torch.int32, device=args["out"].device)  # type: ignore[union-attr]
    op.mla_attend(**args, launches=counts)  # type: ignore[arg-type]
    assert counts.tolist() == [0] * 9 + [1] + [0] * (LAUNCH_SLOTS - 10)


def launch_split(args: Args) -> None:
    """The splits that fill the device, and their merge."""
    requests, rows = args["lengths"].shape[0], args["rows"]  # type: ignore[union-attr]
    heads, device = args["query"].shape[1], args["out"].device  # type: ignore[union-attr]
    size = op.workspace_bytes(requests, rows, heads)  # type: ignore[arg-type]
    workspace = torch.full((size,), 255, dtype=torch.uint8, device=device)
    counts = torch.zeros(LAUNCH_SLOTS, dtype=torch.int32, device=device)
    op.mla_attend(**args, launches=counts, workspace=workspace)  # type: ignore[arg-type]
    assert counts[9].item() == (2 if op.splits_of(requests, rows, heads) > 1 else 1)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("call", [launch, launch_split])
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
@pytest.mark.parametrize(
    ("tp", "requests", "rows", "context"),
    [
        (8, 1, 1, 1),
        (8, 1, 1, 1024),
        (8, 17, 1, 300),
        (16, 64, 1, 200),
        (8, 4, 8, 500),
        (1, 2, 1, 130),
        (8, 1, 1, 9000),
    ],
)
def test_values_match_the_oracle(
    tp: int, requests: int, rows: int, context: int, kv_dtype: str, call: Callable[[Args], None], gpu: Any
) -> None:
    cell = Cell(K3.rank(tp), requests, rows, context, kv_dtype)
    require_close("mla_attend", arguments("mla_attend", cell, "uneven_lengths", gpu), call)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "regime", ["heavy_tail", "large", "tiny", "sharp", "poisoned_tail", "empty_request", "strided_query"]
)
def test_hostile_inputs_match_the_oracle(regime: str, gpu: Any) -> None:
    for kv_dtype in ("bf16", "fp8"):
        cell = Cell(K3.rank(16), 3, 2, 777, kv_dtype)
        require_close("mla_attend", arguments("mla_attend", cell, regime, gpu), launch_split)
