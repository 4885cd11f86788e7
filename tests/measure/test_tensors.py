"""Guarded arguments, poison and errors against an oracle."""

import math

import torch

from harness.measure.tensors import (
    WORST,
    Touch,
    exact_mismatches,
    guard,
    operations_of,
    poison,
    same_bits,
    shared_operations,
    token_errors,
    unwritten,
)


def test_a_write_before_an_argument_is_seen_in_its_guard_band() -> None:
    guarded = guard({"x": torch.ones(4)})
    guarded.args["x"].as_strided((1,), (1,), guarded.args["x"].storage_offset() - 1).fill_(7)
    assert guarded.changed({"x": None}) == (Touch("x", "guard", 4),)


def test_a_write_between_strided_rows_is_seen_as_a_gap() -> None:
    wide = torch.zeros(2, 6)
    guarded = guard({"out": wide[:, :4]})
    rows = guarded.args["out"]
    assert rows.stride() == (6, 1)
    rows.as_strided((1,), (1,), rows.storage_offset() + 4).fill_(1)
    assert guarded.changed({"out": None}) == (Touch("out", "gap", 2),)  # 1.0 has two bytes that are not zero


def test_changing_an_input_is_seen_and_changing_an_output_is_not() -> None:
    guarded = guard({"x": torch.zeros(3, dtype=torch.uint8), "out": torch.zeros(3, dtype=torch.uint8)})
    guarded.args["x"][1] = 9
    guarded.args["out"].fill_(9)
    assert guarded.changed({"out": None}) == (Touch("x", "input", 1),)


def test_state_may_change_only_where_the_mask_says() -> None:
    guarded = guard({"state": torch.zeros(2, 3, dtype=torch.uint8)})
    guarded.args["state"].fill_(5)
    mask = torch.tensor([[True, True, True], [False, False, False]])
    assert guarded.changed({"state": mask}) == (Touch("state", "untouched_state", 3),)


def test_guarded_copies_leave_the_given_tensors_alone_and_keep_other_values() -> None:
    x = torch.ones(2)
    guarded = guard({"x": x, "eps": 1e-5, "none": None})
    guarded.args["x"].fill_(3)
    assert x.tolist() == [1.0, 1.0]
    assert guarded.args["eps"] == 1e-5
    assert guarded.args["none"] is None


def test_poison_counts_exactly_the_elements_that_nobody_wrote() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.uint8):
        out = torch.empty(5, dtype=dtype)
        poison(out)
        assert unwritten(out) == 5
        out[:3] = 1
        assert unwritten(out) == 2


def test_a_nan_that_arithmetic_gives_is_not_taken_for_poison() -> None:
    out = torch.zeros(2) / torch.zeros(2)
    assert out.isnan().all()
    assert unwritten(out) == 0
    assert unwritten(out.bfloat16()) == 0


def test_errors_are_kept_per_token_in_relative_l2_and_in_the_worst_element() -> None:
    want = torch.tensor([[3.0, 4.0], [0.0, 2.0]], dtype=torch.float64)
    got = torch.tensor([[3.0, 4.5], [0.0, 2.0]])
    first, second = token_errors(got, want, torch.bfloat16, 0)
    assert first.relative_l2 == 0.1  # 0.5 over 5
    assert first.worst == 0.125  # 0.5 over 4
    assert first.ulp == 2**-7  # one step at 4 is 2^-5
    assert (second.relative_l2, second.worst) == (0.0, 0.0)


def test_a_row_below_the_smallest_normal_number_may_be_lost_and_no_larger_one() -> None:
    tiny = torch.tensor([[2.0**-130]], dtype=torch.float64)
    lost = token_errors(torch.zeros(1, 1), tiny, torch.float32, 0)[0]
    assert (lost.relative_l2, lost.least) == (1.0, 16.0)  # 2^-126 over 2^-130
    assert token_errors(torch.ones(1, 1), torch.ones(1, 1), torch.float32, 0)[0].least == 2.0**-126
    # e4m3's smallest step is 2^-9, whatever fp32 can hold
    assert token_errors(torch.ones(1, 1), torch.ones(1, 1), torch.float8_e4m3fn, 0)[0].least == 2.0**-9


def test_a_nan_where_the_oracle_has_a_number_is_the_worst_error_there_is() -> None:
    want = torch.ones(1, 2, dtype=torch.float64)
    got = torch.tensor([[1.0, math.nan]])
    assert token_errors(got, want, torch.float32, 0)[0].worst == WORST


def test_where_the_oracle_is_not_finite_the_class_must_be_the_same() -> None:
    want = torch.tensor([[math.nan, math.inf, -math.inf]], dtype=torch.float64)
    assert token_errors(want.float(), want, torch.float32, 0)[0].worst == 0.0
    assert token_errors(-want.float(), want, torch.float32, 0)[0].worst == WORST


def test_a_value_beyond_the_dtypes_range_must_become_infinite() -> None:
    want = torch.tensor([[1e39]], dtype=torch.float64)
    assert token_errors(torch.tensor([[math.inf]]), want, torch.float32, 0)[0].worst == 0.0


def test_zeros_for_a_row_that_is_not_zero_are_wholly_wrong() -> None:
    want = torch.full((1, 4), 1e-20, dtype=torch.float64)
    assert token_errors(torch.zeros(1, 4), want, torch.float32, 0)[0].relative_l2 == 1.0


def test_exact_outputs_are_compared_after_the_oracles_rounding() -> None:
    want = torch.tensor([1.0, 2.0, math.nan], dtype=torch.float64)
    assert exact_mismatches(torch.tensor([1.0, 2.0, math.nan]), want) == 0
    assert exact_mismatches(torch.tensor([1.0, 2.5, math.nan]), want) == 1
    assert exact_mismatches(torch.tensor([1.0, 2.0, 3.0]), want) == 1


def test_bits_differ_between_zero_and_minus_zero() -> None:
    assert same_bits(torch.tensor([0.0]), torch.tensor([-0.0])) == 1


def test_the_same_torch_calls_are_recognised_and_other_dtypes_are_not() -> None:
    x, y = torch.ones(2, 2), torch.ones(2, 2)
    plain = operations_of(lambda: torch.mm(x, y))
    wide = operations_of(lambda: torch.mm(x.double(), y.double()))
    assert shared_operations(plain, plain) == 1.0
    assert shared_operations(plain, wide) == 0.0
    assert shared_operations((), plain) == 0.0
