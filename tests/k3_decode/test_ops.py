"""Every op, stock and CPU, against its float64 oracle, over cells and hostile inputs.

The cells are a reduced grid: nano at every kind of step (one row, several requests, verify rows), the canary
where several experts and blocks differ, and Kimi-Linear's softplus decay. Larger widths change no branch of
the CPU ops.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from k3_decode.ops import OPS
from k3_decode.ops.contract import LAUNCH_SLOTS, OP_NAMES, Args, Cell, OpSpec
from k3_decode.shapes import CANARY, CANARY_H8, NANO

from tests.k3_decode.op_errors import (
    ULP,
    clones,
    hard_cap,
    outputs,
    run_cpu,
    run_stock,
    same_bits,
    tensor,
)

CPU = torch.device("cpu")
CELLS = {
    "one_row": Cell(NANO.rank(1), requests=1, context=64),
    "batch": Cell(CANARY.rank(1), requests=5, context=150),
    "verify": Cell(NANO.rank(2), requests=2, rows=8, context=70),
    "one_head": Cell(CANARY_H8.rank(8), requests=3, rows=2, context=129, kv_dtype="fp8"),
}


def each_case() -> Iterator[tuple[str, str, str]]:
    """Every regime of every op at one cell, cells taken in turn, and all cells for plain inputs."""
    for name, spec in OPS.items():
        for i, regime in enumerate(spec.regimes):
            yield name, regime, list(CELLS)[i % len(CELLS)]
            if regime in ("gaussian", "null_slots", "permuted_slots", "empty_request", "edge_ties"):
                yield from ((name, regime, cell) for cell in CELLS)


def arguments(spec: OpSpec, regime: str, cell: str) -> Args:
    return spec.make_args(CELLS[cell], regime, torch.Generator().manual_seed(7), CPU)


@pytest.mark.parametrize(("name", "regime", "cell"), sorted(set(each_case())))
def test_stock_and_cpu_agree_with_the_oracle(name: str, regime: str, cell: str) -> None:
    spec = OPS[name]
    args = arguments(spec, regime, cell)
    truth = spec.oracle(args)
    stock, cpu = run_stock(spec, args), run_cpu(spec, args)

    assert set(truth) == {param.name for param in spec.written()}
    for param in spec.written():
        if param.is_exact:
            assert same_bits(tensor(stock[param.name]), truth[param.name])
            assert same_bits(tensor(cpu[param.name]), truth[param.name])
    stock_errors, cpu_errors = outputs(spec, stock, truth), outputs(spec, cpu, truth)
    for output, error in cpu_errors.items():
        dtype = tensor(args[output]).dtype
        assert error <= 2 * stock_errors[output] + 2 * ULP[dtype]
        if not (dtype == torch.float8_e4m3fn and regime == "tiny"):  # those values round to zero
            assert max(error, stock_errors[output]) <= hard_cap(output, dtype)


@pytest.mark.parametrize("name", ["attn_res", "kda_step", "mla_query"])
@pytest.mark.parametrize("cell", ["one_row", "verify", "one_head"])
def test_state_outside_the_declared_elements_stays_bit_for_bit(name: str, cell: str) -> None:
    spec = OPS[name]
    assert spec.touched is not None
    for regime in spec.regimes:
        args = arguments(spec, regime, cell)
        for state, mask in spec.touched(args).items():
            before = tensor(args[state])[~mask]
            assert same_bits(tensor(run_stock(spec, args)[state])[~mask], before)
            assert same_bits(tensor(run_cpu(spec, args)[state])[~mask], before)


@pytest.mark.parametrize("name", OP_NAMES)
def test_oracle_and_arguments_leave_their_inputs_alone(name: str) -> None:
    spec = OPS[name]
    args = arguments(spec, spec.regimes[-1], "batch")
    before = clones(args)
    spec.oracle(args)
    for argument, value in args.items():
        if isinstance(value, torch.Tensor):
            assert same_bits(value, tensor(before[argument]))


@pytest.mark.parametrize("name", OP_NAMES)
def test_each_call_counts_one_launch_at_the_ops_place(name: str) -> None:
    spec = OPS[name]
    result = run_cpu(spec, arguments(spec, "gaussian", "batch"))
    expected = [0] * LAUNCH_SLOTS
    expected[OP_NAMES.index(name)] = 1
    assert tensor(result["launches"]).tolist() == expected


@pytest.mark.parametrize("name", OP_NAMES)
def test_outputs_are_poison_before_a_call_and_truth_is_never_zero(name: str) -> None:
    spec = OPS[name]
    for regime in spec.regimes:
        args = arguments(spec, regime, "verify")
        truth = spec.oracle(args)
        for param in spec.params:
            if param.role == "output":
                value = tensor(args[param.name])
                poison = torch.isnan(value) if value.is_floating_point() else value == -1
                assert bool(poison.all())
                assert bool((truth[param.name] != 0).any())


@pytest.mark.parametrize("name", OP_NAMES)
def test_an_unknown_regime_is_named_together_with_the_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} knows no input regime 'zeros'; it knows gaussian"):
        OPS[name].make_args(CELLS["batch"], "zeros", torch.Generator(), CPU)


@pytest.mark.parametrize("name", OP_NAMES)
def test_a_seed_gives_the_same_arguments_again(name: str) -> None:
    spec = OPS[name]
    first, second = arguments(spec, "heavy_tail", "batch"), arguments(spec, "heavy_tail", "batch")
    for argument, value in first.items():
        if isinstance(value, torch.Tensor):
            assert same_bits(value, tensor(second[argument]))


def test_softplus_decay_agrees_with_the_oracle() -> None:
    spec = OPS["kda_step"]
    unbounded = replace(NANO, decay_lower_bound=None)
    for regime in ("gaussian", "large", "short_memory", "long_memory"):
        cell = Cell(unbounded.rank(1), requests=3, rows=2)
        args = spec.make_args(cell, regime, torch.Generator().manual_seed(3), CPU)
        truth = spec.oracle(args)
        stock, cpu = outputs(spec, run_stock(spec, args), truth), outputs(spec, run_cpu(spec, args), truth)
        assert cpu["out"] <= 2 * stock["out"] + 2 * ULP[torch.bfloat16]
        assert cpu["state"] <= 2 * stock["state"] + 2 * ULP[torch.float32]


def test_ops_come_in_the_order_of_the_launch_counters() -> None:
    assert tuple(OPS) == OP_NAMES


def test_mla_query_says_which_model_it_cannot_serve() -> None:
    without_rank = replace(NANO, name="full_rank", q_lora=None)
    with pytest.raises(ValueError, match="full_rank has none"):
        OPS["mla_query"].make_args(Cell(without_rank.rank(1), 1), "gaussian", torch.Generator(), CPU)
