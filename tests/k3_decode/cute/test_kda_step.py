"""The KDA kernel: its source in lockstep on the CPU; compilation; values, windows and replays on a GPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL (nvidia-cutlass-dsl) is not installed")

from k3_decode.cute import kda_step as op
from k3_decode.cute.kda_step import DECODE, VERIFY, VERIFY_ACCEPTED, Form
from k3_decode.cute.variant import COMPILED, DISPATCHED
from k3_decode.ops.contract import LAUNCH_SLOTS, Args, Cell
from k3_decode.shapes import CANARY, K3

from tests.k3_decode.cute.lockstep import run_kernel
from tests.k3_decode.cute.op_cells import arguments, assert_activations_after_wait, require_close


def run_in_lockstep(form: Form) -> Callable[[Args], None]:
    """The kernel's source on the CPU, in the grid that its launch has."""

    def call(args: Args) -> None:
        slots, packed = args["slots"], args["packed"]
        assert isinstance(slots, torch.Tensor)
        assert isinstance(packed, torch.Tensor)
        names = (
            "packed",
            "conv_weight",
            "decay_weight",
            "a_log",
            "dt_bias",
            "norm_weight",
            "conv_state",
            "state",
        )
        accepted = slots[:, 0] if args["accepted"] is None else args["accepted"]
        launches = torch.zeros(LAUNCH_SLOTS, dtype=torch.int32)
        constants = [form.split, form.steps, form.threads, form.stages, form.mode, form.has_bound]
        scalars = [args["lower_bound"] or 0.0, args["eps"]]
        heads = args["a_log"].shape[0]  # type: ignore[union-attr]
        run_kernel(
            op,
            "_kda",
            [*(args[n] for n in names), slots, accepted, args["out"], launches, *scalars, *constants],
            grid=(form.split, heads, -(-packed.shape[0] // form.steps)),
            cluster=form.split,
            threads=form.threads,
            dynamic_bytes=form.stages * (form.threads // 32) * op.CHUNK_BYTES,
        )
        assert launches.tolist() == [0, 0, 1] + [0] * (LAUNCH_SLOTS - 3)

    return call


@pytest.mark.parametrize(
    ("tp", "requests", "rows", "regime", "form"),
    [
        (1, 1, 1, "gaussian", Form(8, 1, 128, 0, 3, DECODE, True)),
        (2, 3, 1, "null_slots", Form(4, 2, 128, 1, 3, DECODE, True)),
        (2, 9, 1, "permuted_slots", Form(1, 8, 256, 1, 1, DECODE, True)),
        (2, 4, 1, "strided_slots", Form(2, 3, 128, 0, 3, DECODE, True)),
        (2, 11, 1, "permuted_slots", Form(1, 6, 256, 5, 1, DECODE, True)),
        (2, 6, 1, "null_slots", Form(2, 3, 128, 2, 2, DECODE, True)),
        (2, 3, 1, "large", Form(1, 3, 256, 0, 2, DECODE, True)),
        (2, 2, 1, "strided_rows", Form(2, 1, 128, 0, 3, DECODE, True)),
        (2, 2, 3, "partly_accepted", Form(8, 3, 128, 0, 3, VERIFY_ACCEPTED, True)),
        (2, 2, 8, "partly_accepted", Form(4, 8, 128, 0, 3, VERIFY_ACCEPTED, True)),
        (2, 4, 2, "null_slots", Form(4, 2, 128, 0, 3, VERIFY_ACCEPTED, True)),
    ],
)
def test_the_source_in_lockstep_agrees_with_the_oracle(
    tp: int, requests: int, rows: int, regime: str, form: Form
) -> None:
    args = arguments("kda_step", Cell(CANARY.rank(tp), requests, rows), regime)
    require_close("kda_step", args, run_in_lockstep(form))


def test_verify_without_accepted_starts_from_the_first_slot() -> None:
    args = {**arguments("kda_step", Cell(CANARY.rank(2), 2, 2)), "accepted": None}
    require_close("kda_step", args, run_in_lockstep(Form(8, 2, 128, 0, 3, VERIFY, True)))


def test_softplus_decay_has_no_bound() -> None:
    args = {**arguments("kda_step", Cell(CANARY.rank(2), 2)), "lower_bound": None}
    require_close("kda_step", args, run_in_lockstep(Form(8, 1, 128, 0, 3, DECODE, False)))


@pytest.mark.parametrize("requests", [1, 2, 3, 4, 7, 8, 16, 17, 32, 33, 64])
@pytest.mark.parametrize("heads", [2, 6, 12, 24, 48, 96])
def test_every_step_is_covered_by_a_variant_that_compiles(requests: int, heads: int) -> None:
    names = {variant.name for variant in op.variants()}
    assert op.name_of(op.form_of(requests, 1, heads, True, False)) in names
    for rows in range(2, 9):
        assert op.name_of(op.form_of(requests, rows, heads, True, True)) in names


def test_more_than_eight_rows_a_request_are_refused() -> None:
    args = arguments("kda_step", Cell(CANARY.rank(2), 1, 9))
    with pytest.raises(ValueError, match="9 rows of 1 requests"):
        op.kda_step(**args, launches=torch.zeros(LAUNCH_SLOTS, dtype=torch.int32))  # type: ignore[arg-type]


@pytest.mark.parametrize("architecture", DISPATCHED + COMPILED)
def test_compiles_and_reads_state_only_after_the_wait(
    architecture: str, compile_smoke: Callable[[str, str], dict[str, str]]
) -> None:
    (ptx,) = compile_smoke("kda_step", architecture).values()
    assert_activations_after_wait(ptx, architecture)


def launch(args: Args) -> None:
    """The kernel on the GPU, and the count of its launches."""
    counts = torch.zeros(LAUNCH_SLOTS, dtype=torch.int32, device=args["out"].device)  # type: ignore[union-attr]
    op.kda_step(**args, launches=counts)  # type: ignore[arg-type]
    assert counts.tolist() == [0, 0, 1] + [0] * (LAUNCH_SLOTS - 3)


@pytest.mark.gpu
@pytest.mark.parametrize("requests", [1, 2, 7, 17, 64])
@pytest.mark.parametrize("tp", [8, 16])
def test_decode_matches_the_oracle(tp: int, requests: int, gpu: Any) -> None:
    require_close("kda_step", arguments("kda_step", Cell(K3.rank(tp), requests), device=gpu), launch)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(
    "regime", ["heavy_tail", "large", "tiny", "null_slots", "strided_slots", "partly_accepted"]
)
def test_hostile_inputs_match_the_oracle(regime: str, rows: int, gpu: Any) -> None:
    require_close("kda_step", arguments("kda_step", Cell(K3.rank(16), 5, rows), regime, gpu), launch)


@pytest.mark.gpu
def test_replays_follow_changed_inputs(gpu: Any) -> None:
    args = arguments("kda_step", Cell(K3.rank(16), 3), device=gpu)
    counts = torch.zeros(LAUNCH_SLOTS, dtype=torch.int32, device=gpu)
    op.kda_step(**args, launches=counts)  # type: ignore[arg-type]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op.kda_step(**args, launches=counts)  # type: ignore[arg-type]

    def replay(fresh: Args) -> None:
        for name in ("packed", "conv_state", "state"):
            args[name].copy_(fresh[name])  # type: ignore[union-attr, arg-type]
        graph.replay()
        for name in ("out", "conv_state", "state"):
            fresh[name].copy_(args[name])  # type: ignore[union-attr, arg-type]

    for seed in range(4, 7):
        changing = arguments("kda_step", Cell(K3.rank(16), 3), device=gpu, seed=seed)
        constant = {k: v for k, v in args.items() if k not in ("packed", "conv_state", "state", "out")}
        require_close("kda_step", {**changing, **constant}, replay)
