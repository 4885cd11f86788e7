"""The MLA value kernel: its source in lockstep on the CPU; compilation; values on a GPU."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL (nvidia-cutlass-dsl) is not installed")

from k3_decode.cute import mla_value as op
from k3_decode.cute.variant import COMPILED, DISPATCHED
from k3_decode.ops.contract import LAUNCH_SLOTS, Args, Cell
from k3_decode.ops.log_base import LogBase
from k3_decode.shapes import CANARY, K3

from tests.k3_decode.cute.lockstep import run_kernel
from tests.k3_decode.cute.op_cells import arguments, assert_activations_after_wait, require_close


def run_in_lockstep(args: Args) -> None:
    """The kernel's source on the CPU, in the grid that its launch has."""
    partial, uv_weight = args["partial"], args["uv_weight"]
    assert isinstance(partial, torch.Tensor)
    assert isinstance(uv_weight, torch.Tensor)
    tokens = op.tokens_of(partial.shape[1])
    launches = torch.zeros(LAUNCH_SLOTS, dtype=torch.int32)
    run_kernel(
        op,
        "_value",
        [
            partial,
            args["partial_lse"],
            uv_weight,
            args["gate"],
            args["out"],
            launches,
            math.log2(LogBase(args["lse_base"])),
            tokens,
        ],
        grid=(op.CLUSTER, uv_weight.shape[0], -(-partial.shape[1] // tokens)),
        cluster=op.CLUSTER,
        threads=op.THREADS,
        dynamic_bytes=op._shared_bytes(tokens),
    )
    assert launches.tolist() == [0] * 10 + [1] + [0] * (LAUNCH_SLOTS - 11)


@pytest.mark.parametrize(
    ("tokens", "regime"),
    [
        (1, "one_shard"),
        (1, "empty_shards"),
        (2, "uneven_shards"),
        (3, "base_two"),
        (5, "no_keys"),
        (16, "empty_shards"),
        (20, "gate_in_packed_rows"),
        (40, "empty_shards"),
        (70, "gaussian"),
    ],
)
def test_the_source_in_lockstep_agrees_with_the_oracle(tokens: int, regime: str) -> None:
    require_close("mla_value", arguments("mla_value", Cell(CANARY.rank(2), tokens), regime), run_in_lockstep)


def test_many_shards_of_one_token_are_merged_in_turns() -> None:
    args = arguments("mla_value", Cell(CANARY.rank(2), 1))
    generator = torch.Generator().manual_seed(9)
    args["partial"] = torch.randn(300, 1, 1, 512, generator=generator).to(torch.bfloat16)
    args["partial_lse"] = torch.randn(300, 1, 1, generator=generator)
    require_close("mla_value", args, run_in_lockstep)


def test_more_weights_than_a_block_holds_are_refused() -> None:
    args = arguments("mla_value", Cell(CANARY.rank(2), 64))
    args["partial"], args["partial_lse"] = torch.zeros(65, 64, 1, 512), torch.zeros(65, 64, 1)
    with pytest.raises(ValueError, match="at most 64 shards"):
        op.mla_value(**args, launches=torch.zeros(LAUNCH_SLOTS, dtype=torch.int32))  # type: ignore[arg-type]


@pytest.mark.parametrize(("tokens", "held"), [(1, 1), (2, 2), (3, 4), (17, 32), (64, 64), (65, 64)])
def test_a_block_holds_a_power_of_two_of_tokens(tokens: int, held: int) -> None:
    assert op.tokens_of(tokens) == held


@pytest.mark.parametrize("architecture", DISPATCHED + COMPILED)
def test_compiles_and_reads_activations_only_after_the_wait(
    architecture: str, compile_smoke: Callable[[str, str], dict[str, str]]
) -> None:
    (ptx,) = compile_smoke("mla_value", architecture).values()
    assert_activations_after_wait(ptx, architecture)


def launch(args: Args) -> None:
    """The kernel on the GPU, and the count of its launches."""
    counts = torch.zeros(LAUNCH_SLOTS, dtype=torch.int32, device=args["out"].device)  # type: ignore[union-attr]
    op.mla_value(**args, launches=counts)  # type: ignore[arg-type]
    assert counts.tolist() == [0] * 10 + [1] + [0] * (LAUNCH_SLOTS - 11)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 7, 17, 64])
@pytest.mark.parametrize("tp", [8, 16])
def test_values_match_the_oracle(tp: int, tokens: int, gpu: Any) -> None:
    require_close("mla_value", arguments("mla_value", Cell(K3.rank(tp), tokens), device=gpu), launch)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("regime", ["heavy_tail", "large", "tiny", "empty_shards", "no_keys", "base_two"])
def test_hostile_inputs_match_the_oracle(regime: str, tokens: int, gpu: Any) -> None:
    require_close("mla_value", arguments("mla_value", Cell(K3.rank(16), tokens), regime, gpu), launch)
