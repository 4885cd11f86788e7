"""The kernels stage on one op with real code: an honest candidate passes, and each way of cheating is told
apart.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.domain.check import Check, Outcome, Samples, SampleTable, StageName, Status
from harness.domain.claim import Architecture, Claim, Envelope, Range, Switch
from harness.domain.machine import Tier
from harness.domain.policy import Policy, Proof
from harness.domain.stage import PlanRequest, StageContext
from harness.stages import kernels
from harness.stages.kernels.judging import bound_share
from harness.stages.kernels.planning import edge_cells, outside_cells
from harness.stages.kernels.tables import GUARD_SHAPES, SHAPES
from tests.fakes.requests import CHANGE, MACHINE, ZONES
from tests.stages.kernels.example_pack import NormPack
from tests.stages.spoiled_tables import spoiled, with_rows, without_rows

ENVELOPE = Envelope(
    architectures=(
        Architecture(arch="cpu", level="dispatched"),
        Architecture(arch="sm_90a", level="compiled"),
    ),
    tp=(1,),
    dcp=(1,),
    batch=Range(min=1, max=8),
    batch_buckets=(1, 4, 8),
    context=Range(min=1, max=4096),
    drafts=Range(min=0, max=1),
    kv_dtypes=("bf16",),
    phases=("decode", "verify"),
    max_rows_per_step=8,
)
CLAIM = Claim(
    name="norms",
    pack="norms",
    summary="one op",
    envelope=ENVELOPE,
    features=(),
    state=(),
    files=("**",),
    switch=Switch(name="backend", on="fast", off="auto", default="auto"),
)


def request(pack: NormPack, tier: Tier = Tier.SMOKE, claim: Claim = CLAIM) -> PlanRequest:
    policy = Policy(
        name="test", summary="kernels", zone_map="test", proofs=(Proof(stage=StageName.KERNELS, tier=tier),)
    )
    return PlanRequest(
        pack=pack,
        claim=claim,
        policy=policy,
        zones=ZONES,
        rules=(),
        change=CHANGE,
        machine=MACHINE,
        tier=Tier.SMOKE,
        is_full=False,
        seed=7,
    )


def context(pack: NormPack, folder: Path) -> StageContext:
    made = request(pack)
    return StageContext(
        pack=pack,
        claim=CLAIM,
        policy=made.policy,
        zones=ZONES,
        rules=(),
        change=CHANGE,
        machine=MACHINE,
        tier=Tier.SMOKE,
        tree=None,
        cache=folder,
        logs=folder,
        ledger=folder,
        progress=lambda _: None,
    )


def first_cell(pack: NormPack) -> Check:
    return next(c for c in kernels.plan(request(pack)) if c.parameter("model") == "tiny")


def outcome_of(kind: str, folder: Path) -> Outcome:
    pack = NormPack(kind)
    return kernels.run(first_cell(pack), context(pack, folder))


def test_an_honest_candidate_passes_and_its_control_noticed_every_spoiled_result(tmp_path: Path) -> None:
    outcome = outcome_of("honest", tmp_path)
    assert outcome.status is Status.PASS
    assert outcome.control is not None
    assert outcome.control.failed
    assert outcome.control.observed == "12 spoiled results noticed"
    figures = {f.name: f.value for f in outcome.figures}
    assert figures["repeat_identical_share"] == 1
    assert figures["launches"] == 3  # gaussian, reused and large
    assert 0 < float(figures["smallest_noticed_out"] or 0) < 0.05


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        ("off_by_a_step", "error_above_bound"),
        ("one_element", "error_above_bound"),
        ("swapped_rows", "error_above_bound"),
        ("nan", "error_above_bound"),
        ("zeros", "error_above_bound"),
        ("cached_by_address", "error_above_bound"),
        ("scaled_by_the_batch", "error_from_a_batch_mate"),
        ("last_row_unwritten", "memory_unwritten"),
        ("writes_before", "memory_guard"),
        ("changes_input", "memory_input"),
        ("other_slot", "memory_untouched_state"),
        ("copy_is_rounded", "exact_output_differs"),
    ],
)
def test_each_wrong_candidate_fails_by_the_rule_that_is_about_it(
    kind: str, rule: str, tmp_path: Path
) -> None:
    outcome = outcome_of(kind, tmp_path)
    assert outcome.status is Status.FAIL
    assert rule in {f.rule for f in outcome.findings}


def test_a_candidate_that_launches_nothing_is_no_evidence(tmp_path: Path) -> None:
    outcome = outcome_of("no_launch", tmp_path)
    assert outcome.status is Status.NO_EVIDENCE
    assert "launch counter did not rise in gaussian" in outcome.summary


def test_stock_called_under_another_name_is_no_evidence(tmp_path: Path) -> None:
    outcome = outcome_of("stock_by_another_name", tmp_path)
    assert outcome.status is Status.NO_EVIDENCE
    assert "stock by another name" in outcome.summary


def test_a_candidate_whose_results_vary_says_so_in_its_figures(tmp_path: Path) -> None:
    figures = {f.name: f.value for f in outcome_of("random", tmp_path).figures}
    assert float(figures["repeat_identical_share"] or 0) < 1


def test_a_result_cached_by_address_shows_in_the_reused_buffers(tmp_path: Path) -> None:
    messages = [f.message for f in outcome_of("cached_by_address", tmp_path).findings]
    # The allocator may hand the same address to a later regime, which then shows it too.
    assert any(" in reused" in message for message in messages)


def test_the_outcome_is_the_same_when_judged_again_from_stored_samples(tmp_path: Path) -> None:
    pack = NormPack()
    check = first_cell(pack)
    samples = kernels.sample(check, context(pack, tmp_path))
    assert kernels.judge(check, Samples.from_json(samples.canonical())) == kernels.judge(check, samples)


def test_a_pass_whose_control_was_not_noticed_becomes_no_evidence(tmp_path: Path) -> None:
    pack = NormPack()
    check = first_cell(pack)
    samples = kernels.sample(check, context(pack, tmp_path))
    blind = samples.model_copy(update={"tables": tuple(_without_error(t) for t in samples.tables)})
    outcome = kernels.judge(check, blind)
    assert outcome.status is Status.NO_EVIDENCE
    assert "scaled out" in outcome.summary


def _without_error(table: SampleTable) -> SampleTable:
    """The control's errors as if the candidate had been exact."""
    if table.name != "control_errors":
        return table
    places = [table.columns.index(c) for c in ("optimised_l2", "optimised_worst")]
    rows = tuple(tuple(0.0 if i in places else v for i, v in enumerate(row)) for row in table.rows)
    return table.model_copy(update={"rows": rows})


def test_an_op_without_an_implementation_for_a_dispatched_architecture_fails(tmp_path: Path) -> None:
    pack = NormPack(implementations=("cute",))
    check = next(c for c in kernels.plan(request(pack)) if "missing" in c.id)
    outcome = kernels.run(check, context(pack, tmp_path))
    assert outcome.status is Status.FAIL
    assert outcome.summary == "norm has no cpu implementation"


def test_the_guard_passes_when_it_says_what_the_claim_says(tmp_path: Path) -> None:
    pack = NormPack()
    check = next(c for c in kernels.plan(request(pack)) if "guard" in c.id)
    outcome = kernels.run(check, context(pack, tmp_path))
    assert outcome.status is Status.PASS, outcome.summary


def test_a_guard_that_takes_batch_max_plus_one_fails(tmp_path: Path) -> None:
    pack = NormPack("takes_everything")
    check = next(c for c in kernels.plan(request(pack)) if "guard" in c.id)
    outcome = kernels.run(check, context(pack, tmp_path))
    assert outcome.status is Status.FAIL
    assert any(".b9." in f.message for f in outcome.findings)


def test_edge_cells_walk_every_axis_and_stay_inside_the_envelope() -> None:
    cells = edge_cells(ENVELOPE, "cpu", is_smoke=False)
    assert {c.batch for c in cells} == {1, 2, 4, 5, 8}
    assert {c.context for c in cells} >= {1, 63, 64, 65, 1024, 4096}
    assert {c.drafts for c in cells} == {0, 1}
    assert all(ENVELOPE.admits(c) for c in cells)


def test_edge_cells_but_for_a_smoke_run_have_the_largest_batch_at_every_number_of_ranks() -> None:
    envelope = ENVELOPE.model_copy(update={"tp": (1, 2, 4)})
    largest = {(c.tp, c.batch) for c in edge_cells(envelope, "cpu", is_smoke=False) if c.batch == 8}
    assert largest == {(1, 8), (2, 8), (4, 8)}


def test_outside_cells_step_over_each_edge_and_onto_compiled_architectures() -> None:
    labels = {c.label() for c in outside_cells(ENVELOPE, "cpu")}
    assert any(".b9." in label for label in labels)
    assert any(".c4097." in label for label in labels)
    assert any(".d2." in label for label in labels)
    assert any(label.startswith("sm_90a.") for label in labels)
    assert any(".b5." in label and ".d1." in label for label in labels)  # 5 x 2 rows are over 8


def _checks_on_a_gpu_claim(tier: Tier) -> Iterator[Check]:
    dispatched = (
        Architecture(arch="cpu", level="dispatched"),
        Architecture(arch="sm_90a", level="dispatched"),
    )
    claim = CLAIM.model_copy(update={"envelope": ENVELOPE.model_copy(update={"architectures": dispatched})})
    pack = NormPack(implementations=("cpu", "cute"))
    yield from (c for c in kernels.plan(request(pack, tier, claim)) if c.cell and c.cell.arch == "sm_90a")


def test_a_policy_of_the_smoke_tier_plans_nothing_for_a_gpu_that_is_not_here() -> None:
    assert not list(_checks_on_a_gpu_claim(Tier.SMOKE))


def test_a_policy_of_the_rank_tier_names_the_gpu_that_is_missing() -> None:
    checks = [c for c in _checks_on_a_gpu_claim(Tier.RANK) if c.parameter("model")]
    assert checks
    assert all(c.unavailable == "needs a machine with sm_90a; this one has cpu" for c in checks)
    assert all(c.tier is Tier.RANK for c in checks)


def test_seeds_follow_the_plans_seed_and_differ_between_checks() -> None:
    pack = NormPack()
    seeds = [c.parameter("seed") for c in kernels.plan(request(pack)) if c.parameter("model")]
    assert len(set(seeds)) == len(seeds)


def test_the_bound_is_factor_times_stock_plus_the_floor_and_never_above_the_cap() -> None:
    row = {"stock_l2": 0.01, "optimised_l2": 0.03, "stock_worst": 0.01, "optimised_worst": 0.0, "ulp": 0.005}
    row["least"] = 0.0
    assert bound_share(row, factor=2, floor_ulp=2, hard_cap=0.05) == pytest.approx(1.0)
    assert bound_share(row, factor=2, floor_ulp=0, hard_cap=0.05) == pytest.approx(1.5)
    assert bound_share({**row, "stock_l2": 1.0}, factor=2, floor_ulp=0, hard_cap=0.05) == pytest.approx(0.6)


def test_any_error_fails_where_stock_is_exact_and_no_floor_applies() -> None:
    row = {"stock_l2": 0.0, "optimised_l2": 1e-9, "stock_worst": 0.0, "optimised_worst": 0.0, "ulp": 0.0}
    row["least"] = 0.0
    assert bound_share(row, factor=2, floor_ulp=2, hard_cap=0.05) == float("inf")


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> tuple[Check, Samples]:
    pack = NormPack("honest")
    check = first_cell(pack)
    return check, kernels.sample(check, context(pack, tmp_path_factory.mktemp("honest")))


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> tuple[Check, Samples]:
    """An honest candidate in a step of four requests."""
    pack = NormPack("honest")
    base = first_cell(pack)
    assert base.cell is not None
    check = base.model_copy(update={"cell": base.cell.model_copy(update={"batch": 4, "drafts": 0})})
    return check, kernels.sample(check, context(pack, tmp_path_factory.mktemp("crowd")))


def test_samples_that_do_not_fit_are_invalid_and_never_a_crash(honest: tuple[Check, Samples]) -> None:
    check, samples = honest
    for done, bad in spoiled(samples, SHAPES):
        assert kernels.judge(check, bad).status is Status.INVALID, done


def test_guard_samples_that_do_not_fit_are_invalid(tmp_path: Path) -> None:
    pack = NormPack("honest")
    check = next(c for c in kernels.plan(request(pack)) if c.parameter("implementation") == "guard")
    for done, bad in spoiled(kernels.sample(check, context(pack, tmp_path)), GUARD_SHAPES):
        assert kernels.judge(check, bad).status is Status.INVALID, done


@pytest.mark.parametrize(
    ("table", "values", "words"),
    [
        ("errors", {"output": "out"}, "output out was not compared in gaussian, large, reused"),
        ("errors", {"output": "out", "regime": "large"}, "output out was not compared in large"),
        ("errors", {"output": "out", "token": 0}, "for other tokens than were spoiled"),
        ("exact", {"output": "copy", "regime": "reused"}, "output copy was not compared in reused"),
        ("errors", {"output": "total"}, "state total was compared in no regime"),
        ("repeats", {"output": "out"}, "out was not repeated"),
        ("launches", {"regime": "reused"}, "regime reused has no launch count"),
        ("operations", {"arm": "disguised"}, "operations of disguised are missing"),
        ("operations", {"arm": "optimised"}, "operations of optimised are missing"),
        ("control_errors", {"control": "zeroed"}, "output out was not spoiled: zeroed"),
        ("control_exact", {"output": "copy"}, "output copy was not spoiled: flipped"),
        ("repeats", {"output": "total"}, "total was not repeated"),
    ],
)
def test_rows_that_were_left_out_make_the_check_invalid(
    table: str, values: dict[str, Any], words: str, honest: tuple[Check, Samples]
) -> None:
    check, samples = honest
    outcome = kernels.judge(check, without_rows(samples, table, **values))
    assert outcome.status is Status.INVALID
    assert words in outcome.summary


@pytest.mark.parametrize(
    ("table", "values", "words"),
    [
        ("mates", {"output": "out"}, "output out has no row in table mates or mates_exact"),
        ("mates", {"token": 0}, "output out was compared for 2 tokens in regime mates, not 3"),
        ("mates_exact", {}, "output copy has no row in table mates or mates_exact"),
    ],
)
def test_each_output_is_compared_for_every_healthy_token_beside_a_poisoned_request(
    table: str, values: dict[str, Any], words: str, crowd: tuple[Check, Samples]
) -> None:
    check, samples = crowd
    assert kernels.judge(check, samples).status is Status.PASS
    outcome = kernels.judge(check, without_rows(samples, table, **values))
    assert outcome.status is Status.INVALID
    assert words in outcome.summary


def test_a_token_that_is_left_out_of_every_table_is_missed_all_the_same(
    crowd: tuple[Check, Samples],
) -> None:
    check, samples = crowd
    for table in ("errors", "control_errors"):
        samples = without_rows(samples, table, token=3, output="out")
    outcome = kernels.judge(check, samples)
    assert outcome.status is Status.INVALID
    assert "output out was compared for 3 tokens in regime gaussian, not 4" in outcome.summary


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("exact", "copy was compared over no element (table exact)"),
        ("mates_exact", "copy was compared over no element (table mates_exact)"),
        ("repeats", "was compared over no element (table repeats)"),
    ],
)
def test_a_comparison_over_no_element_is_none(table: str, words: str, crowd: tuple[Check, Samples]) -> None:
    check, samples = crowd
    rows = samples.table(table)
    assert rows is not None
    place = rows.columns.index("elements")
    emptied = tuple((*row[:place], 0, *row[place + 1 :]) for row in rows.rows)
    outcome = kernels.judge(check, with_rows(samples, table, emptied))
    assert outcome.status is Status.INVALID
    assert words in outcome.summary


def test_a_gpu_check_without_its_graph_replays_is_invalid(honest: tuple[Check, Samples]) -> None:
    check, samples = honest
    on_gpu = check.model_copy(update={"cell": check.cell.model_copy(update={"arch": "sm_90a"})})  # type: ignore[union-attr]
    outcome = kernels.judge(on_gpu, samples)
    assert outcome.status is Status.INVALID
    assert "regime graph0 has no launch count" in outcome.summary


def test_the_sampler_writes_the_tables_that_the_judge_asks_for() -> None:
    from harness.stages.kernels.sampling import COLUMNS

    assert {n: tuple(s.columns) for n, s in {**SHAPES, **GUARD_SHAPES}.items()} == COLUMNS


def test_underflow_is_no_error_whatever_stock_and_the_cap_say() -> None:
    row = {"stock_l2": 1.0, "optimised_l2": 1.0, "stock_worst": 1.0, "optimised_worst": 1.0, "ulp": 0.0}
    assert bound_share({**row, "least": 0.5}, factor=2, floor_ulp=2, hard_cap=0.05) == pytest.approx(1.0)
    assert bound_share({**row, "least": 0.25}, factor=2, floor_ulp=2, hard_cap=0.05) == pytest.approx(2.0)
