"""A pack's own collective, as a model: planned, explored and judged with its planted fault as control."""

from dataclasses import replace
from pathlib import Path

from harness.domain.check import Outcome, Status
from harness.domain.collective_model import CollectiveModel
from harness.stages import kernels
from tests.faults.collective_pack import _CollectivePack, lamport_rank
from tests.stages.kernels.example_pack import NormPack
from tests.stages.kernels.test_kernels import context, request

START = {f"buffer{rank}.{stage}": None for rank in (0, 1) for stage in range(3)}


def _outcome(clears: int, planted: int, folder: Path) -> Outcome:
    ranks, wrong = ((lamport_rank(0, n), lamport_rank(1, n)) for n in (clears, planted))
    pack = _CollectivePack(folder, CollectiveModel("lamport", START, ranks, wrong))
    (check,) = kernels.plan(replace(request(NormPack()), pack=pack))
    assert check.id == "kernels/lamport/collective/every_order"
    return kernels.run(check, replace(context(NormPack(), folder), pack=pack))


def test_clearing_two_epochs_ahead_passes_as_clearing_one_ahead_was_noticed(tmp_path: Path) -> None:
    outcome = _outcome(2, 1, tmp_path)
    assert outcome.status is Status.PASS, outcome.summary
    assert outcome.control is not None
    assert "deadlock" in outcome.control.observed


def test_clearing_one_epoch_ahead_loses_a_faster_peers_data(tmp_path: Path) -> None:
    outcome = _outcome(1, 1, tmp_path)
    assert outcome.status is Status.FAIL
    assert outcome.findings[0].rule == "wrong_in_some_order"


def test_a_planted_fault_that_no_order_shows_is_no_control(tmp_path: Path) -> None:
    assert _outcome(2, 2, tmp_path).status is Status.NO_EVIDENCE


def test_a_pack_without_collectives_of_its_own_plans_none() -> None:
    assert not [c for c in kernels.plan(request(NormPack())) if "collective" in c.id]
