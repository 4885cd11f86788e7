"""A pack's exchanges on GPUs: planned for what is there, sampled through the pack's program, judged with its
planted fault.
"""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from harness.domain.check import Check, Outcome, Status
from harness.domain.collective_model import CollectiveTrial
from harness.domain.machine import Gpu, Tier
from harness.stages import kernels
from tests.stages.kernels.example_pack import NormPack
from tests.stages.kernels.test_kernels import context, request

GOOD = '{"trial": "epochs", "wrong_words": 0, "fault": "", "note": "x"}'
PLANTED = '{"trial": "wrong_epoch", "wrong_words": 0, "is_control": true, "fault": "'
SEEN = PLANTED + 'rank 0: nothing from rank 1"}'
UNSEEN = PLANTED + '"}'


class TrialPack(NormPack):
    """A pack whose program writes given lines."""

    def __init__(self, lines: str, status: int = 0) -> None:
        super().__init__()
        self._program = f"import sys; open(sys.argv[1], 'w').write({lines!r}); sys.exit({status})"

    def collective_trials(self) -> tuple[CollectiveTrial, ...]:
        """Two and four ranks on one GPU."""
        return (
            CollectiveTrial(
                "exchange", (2, 4), lambda *a: (sys.executable, "-c", self._program, str(a[2])), "mailboxes"
            ),
        )


def _checks(
    pack: TrialPack, gpus: int, wanted: Tier = Tier.SMOKE, collectives: tuple[str, ...] = ()
) -> tuple[Check, ...]:
    asked = request(pack)
    proofs = tuple(proof.model_copy(update={"tier": wanted}) for proof in asked.policy.proofs)
    policy = asked.policy.model_copy(update={"proofs": proofs})
    card = Gpu(name="NVIDIA H200", arch="sm_90a", memory_bytes=1)
    machine = asked.machine.model_copy(update={"gpus": (card,) * gpus})
    envelope = asked.claim.envelope
    hopper = envelope.architectures[0].model_copy(update={"arch": "sm_90a"})
    changes = {"architectures": (hopper,), "tp": (1, 2), "collectives": collectives}
    wide = envelope.model_copy(update=changes)
    claim = asked.claim.model_copy(update={"envelope": wide})
    planned = kernels.plan(replace(asked, pack=pack, machine=machine, claim=claim, policy=policy))
    return tuple(check for check in planned if "/collective/" in check.id)


def _outcome(lines: str, folder: Path, status: int = 0) -> Outcome:
    pack = TrialPack(lines, status)
    return kernels.run(_checks(pack, 1)[0], replace(context(pack, folder), pack=pack))


def test_played_ranks_need_one_gpu_and_real_ranks_as_many_as_the_claim_divides_over() -> None:
    checks = {check.id: check for check in _checks(TrialPack(GOOD), 2)}
    played, two = checks["kernels/exchange/collective/played4"], checks["kernels/exchange/collective/ranks2"]
    assert (played.tier, played.unavailable) == (Tier.RANK, None)
    assert (two.tier, two.unavailable) == (Tier.NODE, None)
    assert not any(check.is_required for check in checks.values())
    one = {check.id: check for check in _checks(TrialPack(GOOD), 1, Tier.NODE)}
    words = "needs 2 GPUs (sm_90a) of one NVLink domain; this machine has 1"
    assert one["kernels/exchange/collective/ranks2"].unavailable == words


def test_a_claim_that_names_the_trials_way_to_meet_needs_it_on_real_ranks() -> None:
    checks = _checks(TrialPack(GOOD), 2, collectives=("in_process", "mailboxes"))
    assert [check.id for check in checks if check.is_required] == ["kernels/exchange/collective/ranks2"]


def test_what_neither_this_machine_can_run_nor_the_policy_wants_is_not_planned() -> None:
    assert [check.id for check in _checks(TrialPack(GOOD), 0)] == []


def test_right_bits_and_a_planted_fault_that_shows_pass(tmp_path: Path) -> None:
    outcome = _outcome(f"{GOOD}\n{SEEN}\n", tmp_path)
    assert outcome.status is Status.PASS, outcome.summary
    assert outcome.control is not None
    assert outcome.control.observed == "rank 0: nothing from rank 1"


def test_a_planted_fault_that_does_not_show_is_no_evidence(tmp_path: Path) -> None:
    assert _outcome(f"{GOOD}\n{UNSEEN}\n", tmp_path).status is Status.NO_EVIDENCE


@pytest.mark.parametrize(
    ("lines", "status", "words"),
    [
        (f"{GOOD.replace(': 0', ': 3')}\n{SEEN}", 1, "epochs: 3 wrong words"),
        ("", 0, "program: ended with 0; it wrote no results"),
        (f"{GOOD}\n{SEEN}", 9, "program: ended with 9;"),
    ],
)
def test_wrong_words_a_silent_program_and_a_crash_fail(
    lines: str, status: int, words: str, tmp_path: Path
) -> None:
    outcome = _outcome(lines, tmp_path, status)
    assert outcome.status is Status.FAIL
    assert words in outcome.findings[0].message
