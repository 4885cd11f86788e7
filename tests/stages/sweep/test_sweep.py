"""Sweeps: interleaved times, an interval, a noise floor, and a planted slow-down that must be noticed."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.domain.check import Check, Samples, SampleTable, StageName, Status, Threshold
from harness.domain.errors import InputError
from harness.domain.machine import Tier
from harness.domain.policy import CellDemand, Proof
from harness.executors.marks import Marks
from harness.stages.sweep import judge, planning, run, sample
from harness.stages.sweep.planning import load_sweep, plan, sweep_cells
from harness.stages.sweep.stopping import time_blocks
from harness.stages.sweep.tables import SHAPES
from tests.fakes.pack import FakePack, Faults
from tests.fakes.requests import POLICY, plan_request, planned, stage_context
from tests.stages.spoiled_tables import spoiled, with_rows, without_rows

SWEEP = StageName.SWEEP
BLOCKS = 40


def _check(**thresholds: float) -> Check:
    check = planned(SWEEP, ".b1.c64.")
    values = tuple(t.model_copy(update={"value": thresholds.get(t.name, t.value)}) for t in check.thresholds)
    return check.model_copy(update={"thresholds": values})


def _samples(check: Check, optimised_us: float, null_us: float = 100.0, share: int = 41) -> Samples:
    """As many blocks as planned, with one microsecond of spread, stock at 100 us, the planted arm at 160."""
    means = {"stock": 100.0, "optimised": optimised_us, "null": null_us, "slow": 160.0}
    rows = tuple((arm, block, mean + block % 2) for block in range(BLOCKS) for arm, mean in means.items())
    return Samples(
        check=check.id, tier=Tier.SMOKE,
        tables=(
            SampleTable(name="timings", columns=("arm", "block", "us"), rows=rows),
            SampleTable(name="steps", columns=("arm", "phase", "path", "tokens"), rows=_steps(rows, share)),
            *_likeness(rows),
        ),
    )  # fmt: skip


def _steps(
    rows: tuple[tuple[str, int, float], ...], share: int | None = None
) -> tuple[tuple[str, str, str, int], ...]:
    """One token a timed step and one of warming up, three more of the planted arm, and one prefill; `share`
    of the optimised arm's on its path.
    """
    units = Counter(arm for arm, _, _ in rows)
    asked = {arm: count + (4 if arm == "slow" else 1) for arm, count in units.items()}
    taken = asked["optimised"] if share is None else share
    return (
        *((arm, "decode", "stock", count) for arm, count in asked.items() if arm != "optimised"),
        ("optimised", "decode", "optimised", taken),
        ("optimised", "decode", "stock", asked["optimised"] - taken),
        *((arm, "prefill", "stock", 63) for arm in asked),
    )


def _likeness(rows: tuple[tuple[str, int, float], ...]) -> tuple[SampleTable, ...]:
    """The clock outside says what the worker's says, no prompt was found again, and two experts were read."""
    prefixes = (*((arm, 0, 0, 0) for arm in ("stock", "optimised", "null", "slow")), ("control", 2, 1, 128))
    experts = tuple((arm, 8, expert, 1) for arm in ("stock", "optimised") for expert in (2, 5))
    return (
        SampleTable(
            name="outside", columns=("name", "us"), rows=tuple((f"{a}.{b}", us) for a, b, us in rows)
        ),
        SampleTable(name="prefixes", columns=("arm", "queries", "hits", "reused_tokens"), rows=prefixes),
        SampleTable(name="experts", columns=("arm", "experts", "expert", "rows"), rows=experts),
        SampleTable(
            name="known",
            columns=("name", "known_us", "told_us"),
            rows=(("short", 1000.0, 1001.0), ("long", 4000.0, 4001.0)),
        ),
    )


def test_cells_come_from_the_envelopes_edges() -> None:
    request = plan_request()
    sweep = load_sweep(Path("sweeps/decode_step.yaml"))
    cells = [(cell.batch, cell.context) for cell in sweep_cells(sweep, request.claim.envelope, "cpu", False)]
    assert cells == [(1, 64), (8, 64), (64, 64), (1, 512), (8, 512)]
    assert len(plan(request)) == 5


def test_verify_steps_are_timed_in_full_runs_alone_over_drafts_and_types_that_the_envelope_has() -> None:
    request = plan_request()
    sweep = load_sweep(Path("sweeps/verify_step.yaml"))
    assert sweep_cells(sweep, request.claim.envelope, "cpu", False) == ()
    cells = sweep_cells(sweep, request.claim.envelope, "cpu", True)
    assert {(c.phase, c.drafts, c.kv_dtype) for c in cells} == {("verify", 1, "bf16"), ("verify", 3, "bf16")}


def test_a_sweep_of_drafts_that_are_not_verified_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    text = Path("sweeps/verify_step.yaml").read_text().replace("phase: verify", "phase: decode")
    path.write_text(text)
    with pytest.raises(InputError, match="no sweep can be read here"):
        load_sweep(path)


def test_verify_steps_come_before_tokens_and_tokens_say_whose_acceptance_they_are() -> None:
    check = _verify_check()
    outcome = judge(check, _verified(check))
    figures = {figure.name: figure for figure in outcome.figures}
    assert outcome.status is Status.PASS
    assert figures["verify_steps_per_s"].value == pytest.approx(1e6 / 50.5)
    assert figures["tokens_per_s"].value == pytest.approx(2.87 * 1e6 / 50.5)
    assert figures["tokens_per_s"].note == "golden acceptance: 2.87 tokens a step; none was measured"
    names = [figure.name for figure in outcome.figures]
    assert names.index("verify_steps_per_s") < names.index("tokens_per_s")


def test_tokens_of_drafts_without_an_acceptance_are_missing_and_say_why() -> None:
    check = _verify_check()
    bare = check.model_copy(
        update={"parameters": tuple((k, None if k == "golden" else v) for k, v in check.parameters)}
    )
    (tokens,) = [f for f in judge(bare, _verified(bare)).figures if f.name == "tokens_per_s"]
    assert (tokens.value, tokens.missing) == (None, "no acceptance is known, and none was measured")


def _verify_check() -> Check:
    """One request with three drafts."""
    check = _check()
    assert check.cell is not None
    cell = check.cell.model_copy(update={"drafts": 3, "phase": "verify"})
    return check.model_copy(update={"cell": cell, "parameters": (*check.parameters, ("golden", 2.87))})


def _verified(check: Check) -> Samples:
    """Four rows a step."""
    samples = _samples(check, 50.0)
    rows = tuple(
        (arm, "verify" if phase == "decode" else phase, path, tokens * (4 if phase == "decode" else 1))
        for arm, phase, path, tokens in _steps(samples.tables[0].rows)  # type: ignore[arg-type]
    )
    return with_rows(samples, "steps", rows)


def test_real_verify_steps_are_timed_and_counted(tmp_path: Path) -> None:
    pack = FakePack()
    (check,) = [
        c
        for c in plan(replace(plan_request(pack), is_full=True))
        if c.subject == "verify_step" and ".b1.c64.d3." in c.id
    ]
    outcome = run(check, stage_context(pack, tmp_path))
    assert outcome.status is not Status.INVALID, outcome.summary


def test_a_faster_path_passes_with_its_ratio_interval_and_noise() -> None:
    check = _check()
    outcome = judge(check, _samples(check, 50.0))
    assert outcome.status is Status.PASS
    figures = {figure.name: figure for figure in outcome.figures}
    assert figures["ratio"].value == pytest.approx(1.99, abs=0.01)
    assert figures["ratio"].low is not None
    assert figures["verify_steps_per_s"].value == pytest.approx(1e6 / 50.5)


def test_a_slower_path_fails() -> None:
    check = _check()
    assert judge(check, _samples(check, 130.0)).status is Status.FAIL


def test_a_noisy_machine_is_inconclusive_whatever_the_gain() -> None:
    check = _check()
    outcome = judge(check, _samples(check, 50.0, null_us=160.0))
    assert outcome.status is Status.INCONCLUSIVE
    assert "too noisy" in outcome.summary


def test_times_of_the_standard_path_are_no_evidence() -> None:
    check = _check()
    assert judge(check, _samples(check, 50.0, share=0)).status is Status.NO_EVIDENCE


def test_a_pass_whose_planted_slow_down_went_unnoticed_becomes_no_evidence() -> None:
    check = _check(min_ratio=0.5)
    assert judge(check, _samples(check, 50.0)).status is Status.NO_EVIDENCE


def test_a_promised_ratio_is_what_the_cell_must_reach() -> None:
    check = _check()
    parameters = tuple((k, 3.0 if k == "promise" else v) for k, v in check.parameters)
    promised = check.model_copy(update={"parameters": parameters})
    assert judge(promised, _samples(promised, 50.0)).status is Status.FAIL


def test_a_plan_of_too_few_blocks_is_inconclusive() -> None:
    check = _check(blocks=2)
    outcome = judge(check, _first_blocks(_samples(check, 50.0), 2))
    assert outcome.status is Status.INCONCLUSIVE
    assert "four pairs at least" in outcome.summary


def _first_blocks(samples: Samples, count: int) -> Samples:
    return _with_times(samples, tuple(r for r in samples.tables[0].rows if int(r[1] or 0) < count))


def _with_times(samples: Samples, rows: tuple[Any, ...]) -> Samples:
    """Other times, and the work that they stand for."""
    return with_rows(with_rows(samples, "timings", rows), "steps", _steps(rows))


@pytest.mark.parametrize(
    ("count", "width", "words"),
    [
        (4, 1.0, "4 blocks were timed and the plan asks for 40, and the interval is not narrow yet"),
        (12, 1e-9, "12 blocks were timed and the plan asks for 40, and the interval is not narrow yet"),
        (12, 1.0, "12 blocks were timed and the plan asks for 40; its own rule stops after 8"),
        (9, 1.0, "9 blocks were timed and the plan asks for 40; its own rule stops after 8"),
    ],
)
def test_blocks_that_no_run_by_the_rule_ends_with_are_invalid(count: int, width: float, words: str) -> None:
    check = _check(interval_width=width)
    outcome = judge(check, _first_blocks(_samples(check, 50.0), count))
    assert outcome.status is Status.INVALID
    assert words in outcome.summary


def test_a_run_that_stops_when_its_interval_is_narrow_counts_and_more_blocks_than_planned_do_not() -> None:
    check = _check(interval_width=1.0)
    assert judge(check, _first_blocks(_samples(check, 50.0), 8)).status is Status.PASS
    planned_ten = _check(blocks=10, interval_width=1e-9)
    assert judge(planned_ten, _first_blocks(_samples(check, 50.0), 10)).status is Status.PASS
    outcome = judge(planned_ten, _first_blocks(_samples(check, 50.0), 12))
    assert "12 blocks were timed and the plan asks for 10" in outcome.summary


def test_a_cell_may_end_after_the_block_in_which_its_time_is_spent_and_not_elsewhere() -> None:
    """A block takes 100 + 50 + 100 + 160 us, and every second 4 us more: ten take 4.12 ms."""
    check = _check(interval_width=1e-9, time_s=0.0041)
    assert judge(check, _first_blocks(_samples(check, 50.0), 10)).status is Status.PASS
    outcome = judge(check, _first_blocks(_samples(check, 50.0), 12))
    assert "12 blocks were timed and the plan asks for 40; its own rule stops after 10" in outcome.summary


@pytest.mark.parametrize(("blocks", "status"), [(4, Status.PASS), (6, Status.INVALID)])
def test_the_planted_arm_may_leave_once_it_shows_and_not_later(blocks: int, status: Status) -> None:
    check = _check()
    samples = _samples(check, 50.0)
    kept = tuple(row for row in samples.tables[0].rows if row[0] != "slow" or int(row[1] or 0) < blocks)
    outcome = judge(check, _with_times(samples, kept))
    assert outcome.status is status
    assert outcome.status is Status.PASS or "planted arm was timed in 6 of 40 blocks" in outcome.summary


def test_a_planted_arm_that_does_not_show_may_not_leave() -> None:
    check = _check()
    samples = _samples(check, 50.0)
    kept = tuple(
        (arm, block, 100.0 if arm == "slow" else us)
        for arm, block, us in samples.tables[0].rows
        if arm != "slow" or int(block or 0) < 4
    )
    assert judge(check, with_rows(samples, "timings", kept)).status is Status.INVALID


def test_real_arms_are_timed_until_the_rule_ends_and_the_planted_one_until_it_shows() -> None:
    check = _check(interval_width=0.5, planted_slowdown=1.0)
    asked: list[str] = []
    means = {"stock": 100.0, "optimised": 50.0, "null": 100.0, "slow": 200.0}

    def unit(arm: str) -> Callable[[], float]:
        def run() -> float:
            asked.append(arm)
            return means[arm] + len(asked) % 3

        return run

    rows = time_blocks(check, {arm: unit(arm) for arm in means})
    assert asked[:8] == ["stock", "optimised", "null", "slow", "stock", "optimised", "null", "slow"]
    assert asked[8:12] == ["slow", "null", "optimised", "stock"]
    assert Counter(arm for arm, _, _ in rows) == {"stock": 8, "optimised": 8, "null": 8, "slow": 4}


def test_real_timing_of_a_path_with_extra_work_does_not_pass(tmp_path: Path) -> None:
    pack = FakePack(Faults(spin=60))
    outcome = run(planned(SWEEP, ".b1.c64.", pack), stage_context(pack, tmp_path))
    assert outcome.status in (Status.FAIL, Status.INCONCLUSIVE)


def test_a_sweep_file_with_an_unknown_key_is_told_in_words(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("schema_version: 1\nname: x\nbatches: [1]\n")
    with pytest.raises(InputError, match=r"bad\.yaml: no sweep can be read here"):
        load_sweep(path)


def test_samples_that_do_not_fit_are_invalid_and_never_a_crash() -> None:
    check = _check()
    for done, bad in spoiled(_samples(check, 50.0), SHAPES):
        assert judge(check, bad).status is Status.INVALID, done


@pytest.mark.parametrize("arm", ["stock", "optimised", "null", "slow"])
def test_an_arm_that_leaves_out_a_block_is_not_paired(arm: str) -> None:
    check = _check()
    outcome = judge(check, without_rows(_samples(check, 50.0), "timings", arm=arm, block=5))
    assert outcome.status is Status.INVALID
    assert "was not timed in blocks 0 to 3" in outcome.summary


def test_a_timer_that_misses_a_known_duration_makes_the_cell_invalid() -> None:
    check = _check()
    rows = (("short", 1000.0, 1001.0), ("long", 4000.0, 2000.0))
    outcome = judge(check, with_rows(_samples(check, 50.0), "known", rows))
    assert outcome.status is Status.INVALID
    assert "the timer makes 2000 us of 4000 us of work (long)" in outcome.summary


def test_a_timer_that_nobody_asked_makes_the_cell_invalid() -> None:
    check = _check()
    outcome = judge(check, with_rows(_samples(check, 50.0), "known", ()))
    assert outcome.status is Status.INVALID
    assert "was not asked for a known duration" in outcome.summary


def test_a_plan_from_before_timers_were_asked_is_judged_without_their_word() -> None:
    check = _check()
    older = check.model_copy(
        update={"thresholds": tuple(t for t in check.thresholds if t.name != "timer_tolerance")}
    )
    samples = with_rows(_samples(check, 50.0), "known", ())
    assert judge(older, samples).status is Status.PASS


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (("null", "decode", "stock", 40), "arm null decoded 40 tokens, and its timed steps ask for 41"),
        (("null", "prefill", "stock", 64), "arm null prefilled 64 tokens of 63: set-up is in what was timed"),
    ],
)
def test_an_arm_that_did_other_work_than_was_asked_is_invalid(row: tuple[Any, ...], words: str) -> None:
    check = _check()
    samples = _samples(check, 50.0)
    table = samples.table("steps")
    assert table is not None
    rows = tuple(row if old[:3] == row[:3] else old for old in table.rows)
    outcome = judge(check, with_rows(samples, "steps", rows))
    assert outcome.status is Status.INVALID
    assert words in outcome.summary


def test_stock_that_moves_more_than_the_gain_is_inconclusive() -> None:
    """All arms slow down alike from 1 to 2.5 times: stock by 75 % from half to half, the gain is 25 %."""
    check = _check()
    samples = _samples(check, 80.0)
    drifting = tuple(
        (arm, block, float(us or 0.0) * (1 + 1.5 * int(block or 0) / BLOCKS))
        for arm, block, us in samples.tables[0].rows
    )
    outside = tuple((f"{arm}.{block}", us) for arm, block, us in drifting)
    outcome = judge(check, with_rows(with_rows(samples, "timings", drifting), "outside", outside))
    assert outcome.status is Status.INCONCLUSIVE
    assert "stock itself moved by +5" in outcome.summary


def test_arms_are_paired_by_block_in_whatever_order_the_rows_come() -> None:
    check = _check()
    samples = _samples(check, 50.0)
    mixed = with_rows(samples, "timings", tuple(reversed(samples.tables[0].rows)))
    assert judge(check, mixed) == judge(check, samples)


def test_the_sampler_writes_the_tables_that_the_judge_asks_for(tmp_path: Path) -> None:
    pack = FakePack()
    marks = Marks()
    context = replace(stage_context(pack, tmp_path), mark=marks.add)
    taken = marks.attach(sample(planned(SWEEP, ".b1.c64.", pack), context))
    assert {t.name: t.columns for t in taken.tables} == {n: tuple(s.columns) for n, s in SHAPES.items()}


def test_a_cell_that_the_policy_demands_is_timed_beside_the_sweeps_own() -> None:
    demand = CellDemand(batch=(3,), context=(40,), drafts=(0, 1), min_tokens=20)
    policy = POLICY.model_copy(update={"proofs": (Proof(stage=SWEEP, cells=(demand,)),)})
    free = {check.id for check in plan(plan_request())}
    demanded = {check.id: check for check in plan(plan_request(policy=policy))}
    assert sorted(demanded.keys() - free) == [
        "sweep/decode_step/cpu.tp1.dcp1.b3.c40.d0.bf16.decode",
        "sweep/verify_step/cpu.tp1.dcp1.b3.c40.d1.bf16.verify",
    ]
    assert {demanded[name].number("min_tokens") for name in demanded.keys() - free} == {20}


@pytest.mark.parametrize(
    ("subjects", "own"), [(("layer",), 0), (("layer", "verify_step"), 0), (("layer", "decode_step"), 5)]
)
def test_a_demanded_cell_is_timed_once_whatever_sweeps_the_policy_wants(
    subjects: tuple[str, ...], own: int
) -> None:
    demand = CellDemand(batch=(3,), context=(40,), drafts=(0, 1), min_tokens=20)
    proof = Proof(stage=SWEEP, subjects=subjects, cells=(demand, demand))
    checks = plan(plan_request(policy=POLICY.model_copy(update={"proofs": (proof,)})))
    assert [check.id for check in checks if ".b3.c40." in check.id] == [
        "sweep/decode_step/cpu.tp1.dcp1.b3.c40.d0.bf16.decode",
        "sweep/verify_step/cpu.tp1.dcp1.b3.c40.d1.bf16.verify",
    ]
    assert len(checks) == own + 2


def test_a_demanded_cell_that_two_sweeps_could_time_is_the_wanted_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = load_sweep(Path("sweeps/decode_step.yaml"))
    known = {"decode_step": first, "other": first.model_copy(update={"name": "other"})}
    monkeypatch.setattr(planning, "all_sweeps", lambda: known)
    demand = CellDemand(batch=(3,), context=(40,))
    for subjects, home in (((), "decode_step"), (("other",), "other")):
        proof = Proof(stage=SWEEP, subjects=subjects, cells=(demand,))
        checks = plan(plan_request(policy=POLICY.model_copy(update={"proofs": (proof,)})))
        assert [c.subject for c in checks if ".b3.c40." in c.id] == [home]


def test_a_demand_that_no_sweep_can_time_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    rest = {name: sweep for name, sweep in planning.all_sweeps().items() if name != "verify_step"}
    monkeypatch.setattr(planning, "all_sweeps", lambda: rest)
    proof = Proof(stage=SWEEP, cells=(CellDemand(batch=(3,), context=(40,), drafts=(1,)),))
    with pytest.raises(InputError, match=r"a step in cpu\.tp1.*verify, and no sweep times steps of verify"):
        plan(plan_request(policy=POLICY.model_copy(update={"proofs": (proof,)})))


def test_a_wanted_sweep_that_there_is_not_is_refused_in_words() -> None:
    proof = Proof(stage=SWEEP, subjects=("decode_steps",))
    with pytest.raises(InputError, match="asks for sweep decode_steps, and there are attend, decode_step"):
        plan(plan_request(policy=POLICY.model_copy(update={"proofs": (proof,)})))


def test_a_demanded_cell_with_too_few_tokens_of_the_path_is_no_evidence() -> None:
    check = _check()
    least = Threshold(name="min_tokens", value=42)
    asked = check.model_copy(update={"thresholds": (*check.thresholds, least)})
    assert judge(check, _samples(check, 50.0)).status is Status.PASS
    outcome = judge(asked, _samples(check, 50.0))
    assert (outcome.status, outcome.summary) == (
        Status.NO_EVIDENCE,
        "the optimised path decoded 41 tokens, fewer than the 42 that this cell must hold",
    )


def test_ranks_that_no_small_model_can_be_divided_over_are_said_to_be_missing() -> None:
    request = plan_request(FakePack(ranks=(1, 2)))
    envelope = request.claim.envelope.model_copy(update={"tp": (1, 2, 4), "dcp": (1, 2)})
    wide = replace(request, claim=request.claim.model_copy(update={"envelope": envelope}))
    demand = CellDemand(batch=(3,), context=(40,), tp=(2, 4), dcp=(1, 2))
    policy = POLICY.model_copy(update={"proofs": (Proof(stage=SWEEP, cells=(demand,)),)})
    found = {
        c.id.split("/")[-1]: c.unavailable for c in plan(replace(wide, policy=policy)) if ".b3.c40" in c.id
    }
    undivided = "a context divided over 2 ranks needs an engine that divides it"
    assert found == {
        "cpu.tp2.dcp1.b3.c40.d0.bf16.decode": None,
        "cpu.tp2.dcp2.b3.c40.d0.bf16.decode": undivided,
        "cpu.tp4.dcp1.b3.c40.d0.bf16.decode": (
            "the pack has no small model that 4 ranks of one process can share"
        ),
        "cpu.tp4.dcp2.b3.c40.d0.bf16.decode": undivided,
    }
