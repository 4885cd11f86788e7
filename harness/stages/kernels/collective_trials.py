"""A pack's own collectives on GPUs: the pack's program runs them, this one counts what went wrong.

On one GPU local slots play the ranks (tier rank), on several each rank is a GPU (tier node). Table `trials`
(trial, wrong_words, fault, is_control): what the program wrote of each trial. The control is a trial with a
fault planted, such as a rank that counts another epoch, which must show. Required on as many GPUs as the
claim divides a model over, where the claim names the trial's way for ranks to meet.
"""

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

from pydantic import Field

from harness.domain.cell import Arch, Cell
from harness.domain.check import (
    Check,
    Control,
    Figure,
    Finding,
    Outcome,
    Samples,
    SampleTable,
    Severity,
    StageName,
    Status,
    judged,
)
from harness.domain.collective_model import CollectiveTrial
from harness.domain.machine import Tier
from harness.domain.pack import Pack
from harness.domain.record import Record, Whole
from harness.domain.stage import PlanRequest, StageContext
from harness.domain.table_shape import COUNT, FLAG, TEXT, TableShape, misshapen, optional, unusable

__all__ = ["judge_trials", "plan_trials", "sample_trials"]

IMPLEMENTATION = "collective"
COST_S = 40.0
LIMIT_S = 300.0
SHAPES = {
    "trials": TableShape(
        {"trial": TEXT, "wrong_words": COUNT, "fault": optional(TEXT), "is_control": FLAG},
        key=("trial",), is_required=True,
    )
}  # fmt: skip
NEXT_STEPS = {
    Status.FAIL: "run the pack's program by hand with one trial's shapes; a fault names rank, epoch and word",
    Status.NO_EVIDENCE: "see why the planted fault did not show: without it silence proves nothing",
}


class _Line(Record):
    """What the program wrote of one trial."""

    model_config = Record.model_config | {"extra": "ignore"}

    trial: str = Field(max_length=100)
    wrong_words: Whole
    fault: str = Field(max_length=600)
    is_control: bool = False


def plan_trials(request: PlanRequest) -> tuple[Check, ...]:
    """Played ranks on one GPU, and every number of real ranks that the claim divides a model over: what this
    machine can run, and what the policy wants from others.
    """
    envelope = request.claim.envelope
    arch = next((a.arch for a in envelope.architectures if a.level == "dispatched" and a.arch != "cpu"), None)
    trials = _trials_of(request.pack)
    if arch is None or not trials:
        return ()
    wanted = max((proof.tier.strength for proof in request.policy.proofs), default=Tier.SMOKE.strength)
    here, gpus = request.machine.arch, sum(gpu.arch == arch for gpu in request.machine.gpus)
    checks = []
    for trial in trials:
        for ranks in trial.played:
            words = None if here == arch else f"needs a machine with {arch}; this one has {here}"
            if words is None or wanted >= Tier.RANK.strength:
                checks.append(_check(trial, arch, ranks, True, words, is_required=False))
        for ranks in (tp for tp in envelope.tp if tp > 1):
            words = (
                None
                if gpus >= ranks
                else f"needs {ranks} GPUs ({arch}) of one NVLink domain; this machine has {gpus}"
            )
            if words is None or wanted >= Tier.NODE.strength:
                is_claimed = trial.collective in envelope.collectives
                checks.append(_check(trial, arch, ranks, False, words, is_required=is_claimed))
    return tuple(checks)


def sample_trials(check: Check, context: StageContext) -> Samples:
    """Run the pack's program and keep what it wrote."""
    trial = next(t for t in _trials_of(context.pack) if t.name == check.subject)
    ranks, is_played = int(str(check.parameter("ranks"))), check.parameter("is_played") is True
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="trials-") as folder:
        results = Path(folder) / "trials.jsonl"
        command = trial.command(ranks, is_played, results)
        try:
            ended = subprocess.run(
                command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=dict(os.environ)
            )
        except subprocess.TimeoutExpired:
            rows: tuple[tuple[str, int, str | None, bool], ...] = (
                ("program", 1, f"did not end within {LIMIT_S:g} s", False),
            )
        else:
            rows = _rows(results, ended)
    table = SampleTable(name="trials", columns=("trial", "wrong_words", "fault", "is_control"), rows=rows)
    return Samples(check=check.id, tier=context.tier, tables=(table,), duration_s=time.monotonic() - begun)


def judge_trials(check: Check, samples: Samples) -> Outcome:
    """A wrong word or a missing one fails; a planted fault that does not show proves nothing. Pure."""
    if unfit := misshapen(samples, SHAPES):
        return unusable(check, samples, unfit)
    table = samples.table("trials")
    rows = table.records() if table else ()
    planted = [row for row in rows if row["is_control"]]
    seen = [row for row in planted if row["wrong_words"] or row["fault"]]
    observed = str(seen[0]["fault"] or f"{seen[0]['wrong_words']} wrong words") if seen else "nothing"
    control = Control(
        kind="planted", description="a rank that counts another epoch than its peers",
        failed=bool(planted) and len(seen) == len(planted), observed=observed[:500],
    )  # fmt: skip
    sound = [row for row in rows if not row["is_control"]]
    figures = (Figure(name="trials", value=len(sound)),)
    wrong = [row for row in sound if row["wrong_words"] or row["fault"]]
    if wrong:
        said = [
            f"{row['trial']}: {row['fault'] or str(row['wrong_words']) + ' wrong words'}" for row in wrong
        ]
        findings = tuple(
            Finding(rule="exchange_is_wrong", severity=Severity.ERROR, message=words[:900]) for words in said
        )
        return judged(
            check, samples, Status.FAIL, "; ".join(said)[:600], NEXT_STEPS, control, figures, findings
        )
    words = f"every result of {len(sound)} trials is the rank-ordered sum, bit for bit"
    return judged(check, samples, Status.PASS, words, NEXT_STEPS, control, figures)


def _check(
    trial: CollectiveTrial, arch: Arch, ranks: int, is_played: bool, unavailable: str | None, *,
    is_required: bool,
) -> Check:  # fmt: skip
    how = "played by slots of one GPU" if is_played else "on a GPU each"
    return Check(
        id=f"kernels/{trial.name}/collective/{'played' if is_played else 'ranks'}{ranks}",
        stage=StageName.KERNELS,
        proves=f"{trial.name} gives {ranks} ranks, {how}, the same right bits under skew and in replays.",
        subject=trial.name,
        cell=Cell(arch=arch, tp=ranks),
        tier=Tier.RANK if is_played else Tier.NODE,
        parameters=(
            ("model", None), ("implementation", IMPLEMENTATION), ("regimes", ""), ("seed", 0),
            ("ranks", ranks), ("is_played", is_played),
        ),
        cost_s=COST_S,
        is_required=is_required,
        unavailable=unavailable,
    )  # fmt: skip


def _trials_of(pack: Pack) -> tuple[CollectiveTrial, ...]:
    offer = getattr(pack, "collective_trials", None)
    return () if offer is None else tuple(offer())


def _rows(
    results: Path, ended: "subprocess.CompletedProcess[str]"
) -> tuple[tuple[str, int, str | None, bool], ...]:
    try:
        lines = [_Line.model_validate(json.loads(line)) for line in results.read_text().splitlines()]
    except (OSError, ValueError) as error:
        lines, broken = [], f"{type(error).__name__}: {error}"
    else:
        broken = "" if lines else "it wrote no results"
    if broken or ended.returncode not in (0, 1):
        words = f"ended with {ended.returncode}; {broken} {ended.stderr.strip()[-300:]}"
        return (("program", 1, words.strip()[:600], False),)
    return tuple((line.trial, line.wrong_words, line.fault or None, line.is_control) for line in lines)
