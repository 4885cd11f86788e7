"""The audit from plan to outcome, on a kernel that was compiled beforehand."""

from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest

from harness.domain.check import Check, Outcome, Samples, SampleTable, StageName, Status
from harness.domain.claim import Architecture, Claim, Envelope, Range, Switch
from harness.domain.machine import Tier
from harness.domain.pack import KernelVariant
from harness.domain.policy import Policy, Proof, Waiver
from harness.domain.stage import PlanRequest, StageContext
from harness.stages import audit
from harness.stages.audit import artifacts, planning
from harness.stages.audit.tables import SHAPES
from tests.fakes.requests import CHANGE, MACHINE, ZONES
from tests.stages.audit.example_pack import CopyPack
from tests.stages.spoiled_tables import spoiled


def claim(*architectures: str) -> Claim:
    named = tuple(Architecture.model_validate({"arch": a, "level": "compiled"}) for a in architectures)
    envelope = Envelope(
        architectures=(Architecture(arch="cpu", level="dispatched"), *named),
        tp=(1,),
        dcp=(1,),
        batch=Range(min=1, max=1),
        batch_buckets=(1,),
        context=Range(min=1, max=64),
        drafts=Range(min=0, max=0),
        kv_dtypes=("bf16",),
        phases=("decode",),
        max_rows_per_step=1,
    )
    return Claim(
        name="copies",
        pack="copies",
        summary="one kernel",
        envelope=envelope,
        features=(),
        state=(),
        files=("**",),
        switch=Switch(name="backend", on="fast", off="auto", default="auto"),
    )


def request(pack: CopyPack, *architectures: str, waivers: tuple[Waiver, ...] = ()) -> PlanRequest:
    policy = Policy(
        name="test", summary="audit", zone_map="test", proofs=(Proof(stage=StageName.AUDIT),), waivers=waivers
    )
    return PlanRequest(
        pack=pack,
        claim=claim(*(architectures or ("sm_90a",))),
        policy=policy,
        zones=ZONES,
        rules=(),
        change=CHANGE,
        machine=MACHINE,
        tier=Tier.SMOKE,
        is_full=False,
        seed=7,
    )


def context(pack: CopyPack, folder: Path) -> StageContext:
    made = request(pack)
    for name in ("cache", "logs"):
        (folder / name).mkdir(exist_ok=True)
    return StageContext(
        pack=pack,
        claim=made.claim,
        policy=made.policy,
        zones=ZONES,
        rules=(),
        change=CHANGE,
        machine=MACHINE,
        tier=Tier.SMOKE,
        tree=None,
        cache=folder / "cache",
        logs=folder / "logs",
        ledger=folder,
        progress=lambda _: None,
    )


@pytest.fixture(autouse=True)
def _compiler_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "compiler_missing", lambda: None)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "copies"
    folder.mkdir()
    return folder


def outcome_of(pack: CopyPack, folder: Path) -> Outcome:
    (check,) = audit.plan(request(pack))
    return audit.run(check, context(pack, folder))


def test_a_kernel_that_loads_after_its_wait_passes_and_its_own_mutants_are_caught(
    root: Path, tmp_path: Path
) -> None:
    outcome = outcome_of(CopyPack(root), tmp_path)
    assert outcome.status is Status.PASS, outcome.summary
    assert outcome.control is not None
    assert "4 own mutants" in outcome.control.observed
    figures = {f.name: f.value for f in outcome.figures}
    assert figures["spill_bytes"] == 0
    assert figures["load16_share"] == 1
    assert figures["accesses"] == 4  # a load and a store, in PTX and in SASS
    assert figures["unclassed_accesses"] == 0


def test_a_kernel_that_loads_before_its_wait_fails_at_both_levels(root: Path, tmp_path: Path) -> None:
    outcome = outcome_of(CopyPack(root, "fault"), tmp_path)
    assert outcome.status is Status.FAIL
    assert [f.rule for f in outcome.findings] == ["load_before_wait", "load_before_wait"]
    assert outcome.findings[0].message.startswith("ptx ld.global.v4.b32 reads x (activation)")
    assert outcome.findings[1].message.startswith("sass LDG.E.128 reads x (activation)")


def test_a_weight_may_be_loaded_before_the_wait(root: Path, tmp_path: Path) -> None:
    pack = CopyPack(root, "fault", parameters=(("x", "weight"), ("out", "output")))
    assert outcome_of(pack, tmp_path).status is Status.PASS


def test_parameters_that_do_not_match_the_kernels_are_inconclusive_and_never_a_pass(
    root: Path, tmp_path: Path
) -> None:
    outcome = outcome_of(CopyPack(root, parameters=(("x", "activation"),)), tmp_path)
    assert outcome.status is Status.INCONCLUSIVE
    assert outcome.summary.startswith("declared parameters do not match the kernel's")


def test_more_registers_than_the_committed_expectation_fails(root: Path, tmp_path: Path) -> None:
    outcome = outcome_of(CopyPack(root, expected=(("max_registers", 2),)), tmp_path)
    assert outcome.status is Status.FAIL
    assert [(f.rule, f.path) for f in outcome.findings] == [("registers", "kernels/copies/cute/copy.py")]


def test_a_variant_that_does_not_compile_fails_with_the_compilers_words(root: Path, tmp_path: Path) -> None:
    outcome = outcome_of(CopyPack(root, name="hoisted_load_broken"), tmp_path)
    assert outcome.status is Status.FAIL
    assert "ValueError: no such layout" in outcome.summary


def test_an_op_without_a_variant_for_a_claimed_architecture_fails(root: Path, tmp_path: Path) -> None:
    pack = CopyPack(root)
    check = next(c for c in audit.plan(request(pack, "sm_90a", "sm_103a")) if c.id == "audit/copy/sm_103a")
    outcome = audit.run(check, context(pack, tmp_path))
    assert outcome.status is Status.FAIL
    assert outcome.summary == "op copy has no kernel variant for sm_103a, which the claim names"


def test_without_the_compiler_checks_are_planned_as_unavailable_with_the_command_that_installs_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "compiler_missing", lambda: "not installed; install it with: pip install x")
    (check,) = audit.plan(request(CopyPack(root)))
    assert check.unavailable == "not installed; install it with: pip install x"


def test_an_unchanged_kernel_is_not_compiled_again_and_a_changed_import_compiles_it(
    root: Path, tmp_path: Path
) -> None:
    pack = CopyPack(root)
    log = tmp_path / "cache" / "audit" / "compiled.txt"
    outcome_of(pack, tmp_path)
    outcome_of(pack, tmp_path)
    assert log.read_text().splitlines() == ["hoisted_load_fixed"]
    (root / "shapes.py").write_text("WIDTH = 256\n")
    outcome_of(pack, tmp_path)
    assert len(log.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    "words",
    [
        "from . import helper", "from .helper import y", "from .. import shapes",
        "from ..shapes import WIDTH",
        "from copies.cute import helper", "import copies.shapes",
    ],
)  # fmt: skip
def test_a_kernel_is_compiled_again_where_a_module_changed_that_it_imports_by_any_form(
    words: str, root: Path, tmp_path: Path
) -> None:
    pack = CopyPack(root)
    (root / "cute" / "copy.py").write_text(words + "\n")
    (root / "cute" / "helper.py").write_text("y = 1\n")
    (variant,) = pack.variants()
    before = artifacts._source_digests(pack, variant)
    changed = "shapes.py" if "shapes" in words else "cute/helper.py"
    (root / changed).write_text("y = WIDTH = 23\n")
    after = artifacts._source_digests(pack, variant)
    assert {name for name in after if after[name] != before.get(name)} == {changed}


def test_an_import_from_above_the_packages_folder_is_none_of_the_packs(root: Path) -> None:
    pack = CopyPack(root)
    (root / "cute" / "copy.py").write_text("from .... import os\nfrom ... import sys\n")
    assert set(artifacts._source_digests(pack, pack.variants()[0])) == {"cute/copy.py"}


class TwoOps(CopyPack):
    """The kernel as a variant of two ops; the second one is called `other`."""

    other = "hoisted_load_fault"

    def variants(self) -> tuple[KernelVariant, ...]:
        (own,) = super().variants()
        return own, own.model_copy(update={"op": "store", "name": self.other})


def test_the_first_check_compiles_for_all_audits_of_the_plan_and_for_no_other(
    root: Path, tmp_path: Path
) -> None:
    pack = TwoOps(root)
    first, second = audit.plan(replace(request(pack), is_full=True))
    audit.sample(first, replace(context(pack, tmp_path), checks=(first,)))
    log = tmp_path / "cache" / "audit" / "compiled.txt"
    assert log.read_text().split() == ["hoisted_load_fixed"]
    (root / "shapes.py").write_text("WIDTH = 256\n")
    audit.sample(first, replace(context(pack, tmp_path), checks=(first, second)))
    assert log.read_text().split() == ["hoisted_load_fixed", "hoisted_load_fixed", "hoisted_load_fault"]
    audit.sample(second, context(pack, tmp_path))
    assert len(log.read_text().split()) == 3


def test_compiling_for_others_and_waiting_for_them_is_no_part_of_a_check_s_own_time(
    root: Path, tmp_path: Path
) -> None:
    pack, said = CopyPack(root), list[str]()
    (check,) = audit.plan(request(pack))
    made = replace(context(pack, tmp_path), mark=said.append, progress=said.append)
    audit.sample(check, made)
    assert (said[0], said[-1]) == ("begin shared", "end shared")
    assert "compiling kernels: 0 of 1" in said
    said.clear()
    audit.sample(check, made)
    assert said == []


class BrokenOther(TwoOps):
    """Two kernels, of which the second does not compile."""

    other = "hoisted_load_broken"


def test_of_kernels_that_do_not_compile_each_is_tried_once_for_the_plan_and_once_for_its_check(
    root: Path, tmp_path: Path
) -> None:
    pack = BrokenOther(root)
    first, second = audit.plan(replace(request(pack), is_full=True))
    made = replace(context(pack, tmp_path), checks=(first, second))
    log = tmp_path / "cache" / "audit" / "compiled.txt"
    for _ in range(2):
        assert audit.run(first, made).status is Status.PASS
        assert log.read_text().split() == ["hoisted_load_fixed", "hoisted_load_broken"]
    assert audit.run(second, made).status is Status.FAIL
    assert log.read_text().split() == ["hoisted_load_fixed", "hoisted_load_broken", "hoisted_load_broken"]


def test_the_outcome_is_the_same_when_judged_again_from_stored_samples(root: Path, tmp_path: Path) -> None:
    pack = CopyPack(root, "fault")
    (check,) = audit.plan(request(pack))
    samples = audit.sample(check, context(pack, tmp_path))
    assert audit.judge(check, Samples.from_json(samples.canonical())) == audit.judge(check, samples)


def test_samples_hold_no_path_of_this_machine(root: Path, tmp_path: Path) -> None:
    pack = CopyPack(root)
    (check,) = audit.plan(request(pack))
    assert str(tmp_path) not in audit.sample(check, context(pack, tmp_path)).model_dump_json()


def test_a_pass_whose_planted_fault_was_not_caught_becomes_no_evidence(root: Path, tmp_path: Path) -> None:
    pack = CopyPack(root)
    (check,) = audit.plan(request(pack))
    samples = audit.sample(check, context(pack, tmp_path))
    blind = samples.model_copy(update={"tables": tuple(_blinded(t) for t in samples.tables)})
    outcome = audit.judge(check, blind)
    assert outcome.status is Status.NO_EVIDENCE
    assert "early_bulk_copy.fault: expected load_before_wait, said clean" in outcome.summary


def _blinded(table: SampleTable) -> SampleTable:
    """The control table as a tracer that sees nothing would leave it."""
    if table.name != "control":
        return table
    rows = tuple((*row[:3], "clean", row[2] == "clean") for row in table.rows)
    return table.model_copy(update={"rows": rows})


def test_samples_of_a_sibling_variant_do_not_answer_for_this_one(root: Path, tmp_path: Path) -> None:
    (check,) = audit.plan(request(CopyPack(root, "fault")))
    (sibling,) = audit.plan(request(CopyPack(root)))
    good = audit.sample(sibling, context(CopyPack(root), tmp_path))
    assert audit.judge(sibling, good).status is Status.PASS
    outcome = audit.judge(check, good.model_copy(update={"check": check.id}))
    assert outcome.status is Status.INVALID
    assert "read from variant hoisted_load_fixed, not hoisted_load_fault" in outcome.summary


def test_machine_code_for_another_architecture_than_the_one_asked_for_fails(
    root: Path, tmp_path: Path
) -> None:
    pack = CopyPack(root, architectures=("sm_90a", "sm_103a"))
    checks = {c.id: c for c in audit.plan(request(pack, "sm_90a", "sm_103a"))}
    made = audit.sample(checks["audit/hoisted_load_fixed/sm_90a"], context(pack, tmp_path))
    other = checks["audit/hoisted_load_fixed/sm_103a"]
    outcome = audit.judge(other, made.model_copy(update={"check": other.id}))
    assert outcome.status is Status.FAIL
    assert outcome.summary == "the machine code is for sm_90a, not for sm_103a"


def test_samples_without_sass_are_no_evidence(root: Path, tmp_path: Path) -> None:
    pack = CopyPack(root)
    (check,) = audit.plan(request(pack))
    samples = audit.sample(check, context(pack, tmp_path))
    half = tuple(
        t.model_copy(update={"rows": tuple(r for r in t.rows if "sass" not in r)})
        if t.name == "programs"
        else t
        for t in samples.tables
    )
    assert audit.judge(check, samples.model_copy(update={"tables": half})).status is Status.NO_EVIDENCE


def _waiver(days: int) -> Waiver:
    return Waiver(
        rule="load_before_wait",
        path="kernels/copies/**",
        owner="someone",
        reason="measured to be harmless",
        expires=date.today() + timedelta(days=days),
    )


def _with_waiver(pack: CopyPack, days: int) -> Check:
    (check,) = audit.plan(request(pack, waivers=(_waiver(days),)))
    return check


def test_a_waiver_that_holds_lets_the_finding_stand_without_failing(root: Path, tmp_path: Path) -> None:
    pack = CopyPack(root, "fault")
    outcome = audit.run(_with_waiver(pack, 1), context(pack, tmp_path))
    assert outcome.status is Status.PASS
    assert outcome.findings[0].waived is not None
    assert outcome.findings[0].waived.startswith("someone: measured to be harmless")


def test_a_waiver_that_has_expired_covers_nothing(root: Path, tmp_path: Path) -> None:
    pack = CopyPack(root, "fault")
    assert audit.run(_with_waiver(pack, -1), context(pack, tmp_path)).status is Status.FAIL


def test_what_one_job_compiled_is_kept_when_a_later_one_is_stopped(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = CopyPack(root)
    made = context(pack, tmp_path)
    (variant,) = pack.variants()
    other = variant.model_copy(update={"name": "hoisted_load_fault"})
    monkeypatch.setattr(artifacts, "SMALL_JOB", 1)
    monkeypatch.setattr(artifacts, "MAX_CHILDREN", 1)
    collect = artifacts._collect

    def stop_at_the_second(job: Any, name: str, entry: Path, end: str) -> str | None:
        if name == "hoisted_load_fault":
            raise KeyboardInterrupt
        return collect(job, name, entry, end)

    monkeypatch.setattr(artifacts, "_collect", stop_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        artifacts.compile_missing(made, (variant, "sm_90a"), [(other, "sm_90a")])
    assert artifacts.find_compiled(made, variant, "sm_90a") is not None
    assert artifacts.find_compiled(made, other, "sm_90a") is None


def test_samples_that_do_not_fit_are_invalid_and_never_a_crash(root: Path, tmp_path: Path) -> None:
    pack = CopyPack(root)
    (check,) = audit.plan(request(pack))
    for done, bad in spoiled(audit.sample(check, context(pack, tmp_path)), SHAPES):
        assert audit.judge(check, bad).status is Status.INVALID, done


def test_without_the_compilers_word_nothing_can_be_judged(root: Path) -> None:
    (check,) = audit.plan(request(CopyPack(root)))
    outcome = audit.judge(check, Samples(check=check.id, tier=Tier.SMOKE))
    assert outcome.status is Status.INVALID
    assert "table 'compile' is missing" in outcome.summary
