"""Tokens by path: read from the ledger's rows, whatever else lies in the samples."""

from harness.domain.check import Check, Control, Outcome, Samples, SampleTable, StageName, Status
from harness.domain.errors import EvidenceError
from harness.domain.machine import Tier
from harness.report.panels import coverage, evals
from harness.report.panels.material import Material
from harness.report.panels.tokens import Flow, tokens_by_path
from harness.report.view import CellView
from tests.evidence.example_run import example_plan

COLUMNS = ("arm", "phase", "path", "reason", "tokens")
ROWS = (
    ("on", "prefill", "stock", "phase_not_claimed", 900),
    ("on", "decode", "optimised", "taken", 30),
    ("on", "decode", "stock", "switch_off", 5),
    ("on", "decode", "stock", "switch_off", 5),
    ("off", "decode", "stock", "switch_off", 40),
)
PATH = next(c for c in example_plan().checks if c.id.startswith("coverage/path/"))
EVAL = Check(id="evals/drift/nano", stage=StageName.EVALS, proves="it holds", subject="drift", cost_s=1)


def test_generated_tokens_of_one_arm_are_added_up_by_path_and_reason() -> None:
    assert tokens_by_path(_material(PATH, _samples(PATH, ROWS)), PATH, "on") == (
        Flow("decode", "optimised", "taken", 30),
        Flow("decode", "stock", "switch_off", 10),
    )


def test_rows_that_do_not_fit_and_samples_that_cannot_be_read_count_as_none() -> None:
    forged = (("on", "decode", "optimised", "taken", "many"), ("on", "decode", "optimised", "taken", -4))
    assert tokens_by_path(_material(PATH, _samples(PATH, forged)), PATH, "on") == ()
    other = SampleTable(name="steps", columns=("step",), rows=((1,),))
    assert tokens_by_path(_material(PATH, _samples(PATH, (), other)), PATH, "on") == ()
    assert tokens_by_path(_material(PATH, None), PATH, "on") == ()

    def broken(check: str) -> Samples | None:
        raise EvidenceError("no readable sample table")

    assert tokens_by_path(Material(example_plan(), (), broken), PATH, "on") == ()


def test_a_cell_of_the_envelope_shows_its_optimised_tokens_and_how_large_a_share_they_are() -> None:
    cell = _envelope(Status.PASS)[1]
    assert (cell.text, cell.tone) == ("30", "heat-7")
    assert cell.link == "#check-coverage-path-cpu.tp1.dcp1.b1.c64.d0.bf16.decode"


def test_a_cell_of_the_envelope_that_did_not_pass_shows_its_status() -> None:
    cell = _envelope(Status.NO_EVIDENCE)[1]
    assert (cell.text, cell.tone) == ("NO_EVIDENCE", "NO_EVIDENCE")


def test_an_eval_shows_which_path_its_tokens_took() -> None:
    rows = tuple(("optimised", *row[1:]) for row in ROWS[:4])
    panels = evals.panels(_material(EVAL, _samples(EVAL, rows), Status.FAIL))
    panel = next(p for p in panels if p.title == "Tokens by path")
    assert panel.table is not None
    assert [[cell.text for cell in row] for row in panel.table.rows] == [
        ["drift", "decode", "optimised", "taken", "30", "75.0%"],
        ["drift", "decode", "stock", "switch_off", "10", "25.0%"],
    ]


def _envelope(status: Status) -> tuple[CellView, ...]:
    panels = coverage.panels(_material(PATH, _samples(PATH, ROWS), status))
    panel = next(p for p in panels if p.title.startswith("Where in the envelope"))
    assert panel.table is not None
    return panel.table.rows[0]


def _material(check: Check, samples: Samples | None, status: Status = Status.FAIL) -> Material:
    passed = status is Status.PASS
    control = Control(kind="switch_off", description="off", failed=True, observed="nothing")
    outcome = Outcome(
        check=check.id, status=status, tier=Tier.SMOKE, summary="seen", next_step="" if passed else "look",
        control=control,
    )  # fmt: skip
    return Material(example_plan(), ((check, outcome),), lambda _: samples)


def _samples(check: Check, rows: tuple[tuple[object, ...], ...], table: SampleTable | None = None) -> Samples:
    steps = table or SampleTable.model_validate({"name": "steps", "columns": COLUMNS, "rows": rows})
    return Samples(check=check.id, tier=Tier.SMOKE, tables=(steps,))
