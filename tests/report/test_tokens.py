"""Tokens by path: read from the ledger's rows, whatever else lies in the samples."""

from harness.domain.cell import Cell
from harness.domain.cell_tokens import CellNeed, needs_text
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


def test_a_cell_of_the_envelope_without_evidence_says_that_it_is_empty() -> None:
    cell = _envelope(Status.NO_EVIDENCE)[1]
    assert (cell.text, cell.tone) == ("empty", "NO_EVIDENCE")
    assert _envelope(Status.FAIL)[1].text == "FAIL"


CELLS = ("arm", "phase", "path", "requests", "context", "drafts", "tokens")


def test_an_eval_fills_the_cells_that_its_steps_fell_in_and_says_which_demanded_one_it_did_not() -> None:
    need = CellNeed(batch_min=9, batch_max=64, context=1024, min_tokens=16)
    check = EVAL.model_copy(
        update={"cell": Cell(batch=8, context=1024), "parameters": (("cells", needs_text([need])),)}
    )
    rows = (
        ("optimised", "decode", "optimised", 5, 512, 0, 30),
        ("optimised", "decode", "stock", 8, 64, 0, 10),
        ("optimised", "decode", "optimised", 2, 2048, 0, 7),
        ("optimised", "decode", "optimised", 65, 2048, 0, 3),
        ("stock", "decode", "stock", 2, 2048, 0, 99),
        ("optimised", "decode", "optimised", 2, "long", 0, 7),
    )
    cells = SampleTable.model_validate({"name": "cells", "columns": CELLS, "rows": rows})
    steps = SampleTable.model_validate({"name": "steps", "columns": COLUMNS, "rows": ROWS[1:2]})
    samples = Samples(check=check.id, tier=Tier.SMOKE, tables=(steps, cells))
    plan = example_plan().model_copy(update={"checks": (check,)})
    table = coverage.panels(Material(plan, (), lambda _: samples))[2].table
    assert table is not None
    assert [column.title for column in table.columns] == ["cell", "2", "8", "64", "above"]
    assert [[(cell.text, cell.tone) for cell in row] for row in table.rows] == [
        [
            ("eval drift: decode, context below 1k", ""),
            ("-", "none"), ("30", "heat-7"), ("-", "none"), ("-", "none"),
        ],
        [
            ("eval drift: decode, context 1k to 8k", ""),
            ("7", "heat-9"), ("-", "none"), ("0 of 16", "NO_EVIDENCE"), ("3", "heat-9"),
        ],
    ]  # fmt: skip


def test_path_shares_are_told_for_each_eval_with_the_reasons_of_what_was_declined() -> None:
    rows = tuple(("optimised", *row[1:]) for row in ROWS[:4])
    plan = example_plan().model_copy(update={"checks": (EVAL,)})
    panel = coverage.panels(Material(plan, (), lambda _: _samples(EVAL, rows)))[0]
    assert panel.table is not None
    assert [(cell.text, cell.tone) for cell in panel.table.rows[0]] == [
        ("eval drift", ""), ("75.0%", "warn"), ("30 of 40", ""), ("switch_off (10)", ""),
    ]  # fmt: skip


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
