"""The time line of one layer: lanes by stream, gaps in words, and foreign rows left out."""

from harness.domain.check import Check, Outcome, Samples, SampleTable, StageName, Status
from harness.domain.machine import Tier
from harness.report.panels.material import Material
from harness.report.panels.timeline import timeline_panels
from harness.report.view import Panel
from tests.evidence.example_run import example_plan

COLUMNS = ("arm", "number", "name", "op", "stream", "start_us", "duration_us")
CHECK = Check(
    id="coverage/layer/kda_moe.tp8.b1", stage=StageName.COVERAGE, proves="it ran", cost_s=1,
    parameters=(("layer_kind", "kda_moe"),),
)  # fmt: skip
OUTCOME = Outcome(check=CHECK.id, status=Status.FAIL, tier=Tier.RANK, summary="seen", next_step="look")
ON = (
    ("on", 0, "kernel_a", "attn_res", 7, 0.0, 10.0),
    ("on", 1, "kernel_b", "experts", 7, 5.0, 10.0),
    ("on", 2, "kernel_c", "", 9, 20.0, 5.0),
)
OFF = (("off", 0, "gemm<&>", "", 7, 0.0, 50.0),)


def timeline_panels_of(*rows: tuple[object, ...]) -> tuple[Panel, ...]:
    table = SampleTable.model_validate({"name": "spans", "columns": COLUMNS, "rows": rows})
    samples = Samples(check=CHECK.id, tier=Tier.RANK, tables=(table,))
    material = Material(example_plan(), ((CHECK, OUTCOME),), lambda _: samples)
    return timeline_panels(material, [(CHECK, OUTCOME)])


def test_both_arms_are_drawn_with_their_kernels_and_gaps_in_words() -> None:
    picture, counts = timeline_panels_of(*ON, *OFF)
    assert picture.note.startswith(
        "optimised: 3 kernels in 25 us, 20% of it gaps; stock: 1 kernels in 50 us, 0% of it gaps."
    )
    svg = str(picture.svg)
    assert svg.count("<rect") == 4
    assert svg.count("stream 7</text>") == 2
    assert svg.count("stream 9</text>") == 1
    assert "gemm&lt;&amp;&gt;" in svg
    assert counts.table is not None
    assert [[cell.text for cell in row] for row in counts.table.rows] == [
        ["optimised", "attn_res", "1", "10"],
        ["optimised", "experts", "1", "10"],
        ["optimised", "kernel_c", "1", "5"],
        ["stock", "gemm<&>", "1", "50"],
    ]


def test_a_layer_of_one_arm_alone_is_not_drawn() -> None:
    assert timeline_panels_of(*ON) == ()


def test_rows_that_do_not_fit_are_left_out() -> None:
    picture, _ = timeline_panels_of(
        *ON, *OFF, ("on", 3, "x", "", "7", 1.0, 1.0), ("on", 4, "x", "", 7, None, 1.0)
    )
    assert picture.note.startswith("optimised: 3 kernels")
