"""A bundle whose every free text tries to act on its reader."""

from pathlib import Path

from harness.domain.bundle import Environment
from harness.domain.check import (
    Check,
    Control,
    Figure,
    Finding,
    Outcome,
    Samples,
    SampleTable,
    Severity,
    Status,
)
from harness.domain.plan import Plan
from harness.evidence.bundle import write_bundle
from harness.evidence.run_folder import open_run
from tests.evidence.example_run import example_machine, example_plan

__all__ = ["ACTIVE", "write_hostile"]

ACTIVE = (
    "<script>boom()</script>",
    '"><img src=x onerror=boom()>',
    "javascript:boom()",
    "</style><style>*{display:none}",
    "{{ 7*7 }}{% raw %}",
    "`@team` @alice #1 [x](javascript:boom) ![i](http://evil/i.png)",
    "| a | b |\n| - | - |\n\n# Admitted\n<!-- fasttrack:report -->",
    "=cmd|' /C calc'!A0",
    "\u202egnp.exe \x1b[2J \u2066hidden\u2069",
    "```\n</details><details open>",
)
TEXT = " ".join(ACTIVE)


def write_hostile(folder: Path) -> Path:
    """A finished bundle with `TEXT` in every field that takes any text."""
    plan = _plan()
    with open_run(folder, plan) as run:
        for check in plan.checks:
            table = SampleTable(name="texts", columns=("text",), rows=((TEXT,),))
            samples = Samples(
                check=check.id, tier=plan.tier, tables=(table,), detail=TEXT, findings=(_finding(),)
            )
            run.record(_outcome(check, plan), samples)
        return write_bundle(run, Environment(command=(TEXT,), variables=(("OMP_NUM_THREADS", TEXT),)))


def _plan() -> Plan:
    made = example_plan()
    machine = example_machine().model_copy(
        update={
            "cpu_model": TEXT,
            "platform": TEXT,
            "driver": TEXT,
            "libraries": ((TEXT, TEXT),),
            "python": TEXT,
        }
    )
    change = made.change.model_copy(
        update={
            "repository": f"https://github.com/x/{TEXT}",
            "files": tuple(f.model_copy(update={"path": TEXT}) for f in made.change.files),
        }
    )
    checks = tuple(
        c.model_copy(update={"proves": TEXT, "subject": TEXT, "unavailable": None}) for c in made.checks
    )
    return made.model_copy(
        update={"machine": machine, "change": change, "checks": checks, "harness_version": TEXT, "pack": TEXT}
    )


def _finding() -> Finding:
    return Finding(
        rule=TEXT, severity=Severity.ERROR, message=TEXT, path=TEXT, line=1, excerpt=TEXT[:400], remedy=TEXT,
        waived=TEXT,
    )  # fmt: skip


def _outcome(check: Check, plan: Plan) -> Outcome:
    return Outcome(
        check=check.id,
        status=Status.FAIL,
        tier=plan.tier,
        summary=TEXT,
        next_step=TEXT,
        control=Control(kind="poison", description=TEXT, failed=True, observed=TEXT),
        figures=(
            Figure(name="ratio", value=0.5, low=0.4, high=0.6, note=TEXT),
            Figure(name=TEXT, value=None, missing=TEXT),
            Figure(name="declined_steps", value=1, note=TEXT),
            Figure(name="verify_steps_per_s", value=3, note=TEXT),
        ),
        findings=(_finding(),),
    )
