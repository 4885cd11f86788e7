"""The MLA query kernel: its source in lockstep on the CPU; compilation; values and cache rows on a GPU."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL (nvidia-cutlass-dsl) is not installed")

from k3_decode.cute import mla_query as op
from k3_decode.cute import mla_query_wide
from k3_decode.cute.mla_query_rows import CLUSTER
from k3_decode.cute.variant import COMPILED, DISPATCHED
from k3_decode.ops.contract import LAUNCH_SLOTS, Args, Cell
from k3_decode.shapes import CANARY, K3

from tests.k3_decode.cute.lockstep import run_kernel
from tests.k3_decode.cute.op_cells import arguments, assert_activations_after_wait, require_close

WIDE = dataclasses.replace(CANARY, name="canary_k3_rank", q_lora=1536)
"""The canary with K3's query rank, so that every warp has several chunks of K."""


def run_in_lockstep(row_tiles: int) -> Callable[[Args], None]:
    """The kernel's source on the CPU, in the grid that its launch has."""

    def call(args: Args) -> None:
        cache, packed, uk_weight = args["cache"], args["packed"], args["uk_weight"]
        assert isinstance(cache, torch.Tensor)
        assert isinstance(packed, torch.Tensor)
        assert isinstance(uk_weight, torch.Tensor)
        is_fp8 = cache.element_size() == 1
        launches = torch.zeros(LAUNCH_SLOTS, dtype=torch.int32)
        names = ("packed", "q_norm", "kv_norm", "q_weight", "uk_weight")
        module, sizes = (op, ()) if row_tiles == 1 else (mla_query_wide, (row_tiles,))
        q_lora = args["q_norm"].shape[0]  # type: ignore[union-attr]
        run_kernel(
            module,
            "_query",
            [
                *(args[n] for n in names),
                cache.view(torch.uint8) if is_fp8 else cache,
                args["slot_mapping"],
                args["query"],
                launches,
                1.0 / args["kv_scale"],  # type: ignore[operator]
                args["eps"],
                q_lora,
                *sizes,
                is_fp8,
            ],
            grid=(CLUSTER, uk_weight.shape[0], -(-packed.shape[0] // (16 * row_tiles))),
            cluster=CLUSTER,
            threads=module.THREADS,
            dynamic_bytes=op.SHARED_BYTES
            if row_tiles == 1
            else mla_query_wide.shared_bytes(q_lora, row_tiles),
        )
        assert launches.tolist() == [0] * 8 + [1] + [0] * (LAUNCH_SLOTS - 9)

    return call


@pytest.mark.parametrize(
    ("model", "tp", "tokens", "kv_dtype", "regime", "row_tiles"),
    [
        (CANARY, 1, 1, "bf16", "gaussian", 1),
        (CANARY, 2, 5, "bf16", "skipped_slots", 1),
        (CANARY, 2, 5, "fp8", "saturating", 1),
        (CANARY, 2, 35, "bf16", "strided_rows", 4),
        (CANARY, 2, 20, "bf16", "gaussian", 1),
        (WIDE, 2, 18, "bf16", "heavy_tail", 2),
        (WIDE, 2, 40, "fp8", "skipped_slots", 4),
    ],
)
def test_the_source_in_lockstep_agrees_with_the_oracle(
    model: Any, tp: int, tokens: int, kv_dtype: str, regime: str, row_tiles: int
) -> None:
    args = arguments("mla_query", Cell(model.rank(tp), tokens, kv_dtype=kv_dtype), regime)
    require_close("mla_query", args, run_in_lockstep(row_tiles))


@pytest.mark.parametrize(
    ("tokens", "heads", "row_tiles"),
    [(1, 12, 1), (16, 12, 1), (17, 12, 2), (33, 12, 4), (64, 12, 4), (32, 6, 1), (64, 6, 2)],
)
def test_blocks_hold_more_tokens_when_the_heads_fill_the_device(
    tokens: int, heads: int, row_tiles: int
) -> None:
    assert op.row_tiles_of(tokens, heads) == row_tiles


@pytest.mark.parametrize("architecture", DISPATCHED + COMPILED)
def test_compiles_and_reads_activations_only_after_the_wait(
    architecture: str, compile_smoke: Callable[[str, str], dict[str, str]]
) -> None:
    (ptx,) = compile_smoke("mla_query", architecture).values()
    first, second = ptx.split("griddepcontrol.wait")[0], ptx.rsplit("griddepcontrol.wait", 1)[1]
    assert_activations_after_wait(first + "griddepcontrol.wait" + second, architecture)


def launch(args: Args) -> None:
    """The kernel on the GPU, and the count of its launches."""
    counts = torch.zeros(LAUNCH_SLOTS, dtype=torch.int32, device=args["query"].device)  # type: ignore[union-attr]
    op.mla_query(**args, launches=counts)  # type: ignore[arg-type]
    assert counts.tolist() == [0] * 8 + [1] + [0] * (LAUNCH_SLOTS - 9)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("tokens", [1, 7, 17, 64])
@pytest.mark.parametrize("tp", [8, 16])
def test_query_and_cache_match_the_oracle(tp: int, tokens: int, kv_dtype: str, gpu: Any) -> None:
    cell = Cell(K3.rank(tp), tokens, kv_dtype=kv_dtype)
    require_close("mla_query", arguments("mla_query", cell, device=gpu), launch)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "regime", ["heavy_tail", "large", "tiny", "skipped_slots", "strided_rows", "saturating"]
)
def test_hostile_inputs_match_the_oracle(regime: str, gpu: Any) -> None:
    cell = Cell(K3.rank(16), 5, kv_dtype="fp8")
    require_close("mla_query", arguments("mla_query", cell, regime, gpu), launch)
