"""Launch sizes over the whole envelope, from formulas that a compile leaves."""

from pathlib import Path

import pytest

from harness.domain.check import Status
from harness.stages import audit
from harness.stages.audit.launches import Extent, extent, launch_findings, launch_row, planted_launches
from tests.stages.audit.example_pack import CopyPack
from tests.stages.audit.test_stage import context, request

SIZES = {"x.0": (1, 64), "w.0": (16, 1000)}


def row(grid: tuple[str | None, str | None, str | None], cluster: int = 1) -> dict[str, object]:
    record = {"grid": grid, "cluster": [cluster, 1, 1], "is_cooperative": False}
    names = ("subject", "grid_x", "grid_y", "grid_z", "cluster_x", "cluster_y", "cluster_z", "is_cooperative")
    return dict(zip(names, launch_row("kernel0", record, ["x", "w"]), strict=True))


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        ("7", Extent(7, 7, 7)),
        ("x.0 7 *", Extent(7, 448, 7)),
        ("w.0 63 + 64 / 4 *", Extent(4, 64, 4)),
        ("w.0 16 - 2 /", Extent(0, 492, 1)),
        ("x.0 8 min", Extent(1, 8, 1)),
        ("x.0 3 %", Extent(0, 2, 1)),
    ],
)
def test_a_formula_is_bounded_over_all_sizes_at_once(formula: str, expected: Extent) -> None:
    assert extent(formula, SIZES) == expected


@pytest.mark.parametrize("formula", [None, "", "a9", "x.0 +", "7 x.0 1 - /", "x.0 8"])
def test_what_cannot_be_bounded_has_no_extent(formula: str | None) -> None:
    assert extent(formula, SIZES) is None


def test_arguments_are_named_and_numbers_behind_the_tensors_keep_their_place() -> None:
    assert row(("a0.0 a1.1 *", "a2", "1"))["grid_x"] == "x.0 w.1 *"
    assert row(("a0.0 a1.1 *", "a2", "1"))["grid_y"] == "a2"


def test_a_grid_past_the_limit_of_its_axis_fails_and_says_its_range() -> None:
    (finding,), unknown = launch_findings([row(("1", "a0.0 2048 *", "1"))], SIZES)
    assert unknown == 0
    assert finding.rule == "grid"
    assert finding.message == (
        "its grid has 2048 to 131072 blocks along y (x.0 2048 *); a launch takes 1 to 65535"
    )


def test_a_grid_that_cuts_through_a_cluster_fails() -> None:
    (finding,), _ = launch_findings([row(("a0.0", "1", "1"), cluster=4)], SIZES)
    assert finding.rule == "grid_cluster"


def test_without_any_launch_something_is_unknown() -> None:
    assert launch_findings([], SIZES) == ((), 1)


def test_every_planted_launch_is_told_from_its_twin() -> None:
    assert [r[0] for r in planted_launches() if r[4] is not True] == []
    assert {r[2] for r in planted_launches()} == {"clean", "grid", "grid_cluster", "cluster_limit", "unknown"}


def test_a_launch_whose_size_the_pack_does_not_bound_is_inconclusive(tmp_path: Path) -> None:
    root = tmp_path / "copies"
    root.mkdir()
    pack = CopyPack(root, sizes=())
    (check,) = audit.plan(request(pack))
    outcome = audit.run(check, context(pack, tmp_path))
    assert outcome.status is Status.INCONCLUSIVE
    assert outcome.summary == "1 launch sizes cannot be bounded over the envelope"


def test_the_plan_says_the_claims_bounds_of_what_grids_depend_on(tmp_path: Path) -> None:
    (check,) = audit.plan(request(CopyPack(tmp_path, sizes=(("x.0", "tokens"), ("a2", "1..160")))))
    assert check.parameter("sizes") == "x.0=1..1 a2=1..160"
