"""Whole layers: which cells are planned, how arms are chosen and timed, and what fails a cell."""

from dataclasses import replace
from pathlib import Path

import pytest

from harness.documents import load_claim
from harness.domain.check import Check, Samples, SampleTable, Status
from harness.domain.machine import Gpu, Tier
from harness.stages.sweep import judge, sample
from harness.stages.sweep.planning import plan
from harness.stages.sweep.tables import LAYER_SHAPES
from tests.fakes.pack import FakePack
from tests.fakes.played_device import played
from tests.fakes.played_layers import LayerPack
from tests.fakes.requests import MACHINE, plan_request, stage_context
from tests.stages.spoiled_tables import spoiled, with_rows, without_rows

H200 = MACHINE.model_copy(update={"gpus": (Gpu(name="NVIDIA H200", arch="sm_90a", memory_bytes=2**37),)})
BLOCKS = 40
QUIET = (1, 1980.0, 3201.0, 500.0, 60.0, "", 1, 0)


def layer_checks(*, is_full: bool = False, pack: FakePack | None = None) -> tuple[Check, ...]:
    request = replace(
        plan_request(pack or LayerPack()),
        machine=H200,
        claim=load_claim(Path("kernels/k3_decode/claim.yaml")),
        is_full=is_full,
    )
    return tuple(check for check in plan(request) if check.id.startswith("sweep/layer/"))


def one_check() -> Check:
    return next(c for c in layer_checks() if "kda_moe.sharded/" in c.id and ".b1." in c.id)


def layer_samples(check: Check, *, optimised_us: float = 40.0, error: float = 0.004) -> Samples:
    means = {"stock": 100.0, "optimised": optimised_us, "null": 100.0, "slow": 160.0}
    rows = tuple((arm, block, mean + block % 2) for block in range(BLOCKS) for arm, mean in means.items())
    counts = {"kernels": 9.0, "moved_bytes": 80e6, "read_gb_per_s": 4000.0}
    return Samples(
        check=check.id,
        tier=Tier.RANK,
        tables=(
            SampleTable(name="timings", columns=("arm", "block", "us"), rows=rows),
            SampleTable(
                name="steps",
                columns=("arm", "phase", "path", "tokens"),
                rows=(("optimised", "decode", "optimised", 1),),
            ),
            SampleTable(
                name="stock_arms",
                columns=("name", "us", "is_chosen"),
                rows=(("marlin", 100.0, True), ("humming", 110.0, False)),
            ),
            SampleTable(
                name="errors",
                columns=("arm", "layer", "token", "error"),
                rows=(("stock", 0, 0, 0.006), ("optimised", 0, 0, error)),
            ),
            SampleTable(
                name="counts",
                columns=("arm", "name", "value"),
                rows=tuple(
                    (arm, name, value) for arm in ("stock", "optimised") for name, value in counts.items()
                ),
            ),
            SampleTable(
                name="known",
                columns=("name", "known_us", "told_us"),
                rows=(("short", 5.0, 5.01), ("long", 250.0, 250.1)),
            ),
            SampleTable(
                name="flushed",
                columns=("arm", "number", "us"),
                rows=(("stock", 0, 101.0), ("optimised", 0, optimised_us + 1.0), ("known", 0, 5.5)),
            ),
            SampleTable(name="gpu", columns=tuple(LAYER_SHAPES["gpu"].columns), rows=(QUIET,)),
        ),
    )


def test_a_gpu_is_asked_for_both_kinds_and_layouts_and_a_cpu_for_none() -> None:
    kinds = {check.id.split("/")[2] for check in layer_checks()}
    assert kinds == {"kda_moe.sharded", "kda_moe.whole", "mla_moe.sharded", "mla_moe.whole"}
    assert not [c for c in plan(plan_request(LayerPack())) if c.id.startswith("sweep/layer/")]


def test_a_pack_without_layers_is_asked_for_none() -> None:
    assert layer_checks(pack=FakePack()) == ()


def test_kda_layers_are_timed_at_one_context_and_mla_layers_at_all() -> None:
    contexts = {
        kind: {c.cell.context for c in layer_checks(is_full=True) if c.cell and f"/{kind}.whole/" in c.id}
        for kind in ("kda_moe", "mla_moe")
    }
    assert contexts == {"kda_moe": {1024}, "mla_moe": {1024, 32768, 131072}}


def test_the_claims_promise_for_a_kind_binds_its_sharded_cell_alone() -> None:
    promises = {
        c.id.split("/")[2]: c.parameter("promise") for c in layer_checks() if ".tp8.dcp1.b1.c1024." in c.id
    }
    assert promises["kda_moe.sharded"] is not None
    assert promises["kda_moe.whole"] is None


def test_a_faster_layer_passes_and_tells_kernels_bytes_and_errors() -> None:
    check = one_check()
    outcome = judge(check, layer_samples(check))
    assert outcome.status is Status.PASS
    assert "stock by marlin" in outcome.summary
    figures = {figure.name: figure.value for figure in outcome.figures}
    assert figures["optimised_kernels"] == 9.0
    assert figures["optimised_worst_error"] == 0.004
    assert figures["optimised_roofline"] == pytest.approx(80e6 / 40.5 / 1e3 / 4000.0)
    assert "verify_steps_per_s" not in figures


def test_a_token_further_from_the_oracle_than_stock_allows_fails_a_fast_layer() -> None:
    """Allowed: 2 x 0.006 + 0.002."""
    check = one_check()
    assert judge(check, layer_samples(check, error=0.0139)).status is Status.PASS
    outcome = judge(check, layer_samples(check, error=0.0141))
    assert outcome.status is Status.FAIL
    assert "layer 0 token 0: 1.41e-02 (stock 6.00e-03)" in outcome.summary


def test_a_token_that_stock_did_not_compute_fails() -> None:
    check = one_check()
    outcome = judge(check, without_rows(layer_samples(check), "errors", arm="stock"))
    assert outcome.status is Status.FAIL
    assert "stock has none" in outcome.summary


def test_a_layer_faster_than_memory_fails() -> None:
    """80 MB in 15.5 us are 5.2 TB/s, where 4.0 were read beside it."""
    check = one_check()
    outcome = judge(check, layer_samples(check, optimised_us=15.0))
    assert outcome.status is Status.FAIL
    assert "faster than memory" in outcome.summary


def test_samples_of_layers_that_do_not_fit_are_invalid_and_never_a_crash() -> None:
    check = one_check()
    for done, bad in spoiled(layer_samples(check), LAYER_SHAPES):
        assert judge(check, bad).status is Status.INVALID, done


def test_layers_are_timed_in_every_planned_block_however_narrow_the_interval_is() -> None:
    check = one_check()
    samples = layer_samples(check)
    kept = tuple(row for row in samples.tables[0].rows if isinstance(row[1], int) and row[1] < 8)
    outcome = judge(check, with_rows(samples, "timings", kept))
    assert outcome.status is Status.INVALID
    assert "8 blocks were timed and the plan asks for 40" in outcome.summary


def test_a_table_of_errors_without_rows_is_invalid() -> None:
    check = one_check()
    assert judge(check, with_rows(layer_samples(check), "errors", ())).status is Status.INVALID


def test_the_fastest_of_stocks_ways_is_what_the_layer_is_compared_with(tmp_path: Path) -> None:
    with played() as device:
        pack = LayerPack(device)
        check = one_check()
        taken = sample(check, stage_context(pack, tmp_path))
    tables = {t.name: t.columns for t in taken.tables}
    assert tables == {name: tuple(shape.columns) for name, shape in LAYER_SHAPES.items()}
    assert pack.asked[0] == "kda_moe sharded tp8 b1"
    assert pack.asked[-1] == "closed"
    outcome = judge(check, taken)
    assert outcome.status is Status.PASS
    assert outcome.summary.startswith("stock 90 us, optimised 40 us: 2.25x [2.25, 2.25]")
    assert "stock by humming" in outcome.summary


def test_layers_whose_weights_stay_in_the_cache_are_invalid(tmp_path: Path) -> None:
    """By formula each of eight layers reads 40 MB of its own; in truth all of them read the same."""
    with played() as device:
        pack = LayerPack(device, is_warm=True)
        check = one_check()
        outcome = judge(check, sample(check, stage_context(pack, tmp_path)))
    assert outcome.status is Status.INVALID
    assert "a pass of stock takes 6." in outcome.summary
    assert "its data stayed in the cache" in outcome.summary


def test_an_arm_that_does_less_in_a_row_than_alone_is_invalid() -> None:
    """In a row it takes 40 us, alone 49, as one that leaves out what it did before."""
    check = layer_checks()[0]
    rows = (("stock", 0, 101.0), ("optimised", 0, 49.0), ("known", 0, 5.5))
    outcome = judge(check, with_rows(layer_samples(check), "flushed", rows))
    assert outcome.status is Status.INVALID
    assert "the quickest pass of optimised alone takes 1.20x of one in a row" in outcome.summary


def test_layers_without_a_read_rate_are_invalid() -> None:
    check = layer_checks()[0]
    samples = layer_samples(check)
    counts = samples.table("counts")
    assert counts is not None
    kept = tuple(row for row in counts.rows if row[1] != "read_gb_per_s")
    outcome = judge(check, with_rows(samples, "counts", kept))
    assert outcome.status is Status.INVALID
    assert "no read rate was measured" in outcome.summary


@pytest.mark.parametrize(
    ("single_us", "is_warm"),
    [
        pytest.param(101.0, False, id="4 us more of the pass"),
        pytest.param(102.0, True, id="12 us: 50 MiB take 13 us at 4,000 GB/s"),
        pytest.param(108.0, False, id="60 us: no cache saves that, and single passes scatter"),
    ],
)
def test_a_pass_is_warm_where_a_flush_costs_what_a_cache_can_save(single_us: float, is_warm: bool) -> None:
    check = layer_checks()[0]
    assert check.parameter("layers") == 8
    rows = (("stock", 0, single_us), ("optimised", 0, 61.0), ("known", 0, 5.5))
    outcome = judge(check, with_rows(layer_samples(check), "flushed", rows))
    assert ("stayed in the cache" in outcome.summary) is is_warm


def test_layers_that_nobody_timed_behind_a_flush_are_invalid() -> None:
    check = one_check()
    outcome = judge(check, with_rows(layer_samples(check), "flushed", ()))
    assert outcome.status is Status.INVALID
    assert "no pass was timed behind a flush" in outcome.summary


@pytest.mark.parametrize(
    ("reading", "words"),
    [
        ((3, 1300.0, 3201.0, 500.0, 91.0, "power cap, hardware thermal slowdown", 1, 0),
         "the card was slowed down meanwhile: hardware thermal slowdown"),
        ((3, 1980.0, 3201.0, 500.0, 60.0, "", 2, 0), "2 processes were on the card at once"),
        ((3, 1980.0, 3201.0, 500.0, 60.0, "", 1, 4), "4 uncorrected memory errors came up meanwhile"),
    ],
)  # fmt: skip
def test_a_card_that_was_disturbed_makes_its_cell_invalid(reading: tuple[object, ...], words: str) -> None:
    check = one_check()
    outcome = judge(check, with_rows(layer_samples(check), "gpu", (QUIET, reading)))  # type: ignore[arg-type]
    assert outcome.status is Status.INVALID
    assert words in outcome.summary


def test_a_card_at_its_limit_of_power_is_as_it_was_bought() -> None:
    check = one_check()
    capped = (3, 1900.0, 3201.0, 700.0, 60.0, "power cap", 1, 0)
    outcome = judge(check, with_rows(layer_samples(check), "gpu", (QUIET, capped)))
    assert outcome.status is Status.PASS
