"""What KDA must keep whatever the inputs: seams, order of requests, null slots, rejected drafts.

Each holds for the oracle, for stock and for the CPU op; the chunked prefill has to meet the step form.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from k3_decode.kda_prefill import KdaInputs, advance, convolve
from k3_decode.ops import OPS
from k3_decode.ops.contract import LAUNCH_SLOTS, Args, Cell
from k3_decode.ops.kda_step import stock
from k3_decode.shapes import NANO

from tests.k3_decode.op_errors import clones, cpu_op, deviation, same_bits, tensor

SPEC = OPS["kda_step"]
RANK = NANO.rank(2)
"""One head: what the properties need, at the least cost."""
WIDTH = RANK.channels
TOLERANCE = 2e-6
"""Relative, of fp32 states over a few tokens, against another order of the same sums."""
STOCK_TOLERANCE = 2e-4
"""Stock rounds the decay's low-rank product to bf16, and a product over other row counts adds in another
order: a logit may move by a unit in its last place, which moved a state by 5e-5."""


def run_oracle(args: Args) -> Args:
    """The oracle's results as if the op had run, in float64 where inexact."""
    return {**args, **SPEC.oracle(args)}


def run_stock(args: Args) -> Args:
    result = clones(args)
    stock(**result)
    return result


def run_cpu(args: Args) -> Args:
    result = clones(args)
    cpu_op("kda_step")(**result, launches=torch.zeros(LAUNCH_SLOTS, dtype=torch.int32))
    return result


PATHS = {"oracle": run_oracle, "stock": run_stock, "cpu": run_cpu}
every_path = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())
Path = Callable[[Args], Args]


def tolerance_of(path: Path) -> float:
    return STOCK_TOLERANCE if path is run_stock else TOLERANCE


def arguments(seed: int, requests: int, rows: int = 1, regime: str = "gaussian") -> Args:
    cell = Cell(RANK, requests, rows)
    return SPEC.make_args(cell, regime, torch.Generator().manual_seed(seed), torch.device("cpu"))


def settled(args: Args) -> Args:
    """The same step for requests whose state is in their home slot, in a window with room for 8 rows."""
    window = tensor(args["conv_state"])
    wide = torch.zeros(window.shape[0], 10, window.shape[2], dtype=window.dtype)
    wide[:, : window.shape[1]] = window
    return {**args, "accepted": None, "conv_state": wide}


def steps(path: Path, args: Args, tokens: torch.Tensor) -> tuple[torch.Tensor, Args]:
    """Outputs of decode steps of one request, token after token, and the last step's arguments."""
    outs = []
    for token in tokens:
        args = path({**args, "packed": token.unsqueeze(0), "rows": 1})
        outs.append(tensor(args["out"]).double())
    return torch.cat(outs), args


@every_path
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), split=st.integers(1, 7))
def test_splitting_a_sequence_anywhere_gives_the_same_state(path: Path, seed: int, split: int) -> None:
    """Eight tokens as a verify step of `split` rows and one of the rest, against one token a step."""
    args = settled(arguments(seed, requests=1, rows=8))
    packed, slots = tensor(args["packed"]), tensor(args["slots"])
    out = tensor(args["out"])
    begin = {"packed": packed[:split], "slots": slots[:, :split], "rows": split, "out": out[:split]}
    first = path({**args, **begin})
    state = tensor(first["state"]).clone()
    window = tensor(first["conv_state"]).clone()
    state[slots[0, 0]] = state[slots[0, split - 1]].clone()
    window[slots[0, 0], :3] = window[slots[0, 0], split - 1 : split + 2].clone()
    second = path(
        {
            **args,
            "packed": packed[split:],
            "slots": slots[:, : 8 - split],
            "rows": 8 - split,
            "state": state.float(),
            "conv_state": window,
            "out": out[split:],
        }
    )
    single = {**args, "slots": slots[:, :1], "out": tensor(args["out"])[:1]}
    outs, whole = steps(lambda a: path({**a, "state": tensor(a["state"]).float()}), single, packed)

    end, home = slots[0, 8 - split - 1], slots[0, 0]
    assert deviation(tensor(second["state"])[end], tensor(whole["state"])[home].double()) < tolerance_of(path)
    newest = tensor(second["conv_state"])[home, 7 - split : 10 - split]
    assert same_bits(newest, tensor(whole["conv_state"])[home, :3])
    parts = torch.cat((tensor(first["out"]).double(), tensor(second["out"]).double()))
    assert deviation(parts, outs) < 2.0**-7


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    tokens=st.integers(1, 70),
    split=st.floats(0, 1),
    bound=st.sampled_from([-5.0, None]),
)
def test_chunked_prefill_meets_the_step_form_at_any_seam(
    seed: int, tokens: int, split: float, bound: float | None
) -> None:
    """Chunks of `split` and the rest, against the oracle's recurrence over single tokens."""
    args = {**settled(arguments(seed, requests=1)), "lower_bound": bound}
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(tokens, RANK.kda_in_rows, generator=generator).to(torch.bfloat16)
    state, history = tensor(args["state"])[1], tensor(args["conv_state"])[1, :3]
    cut = int(split * tokens)
    reads = []
    for part in (rows[:cut], rows[cut:]):
        if len(part):
            inputs = KdaInputs(
                convolve(history, part[:, : 3 * WIDTH], tensor(args["conv_weight"])),
                part[:, 4 * WIDTH : 4 * WIDTH + 128].double() @ tensor(args["decay_weight"]).double().T,
                part[:, 4 * WIDTH + 128 : 4 * WIDTH + 128 + RANK.heads],
                tensor(args["a_log"]),
                tensor(args["dt_bias"]),
                bound,
            )
            read, state = advance(inputs, state)
            reads.append(read)
            history = torch.cat((history, part[:, : 3 * WIDTH]))[-3:]
    outs, last = steps(lambda a: run_oracle({**a, "state": tensor(a["state"])}), args, rows)
    assert deviation(state, tensor(last["state"])[1].double()) < 1e-5
    assert same_bits(history, tensor(last["conv_state"])[1, :3])
    read = torch.cat(reads).double()
    normed = read / torch.sqrt(read.square().mean(-1, keepdim=True) + NANO.norm_eps)
    gate = torch.sigmoid(rows[:, 3 * WIDTH : 4 * WIDTH].double())
    assert deviation((normed * tensor(args["norm_weight"]).double()).flatten(1) * gate, outs) < 1e-4


@every_path
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), order=st.permutations(range(4)))
def test_permuting_requests_permutes_outputs_alone(path: Path, seed: int, order: list[int]) -> None:
    args = arguments(seed, requests=4)
    plain = path(args)
    mixed = path({**args, "packed": tensor(args["packed"])[order], "slots": tensor(args["slots"])[order]})
    assert same_bits(tensor(mixed["out"]), tensor(plain["out"])[order])
    assert same_bits(tensor(mixed["state"]), tensor(plain["state"]))
    assert same_bits(tensor(mixed["conv_state"]), tensor(plain["conv_state"]))


@every_path
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 3))
def test_a_null_request_writes_nothing_and_reads_zero(path: Path, seed: int, rows: int) -> None:
    args = arguments(seed, requests=4, rows=rows, regime="null_slots")
    null = tensor(args["slots"])[:, 0] <= 0
    assert null.tolist() == [False, True, False, True]
    result = path(args)
    out = tensor(result["out"]).view(4, rows, WIDTH)
    assert not out[null].any()
    assert bool(torch.isfinite(out).all())
    assert bool((out[~null] != 0).any(-1).all())
    owned = tensor(args["slots"])[~null].flatten().long()
    free = torch.ones(tensor(args["state"]).shape[0], dtype=torch.bool)
    free[owned] = False
    assert same_bits(tensor(result["state"])[free].float(), tensor(args["state"])[free])
    assert same_bits(tensor(result["conv_state"])[free], tensor(args["conv_state"])[free])


@every_path
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), drafted=st.integers(2, 8), data=st.data())
def test_rolled_back_drafts_leave_the_state_of_never_having_drafted(
    path: Path, seed: int, drafted: int, data: st.DataObject
) -> None:
    """A verify step keeps `kept` rows; the next step continues as if only those had ever been there."""
    kept = data.draw(st.integers(1, drafted))
    args = settled(arguments(seed, requests=1, rows=drafted))
    packed, slots = tensor(args["packed"]), tensor(args["slots"])
    following = torch.randn(drafted, packed.shape[1], generator=torch.Generator().manual_seed(seed)).to(
        torch.bfloat16
    )
    verified = path(args)
    after = path(
        {
            **verified,
            "state": tensor(verified["state"]).float(),
            "packed": following,
            "accepted": torch.tensor([kept], dtype=torch.int32),
            "out": tensor(args["out"]),
        }
    )
    single = {**args, "slots": slots[:, :1], "out": tensor(args["out"])[:1]}
    never = lambda a: path({**a, "state": tensor(a["state"]).float()})  # noqa: E731  # a path of its own
    outs, alone = steps(never, single, torch.cat((packed[:kept], following)))
    end, home = slots[0, drafted - 1], slots[0, 0]
    assert deviation(tensor(after["out"]).double(), outs[kept:]) < 2.0**-7
    assert deviation(tensor(after["state"])[end], tensor(alone["state"])[home].double()) < tolerance_of(path)
    assert same_bits(
        tensor(after["conv_state"])[home, drafted - 1 : drafted + 2], tensor(alone["conv_state"])[home, :3]
    )


def test_a_wrong_seam_would_be_noticed() -> None:
    """The control: a state handed on transposed, as when two kernels disagree about its layout."""
    args = settled(arguments(3, requests=1))
    swapped = tensor(args["state"]).transpose(2, 3).contiguous()
    right, wrong = run_oracle(args), run_oracle({**args, "state": swapped})
    assert deviation(tensor(wrong["state"])[1], tensor(right["state"])[1]) > 0.1


def test_unbounded_decay_is_another_function_and_no_clamp() -> None:
    args = settled(arguments(5, requests=2))
    bounded, unbounded = run_oracle(args), run_oracle({**args, "lower_bound": None})
    assert deviation(tensor(unbounded["state"])[1], tensor(bounded["state"])[1]) > 0.01
    assert replace(NANO, decay_lower_bound=None).decay_lower_bound is None
