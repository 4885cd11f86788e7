"""A small, realistic run of all six stages with mixed statuses, for tests of evidence, gate and report."""

import random
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, Literal

from harness.documents import PolicySet
from harness.domain.bundle import Environment
from harness.domain.cell import Cell
from harness.domain.change import Change, ChangedFile, FileKind
from harness.domain.check import (
    Check,
    Finding,
    Outcome,
    Samples,
    SampleTable,
    Severity,
    StageName,
    Status,
    Threshold,
)
from harness.domain.claim import Architecture, Claim, Envelope, Range, SpeedPromise, Switch
from harness.domain.machine import Gpu, Machine, Tier
from harness.domain.plan import Plan
from harness.domain.policy import Policy, Proof, Waiver, Zone, ZoneMap
from harness.evidence.bundle import write_bundle
from harness.evidence.reader import Bundle
from harness.evidence.run_folder import open_run
from harness.evidence.verify import Replanned
from tests.evidence.example_judge import judge

__all__ = [
    "BASE", "CREATED", "HEAD", "OPS", "as_planned", "example_claim", "example_machine", "example_plan",
    "example_policy", "example_policy_set", "example_samples", "many_checks", "only", "outcome_of",
    "write_example",
]  # fmt: skip

BASE, HEAD = "b" * 40, "a" * 40
CREATED = datetime(2026, 11, 29, 20, 30, tzinfo=UTC)
OPS = ("attn_res", "kda_step", "moe_front", "router", "experts")
Scene = Literal["mixed", "passing"]


def example_machine(gpu: bool = False) -> Machine:
    """A CPU machine, or one with a single H200."""
    gpus = (
        (Gpu(name="NVIDIA H200", arch="sm_90a", memory_bytes=150_000_000_000, sm_count=132),) if gpu else ()
    )
    return Machine(
        platform="Linux-x86_64",
        cpu_model="Example CPU",
        cpu_count=2,
        memory_bytes=24_000_000_000,
        gpus=gpus,
        driver="580.159.04" if gpu else None,
        python="3.11.2",
        libraries=(("numpy", "2.4.0"), ("pydantic", "2.14.4"), ("torch", "2.13.0")),
    )


def example_claim() -> Claim:
    """CPU and sm_90a dispatched, sm_100a compiled."""
    return Claim(
        name="k3_decode",
        pack="k3_decode",
        summary="Specialised Kimi K3 decode for batches up to 64.",
        envelope=Envelope(
            architectures=(
                Architecture(arch="cpu", level="dispatched"),
                Architecture(arch="sm_90a", level="dispatched"),
                Architecture(arch="sm_100a", level="compiled"),
            ),
            tp=(1, 8),
            dcp=(1,),
            batch=Range(min=1, max=64),
            batch_buckets=(2, 8, 64),
            context=Range(min=1, max=8192),
            drafts=Range(min=0, max=7),
            kv_dtypes=("bf16",),
            phases=("decode", "verify"),
            max_rows_per_step=64,
        ),
        switch=Switch(name="decode_backend", on="latency_specialized", off="standard", default="standard"),
        features=("full_context", "temperature_sampling", "speculative_decoding"),
        state=("kda_state", "conv_state", "mla_cache"),
        files=("kernels/k3_decode/**",),
        speed=(
            SpeedPromise(
                arch="sm_90a", level="layer", subject="kda_moe", tp=8, batch=1, context=1024, ratio=1.3,
                conditions="collectives left out in both arms",
            ),
        ),
    )  # fmt: skip


def example_policy(name: str = "smoke", **changes: Any) -> Policy:
    """`smoke` asks for tier smoke everywhere; `fast_track` for rank where something runs."""
    run_tier = Tier.SMOKE if name == "smoke" else Tier.RANK
    proofs = tuple(
        Proof(stage=s, tier=Tier.SMOKE if s in (StageName.ISOLATION, StageName.AUDIT) else run_tier)
        for s in StageName
    )
    waiver = Waiver(
        rule="new_dependency",
        path="kernels/k3_decode/peers/**",
        owner="gatekeeper",
        reason="peers are never imported by the model",
        expires=date(2027, 6, 30),
    )
    values: dict[str, Any] = {
        "name": name, "summary": f"the {name} policy", "zone_map": "fasttrack", "proofs": proofs,
        "waivers": (waiver,),
    }  # fmt: skip
    return Policy(**{**values, **changes})


def example_policy_set(name: str = "smoke") -> PolicySet:
    """An example policy with the zones and rules of the example's plans."""
    plan = example_plan()
    return PolicySet(example_policy(name), plan.zones, plan.rules)


def as_planned(plan: Plan) -> Replanned:
    """A planner that asks what the plan asks, with the code that made it."""
    return Replanned(plan.harness_digest, plan.pack_digest, plan.checks)


def example_plan(
    policy: Policy | None = None, scene: Scene = "mixed", *, gpu: bool = False, **changes: Any
) -> Plan:
    """A plan of about forty checks."""
    policy = policy or example_policy()
    machine = example_machine(gpu)
    change = Change(
        repository="https://github.com/example/vllm",
        pr=61867,
        base=BASE,
        head=HEAD,
        files=tuple(
            ChangedFile(path=path, status="added", kind=FileKind.TEXT, new_mode="100644", added_lines=lines)
            for path, lines in (
                ("kernels/k3_decode/cute/kda_step.py", 412),
                ("kernels/k3_decode/ops/kda_step.py", 96),
                ("tests/k3_decode/test_kda_step.py", 180),
                ("vllm/v1/core/sched.py", 7 if scene == "mixed" else 0),
            )
            if lines
        ),
    )
    values: dict[str, Any] = {
        "harness_version": "0.1.0",
        "harness_digest": "1" * 64,
        "pack": "k3_decode",
        "pack_digest": "2" * 64,
        "claim": example_claim(),
        "policy": policy,
        "zones": ZoneMap(
            name="fasttrack",
            repository="vllm",
            zones=(
                Zone(name="model_code", globs=("kernels/k3_decode/**",), why="the pack"),
                Zone(name="tests", globs=("tests/**",), why="tests"),
                Zone(name="shared_core", globs=("vllm/v1/**",), why="every model runs through it"),
            ),
        ),
        "rules": (),
        "change": change,
        "change_digest": "3" * 64,
        "machine": machine,
        "tier": machine.best_tier,
        "nonce": "0123456789abcdef",
        "checks": _checks(machine, policy),
    }
    return Plan(**{**values, **changes})


def example_samples(check: Check, tier: Tier, scene: Scene = "mixed") -> Samples:
    """Samples of one check; `mixed` makes one check of most stages fail or prove nothing."""
    rng = random.Random(check.id)
    bad = scene == "mixed"
    makers: dict[StageName, Callable[[Check, random.Random, bool], dict[str, Any]]] = {
        StageName.ISOLATION: _isolation_samples,
        StageName.AUDIT: _audit_samples,
        StageName.KERNELS: _kernel_samples,
        StageName.COVERAGE: _coverage_samples,
        StageName.EVALS: _eval_samples,
        StageName.SWEEP: _sweep_samples,
    }
    if bad and check.id == "kernels/experts/cpu.tp1.dcp1.b64.c512.d0.bf16.decode":
        return Samples(
            check=check.id, tier=tier, ended="crashed", detail="SIGSEGV in experts, 3 s after start"
        )
    return Samples(check=check.id, tier=tier, duration_s=0.25, **makers[check.stage](check, rng, bad))


def write_example(
    folder: Path,
    plan: Plan | None = None,
    scene: Scene = "mixed",
    samples: Callable[[Check], Samples] | None = None,
    stop_after: int | None = None,
    judged_by: Callable[[Check, Samples], Outcome] = judge,
) -> Path:
    """Run the example into `folder` and finish it; `stop_after` leaves the rest without outcomes."""
    plan = plan or example_plan(scene=scene)
    with open_run(folder, plan) as run:
        (run.logs / "compile.log").write_text("compiled 9 variants for 3 architectures\n")
        (run.ledger / "decode.jsonl").write_text('{"step":0,"path":"optimised","reason":"taken"}\n')
        for check in plan.checks[:stop_after]:
            if check.unavailable is not None:
                run.record(_skipped(check, plan), None)
                continue
            taken = samples(check) if samples else example_samples(check, plan.tier, scene)
            run.record(judged_by(check, taken), taken)
        environment = Environment(
            command=("fasttrack", "validate", "--policy", plan.policy.name),
            variables=(("OMP_NUM_THREADS", "2"),),
        )
        return write_bundle(run, environment, created=CREATED)


def many_checks(factor: int, scene: Scene = "mixed", **changes: Any) -> Bundle:
    """A bundle in memory with each check of the example `factor` times, for tests of size."""
    plan = example_plan(scene=scene)
    checks = tuple(
        c.model_copy(update={"id": f"{c.id}-{i}", **changes})
        for i in range(factor)
        for c in plan.checks
        if c.unavailable is None
    )
    plan = plan.model_copy(update={"checks": checks})
    outcomes = tuple(judge(c, example_samples(c, plan.tier, scene)) for c in checks)
    return Bundle(Path("nowhere"), None, None, plan, None, outcomes)


def outcome_of(plan: Plan, check_id: str, scene: Scene = "mixed") -> Outcome:
    """The outcome that the example gives for one check."""
    check = next(c for c in plan.checks if c.id == check_id)
    return judge(check, example_samples(check, plan.tier, scene))


def only(plan: Plan, keep: Callable[[Check], bool]) -> Plan:
    """The plan with some of its checks."""
    return plan.model_copy(update={"checks": tuple(c for c in plan.checks if keep(c))})


def _checks(machine: Machine, policy: Policy) -> tuple[Check, ...]:
    arch = machine.arch
    tier = Tier.SMOKE if arch == "cpu" else Tier.RANK
    cells = [Cell(arch=arch, batch=b, context=c) for b in (1, 8, 64) for c in (64, 512)]
    checks: list[Check] = []
    checks += [
        _check(
            f"isolation/{rule}/change", StageName.ISOLATION, f"the change keeps the rule {rule}", subject=rule
        )
        for rule in ("zones", "no_shared_state", "opt_in_default", "new_dependency")
    ]
    for op in OPS[:3]:
        checks += [
            _check(
                f"audit/{op}/{target}", StageName.AUDIT, f"{op} compiles for {target} without spills",
                op=op, parameters=(("architecture", target),),
            )
            for target in ("sm_90a", "sm_100a")
        ]  # fmt: skip
    checks += [
        _check(
            f"kernels/{op}/{cell.label()}", StageName.KERNELS, f"{op} is as exact as stock", cell, op, tier
        )
        for op in OPS
        for cell in cells[:2] + cells[-1:]
    ]
    share = policy.min_path_share
    checks += [
        _check(
            f"coverage/path/{cell.label()}", StageName.COVERAGE, "the optimised path runs in this cell", cell,
            tier=tier, parameters=(("kind", "path"),), subject=cell.label(), min_path_share=share,
        )
        for cell in cells[::2]
    ]  # fmt: skip
    checks += [
        _check(
            f"coverage/decline/{reason}", StageName.COVERAGE, "outside the envelope the step is declined",
            Cell(arch=arch, batch=65), tier=tier, parameters=(("kind", "decline"),), subject=reason,
        )
        for reason in ("batch_above_max", "prefill")
    ]  # fmt: skip
    checks += [
        _check(
            f"coverage/poison/{op}", StageName.COVERAGE, "making this op wrong changes the drift eval",
            cells[0], op, tier, parameters=(("kind", "poison"),), subject=op,
        )
        for op in OPS
    ]  # fmt: skip
    checks += [
        _check(
            f"evals/{name}/canary", StageName.EVALS, f"on {name} the optimised path answers no worse",
            Cell(arch=arch, batch=8, context=1024), tier=tier, subject=name, margin=0.05,
            unavailable="needs a model that solves it" if name == "aime25" else None,
            is_required=name != "aime25",
        )
        for name in ("drift", "mrcr_canary", "aime25")
    ]  # fmt: skip
    checks += [
        _check(
            f"sweep/decode/{cell.label()}", StageName.SWEEP, "a decode step is no slower than stock's", cell,
            tier=tier, subject="decode", min_ratio=1.0,
        )
        for cell in cells
    ]  # fmt: skip
    return tuple(checks)


def _check(
    id: str,
    stage: StageName,
    proves: str,
    cell: Cell | None = None,
    op: str | None = None,
    tier: Tier = Tier.SMOKE,
    parameters: tuple[tuple[str, Any], ...] = (),
    subject: str | None = None,
    unavailable: str | None = None,
    is_required: bool = True,
    **thresholds: float,
) -> Check:
    return Check(
        id=id, stage=stage, proves=proves, cell=cell, op=op, subject=subject, tier=tier, cost_s=0.5,
        parameters=parameters, unavailable=unavailable, is_required=is_required,
        thresholds=tuple(Threshold(name=n, value=v) for n, v in sorted(thresholds.items())),
    )  # fmt: skip


def _skipped(check: Check, plan: Plan) -> Outcome:
    reason = check.unavailable or ""
    return Outcome(
        check=check.id, status=Status.SKIPPED, tier=plan.tier, summary=reason,
        next_step=f"run it where this is met: {reason}",
    )  # fmt: skip


def _table(name: str, columns: Sequence[str], *rows: Sequence[Any]) -> SampleTable:
    return SampleTable(name=name, columns=tuple(columns), rows=tuple(tuple(r) for r in rows))


def _isolation_samples(check: Check, rng: random.Random, bad: bool) -> dict[str, Any]:
    findings: tuple[Finding, ...] = ()
    if check.subject == "zones" and bad:
        findings = (
            Finding(
                rule="zones",
                severity=Severity.ERROR,
                message="the pack's part of the change touches shared_core",
                path="vllm/v1/core/sched.py",
                line=118,
                excerpt='if self.decode_backend == "latency_specialized":',
                remedy="move the decision into the model's own dispatcher",
            ),
        )
    if check.subject == "new_dependency":
        findings = (
            Finding(
                rule="new_dependency",
                severity=Severity.ERROR,
                message="imports humming, which the engine does not ship",
                path="kernels/k3_decode/peers/humming.py",
                line=3,
                excerpt="import humming",
                remedy="keep peers out of the model's imports",
                waived="gatekeeper: peers are never imported by the model (until 2027-06-30)",
            ),
        )
    files = [
        ("kernels/k3_decode/cute/kda_step.py", "model_code"),
        ("tests/k3_decode/test_kda_step.py", "tests"),
    ]
    tables = (_table("files", ("path", "zone"), *files), _table("control", ("noticed",), (True,)))
    return {"tables": tables, "findings": findings}


def _audit_samples(check: Check, rng: random.Random, bad: bool) -> dict[str, Any]:
    spills = 48 if bad and check.id == "audit/kda_step/sm_100a" else 0
    row = (
        check.op,
        rng.randrange(96, 208, 8),
        spills,
        rng.randrange(16, 196) * 1024,
        rng.randrange(900, 4000),
    )
    columns = ("kernel", "registers", "spill_bytes", "shared_bytes", "instructions")
    return {"tables": (_table("kernels", columns, row),)}


def _kernel_samples(check: Check, rng: random.Random, bad: bool) -> dict[str, Any]:
    rows = []
    for regime in ("typical", "large", "padded"):
        stock = rng.uniform(0.8, 1.6) * 2.3e-3
        factor = (
            3.4
            if bad and check.op == "router" and check.cell and check.cell.batch == 64
            else rng.uniform(0.4, 1.2)
        )
        rows.append((regime, stock, stock * factor, 2 * stock + 1e-4, 0.05))
    columns = ("regime", "stock_relative_l2", "optimised_relative_l2", "bound", "poisoned_relative_l2")
    return {"tables": (_table("errors", columns, *rows),)}


def _coverage_samples(check: Check, rng: random.Random, bad: bool) -> dict[str, Any]:
    kind = check.parameter("kind")
    if kind == "poison":
        poisoned = 3e-9 if bad and check.op == "attn_res" else rng.uniform(1e-3, 2e-1)
        return {"tables": (_table("divergence", ("pair", "kl"), ("clean", 1.1e-9), ("poison", poisoned)),)}
    path, reason = ("stock", check.subject) if kind == "decline" else ("optimised", "taken")
    steps = [(i, path, reason) for i in range(48)]
    tables = (
        _table("steps", ("step", "path", "reason"), *steps),
        _table("divergence", ("pair", "kl"), ("on", 8e-10)),
    )
    return {"tables": tables}


def _eval_samples(check: Check, rng: random.Random, bad: bool) -> dict[str, Any]:
    lost = 2 if bad and check.subject == "mrcr_canary" else 0
    rows = [(f"item-{i}", 1.0 if i < 60 else 0.0, 1.0 if i < 60 - lost else 0.0) for i in range(64)]
    return {"tables": (_table("items", ("item", "stock_score", "optimised_score"), *rows),)}


def _sweep_samples(check: Check, rng: random.Random, bad: bool) -> dict[str, Any]:
    cell = check.cell or Cell()
    base = 900.0 + 140 * cell.batch + 0.4 * cell.context
    gain = 0.93 if bad and cell.batch == 64 and cell.context == 512 else 1.7 - 0.08 * cell.batch**0.5
    rows = []
    for block in range(12):
        rows += [
            ("stock", block, base * rng.uniform(0.99, 1.01)),
            ("optimised", block, base / gain * rng.uniform(0.99, 1.01)),
        ]
    return {"tables": (_table("timings", ("arm", "block", "us"), *rows),)}
