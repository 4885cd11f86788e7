"""Tokens by cell: what a demand of the policy counts, and what it does not."""

from harness.domain.cell_tokens import CellNeed, context_power, empty_cells, needs_text, parse_needs

COLUMNS = ("arm", "phase", "path", "requests", "context", "drafts", "tokens")


def rows(*values: tuple[object, ...]) -> list[dict[str, object]]:
    return [dict(zip(COLUMNS, row, strict=True)) for row in values]


def short(need: CellNeed, *values: tuple[object, ...]) -> list[int]:
    return [found for _, found in empty_cells([need], rows(*values))]  # type: ignore[arg-type]  # scalars


EIGHT = CellNeed(batch_min=5, batch_max=8, context=1024, min_tokens=100)


def test_contexts_are_counted_by_the_power_of_two_below_them() -> None:
    assert [context_power(n) for n in (0, 1, 2, 3, 1023, 1024, 1025)] == [0, 1, 2, 2, 512, 1024, 1024]


def test_a_need_is_met_by_all_steps_of_its_bucket_in_contexts_at_least_as_long() -> None:
    five = ("optimised", "decode", "optimised", 5, 1024, 0, 40)
    eight = ("optimised", "decode", "optimised", 8, 65536, 0, 60)
    assert short(EIGHT, five, eight) == []


def test_tokens_of_another_batch_context_draft_count_arm_or_path_meet_no_need() -> None:
    assert short(
        EIGHT,
        ("optimised", "decode", "optimised", 8, 1024, 0, 99),
        ("optimised", "decode", "optimised", 4, 1024, 0, 500),
        ("optimised", "decode", "optimised", 9, 1024, 0, 500),
        ("optimised", "decode", "optimised", 8, 512, 0, 500),
        ("optimised", "verify", "optimised", 8, 1024, 3, 500),
        ("optimised", "decode", "stock", 8, 1024, 0, 500),
        ("poison", "decode", "optimised", 8, 1024, 0, 500),
    ) == [99]


def test_a_step_whose_context_nobody_told_meets_no_need() -> None:
    need = CellNeed(batch_min=1, batch_max=1, context=1, min_tokens=1)
    assert short(need, ("optimised", "decode", "optimised", 1, 0, 0, 50)) == [0]


def test_needs_travel_as_one_parameter_and_name_their_cell() -> None:
    needs = (EIGHT, CellNeed(batch_min=1, batch_max=1, context=24, drafts=1, min_tokens=1))
    assert parse_needs(needs_text(needs)) == needs
    assert [need.words() for need in needs] == [
        "batch 5 to 8, context from 1024", "batch 1, context from 24, 1 draft",
    ]  # fmt: skip
