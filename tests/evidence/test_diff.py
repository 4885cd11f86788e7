"""Two bundles side by side."""

from pathlib import Path

from harness.domain.machine import Machine
from harness.evidence.diff import Difference, diff_bundles
from harness.evidence.reader import open_bundle
from tests.evidence.example_run import example_machine, example_plan, only, write_example


def test_two_equal_runs_do_not_differ(tmp_path: Path) -> None:
    plan = only(example_plan(), lambda c: c.stage == "sweep")
    one, two = (open_bundle(write_example(tmp_path / name, plan)) for name in ("one", "two"))
    diff = diff_bundles(one, two)
    assert (diff.is_comparable, diff.conditions, diff.results) == (True, (), ())


def test_dependencies_are_named_before_results(tmp_path: Path) -> None:
    machine: Machine = example_machine().model_copy(
        update={"libraries": (("numpy", "2.4.0"), ("torch", "2.14.0"), ("triton", "3.6.0"))}
    )
    plan = only(example_plan(), lambda c: c.id.startswith("audit/kda_step"))
    one = open_bundle(write_example(tmp_path / "one", plan))
    two = open_bundle(
        write_example(tmp_path / "two", plan.model_copy(update={"machine": machine}), "passing")
    )
    diff = diff_bundles(one, two)
    assert diff.conditions == (
        Difference(about="library pydantic", first="2.14.4", second="absent"),
        Difference(about="library torch", first="2.13.0", second="2.14.0"),
        Difference(about="library triton", first="absent", second="3.6.0"),
    )
    assert diff.results == (
        Difference(about="audit/kda_step/sm_100a", first="FAIL", second="PASS"),
        Difference(about="audit/kda_step/sm_100a spill_bytes", first="48", second="0"),
    )


def test_checks_that_only_one_bundle_has_are_results(tmp_path: Path) -> None:
    one = open_bundle(write_example(tmp_path / "one", only(example_plan(), lambda c: "sm_90a" in c.id)))
    two = open_bundle(write_example(tmp_path / "two", only(example_plan(), lambda c: c.op == "attn_res")))
    about = [d.about for d in diff_bundles(one, two).results]
    assert "audit/kda_step/sm_90a" in about
    assert "audit/attn_res/sm_100a" in about


def test_bundles_without_a_common_check_are_not_comparable(tmp_path: Path) -> None:
    one = open_bundle(write_example(tmp_path / "one", only(example_plan(), lambda c: c.stage == "audit")))
    two = open_bundle(write_example(tmp_path / "two", only(example_plan(), lambda c: c.stage == "sweep")))
    assert not diff_bundles(one, two).is_comparable
