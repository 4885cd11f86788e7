"""`fasttrack kernels list|test|bench|sanitize`: fused ops one at a time, for people who write them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from harness.cli.selectors import Full, JsonOutput, PackName, PolicyName

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="List, test and time fused ops, per cell.")
Ops = Annotated[list[str] | None, typer.Argument(help="Ops by name; default: all.")]
CellLabels = Annotated[
    list[str] | None, typer.Option("--cell", help="Only cells whose label holds this text; may be repeated.")
]


@app.command("list")
def list_ops(pack: PackName = "k3_decode", json: JsonOutput = False) -> None:
    """Ops with their parameters, regimes, implementations and compiled variants."""
    from harness.cli.console import out, print_json
    from harness.engines.packs import load_pack

    loaded = load_pack(pack)
    rows = [_describe(op, loaded) for op in loaded.ops()]
    if json:
        print_json({"pack": loaded.name, "ops": rows})
        return
    for row in rows:
        variants = (
            ", ".join(f"{count} for {arch}" for arch, count in row["variants"].items()) or row["no_variants"]
        )
        out.print(f"[bold]{row['op']}[/]  {'/'.join(row['implementations'])}  variants: {variants}")
        out.print("  " + ", ".join(f"{p['name']} ({p['role']})" for p in row["parameters"]))
        out.print(f"  regimes: {', '.join(row['regimes'])}")


@app.command("test")
def try_ops(
    ops: Ops = None,
    pack: PackName = "k3_decode",
    policy: PolicyName = "smoke",
    cell: CellLabels = None,
    full: Full = False,
    seed: Annotated[int, typer.Option("--seed", help="Seed of all inputs.")] = 0,
    json: JsonOutput = False,
) -> None:
    """Try ops against their oracle here; exit 0 when all pass, 1 when one does not."""
    from harness.cli.console import err, out, outcome_table, print_json
    from harness.domain.check import Status
    from harness.stages import kernels

    request, context = _desk(pack, policy, full, seed)
    known = [op.name for op in request.pack.ops()]
    _require_known(ops or (), known)
    checks = [c for c in kernels.plan(request) if _is_chosen(c, ops, cell) and c.unavailable is None]
    _require_some(checks, cell)
    outcomes = []
    for number, check in enumerate(checks, 1):
        err.print(f"[{number}/{len(checks)}] {check.id}", soft_wrap=True)
        outcomes.append(kernels.run(check, context))
    if json:
        print_json({"outcomes": [o.model_dump(mode="json") for o in outcomes]})
    else:
        out.print(
            outcome_table(f"{len(outcomes)} checks", [(o.status.value, o.check, o.summary) for o in outcomes])
        )
    raise typer.Exit(0 if all(o.status is Status.PASS for o in outcomes) else 1)


@app.command("bench")
def time_ops(
    ops: Ops = None,
    pack: PackName = "k3_decode",
    policy: PolicyName = "smoke",
    cell: CellLabels = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Preset of the shapes; default: what this machine can afford."),
    ] = None,
    blocks: Annotated[int, typer.Option("--blocks", min=4, help="Most ABBA blocks a cell.")] = 24,
    seed: Annotated[
        int | None,
        typer.Option("--seed", help="Seed of all inputs; default: drawn now, so that none knows it."),
    ] = None,
    json: JsonOutput = False,
) -> None:
    """Time ops against stock, beside a clock that the candidate does not hold; exit 1 where they differ.

    The candidate runs in a sandbox. A compiled op is launched again from a description by a process that
    never loads the pack; any other is timed from outside of its worker.
    """
    import secrets

    from harness.cli.console import err, out, print_json
    from harness.domain.check import Status
    from harness.stages import kernels

    if seed is None:
        seed = secrets.randbits(31)
        err.print(f"seed {seed}")
    request, _ = _desk(pack, policy, False, seed)
    _require_known(ops or (), [op.name for op in request.pack.ops()])
    checks = [
        c
        for c in kernels.plan(request)
        if _is_chosen(c, ops, cell)
        and c.unavailable is None
        and c.parameter("model") is not None
        and (model is None or c.parameter("model") == model)
    ]
    _require_some(checks, cell)
    rows = []
    for number, check in enumerate(checks, 1):
        err.print(f"[{number}/{len(checks)}] {check.id}", soft_wrap=True)
        rows.append(_timed(request, check, seed, blocks))
    if json:
        pairs = [{"timing": a.model_dump(mode="json"), "witness": b.model_dump(mode="json")} for a, b in rows]
        print_json({"timings": pairs})
    else:
        out.print(_timing_table(rows))
        for _, witness in rows:
            out.print(f"{witness.op}: {witness.words}", markup=False, soft_wrap=True)
    bad = (Status.FAIL, Status.INVALID)
    raise typer.Exit(1 if any(witness.status in bad for _, witness in rows) else 0)


@app.command("sanitize")
def sanitize_ops(
    ops: Ops = None,
    pack: PackName = "k3_decode",
    policy: PolicyName = "smoke",
    cell: CellLabels = None,
    tool: Annotated[
        list[str] | None,
        typer.Option("--tool", help="memcheck, racecheck, synccheck, initcheck; default: all."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of all inputs.")] = 0,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="How many runs at once.")] = 4,
    limit_s: Annotated[float, typer.Option("--limit", min=1, help="Seconds that one run may take.")] = 300,
    out_file: Annotated[Path | None, typer.Option("--out", help="File for the record (JSON).")] = None,
    json: JsonOutput = False,
) -> None:
    """One call of each op under compute-sanitizer, in its first cell that --cell leaves; needs a GPU."""
    import tempfile

    from harness.cli.console import err, out, outcome_table, print_json
    from harness.domain.check import Status
    from harness.domain.errors import InputError
    from harness.stages import kernels
    from harness.stages.kernels.sanitizing import TOOLS, run_sanitizers

    if unknown := [name for name in tool or () if name not in TOOLS]:
        raise InputError(f"no tool is called {', '.join(unknown)}; there are {', '.join(TOOLS)}")
    request, _ = _desk(pack, policy, False, seed)
    _require_known(ops or (), [op.name for op in request.pack.ops()])
    chosen = [
        c for c in kernels.plan(request)
        if _is_chosen(c, ops, cell) and c.unavailable is None and c.parameter("implementation") == "cute"
        and c.parameter("model")
    ]  # fmt: skip
    _require_some(chosen, cell)
    firsts = {c.op: c for c in reversed(chosen)}
    tools = [t for t in TOOLS if not tool or t in tool]
    with tempfile.TemporaryDirectory(prefix="fasttrack-sanitize-") as folder:
        work = [_job(request, check, seed, str(Path(folder) / str(check.op))) for check in firsts.values()]

        def say(run: Any) -> None:
            err.print(f"{run.status.value} {run.op} {run.words}", markup=False, soft_wrap=True)

        runs = run_sanitizers(work, tools, jobs, limit_s, say)
    record = _sanitizer_record(request, seed, runs)
    if out_file is not None:
        out_file.parent.mkdir(parents=True, exist_ok=True)
        out_file.write_bytes(record.canonical() + b"\n")
    if json:
        print_json(record)
    else:
        rows = [(run.status.value, f"{run.op} {run.tool}", run.words) for run in runs]
        out.print(outcome_table(f"{len(runs)} runs", rows))
    raise typer.Exit(0 if all(run.status is Status.PASS for run in runs) else 1)


def _sanitizer_record(request: Any, seed: int, runs: Sequence[Any]) -> Any:
    """Runs with the digests of what ran, for a file."""
    from datetime import UTC, datetime

    from harness.engines.packs import harness_digest, pack_digest
    from harness.stages.kernels.sanitizing import SanitizerRecord

    return SanitizerRecord(
        harness_digest=harness_digest(), pack=request.pack.name, pack_digest=pack_digest(request.pack),
        seed=seed, created=datetime.now(UTC).replace(microsecond=0),
        gpus=tuple(g.name for g in request.machine.gpus), runs=tuple(runs),
    )  # fmt: skip


def _job(request: Any, check: Any, seed: int, folder: str, blocks: int = 0) -> Any:
    from harness.stages.kernels.children import OpJob

    contract = next(op for op in request.pack.ops() if op.name == check.op)
    return OpJob(
        pack=request.pack.name, op=check.op, cell=check.cell, model=str(check.parameter("model")),
        implementation=str(check.parameter("implementation")), regime=contract.regimes[0], seeds=(seed,),
        folder=folder, blocks=blocks,
    )  # fmt: skip


def _timed(request: Any, check: Any, seed: int, blocks: int) -> tuple[Any, Any]:
    """The sandbox's own word on one op in one cell, and the witness's."""
    import tempfile

    from harness.engines.packs import pack_package
    from harness.stages.kernels.timing import Bounds, time_in_sandbox, time_trusted

    acceptance = request.policy.acceptance
    bounds = Bounds(factor=acceptance.factor, floor_ulp=acceptance.floor_ulp, hard_cap=acceptance.hard_cap)
    contract = next(op for op in request.pack.ops() if op.name == check.op)
    with tempfile.TemporaryDirectory(prefix="fasttrack-bench-") as folder:
        job = _job(request, check, seed, str(Path(folder) / "bench"), blocks)
        timing = time_in_sandbox(job, Path(folder) / "bench")
        witness = time_trusted(
            request.pack, pack_package(request.pack.name), contract, check.cell, job.model,
            job.implementation, seed, bounds, Path(folder) / "witness",
        )  # fmt: skip
    return timing, witness


def _describe(op: Any, pack: Any) -> dict[str, Any]:
    """One op as plain data; without the kernel compiler its variants are unknown, and the reason is told."""
    from harness.stages.audit.artifacts import compiler_missing

    missing = compiler_missing()
    variants: dict[str, int] = {}
    for variant in () if missing else pack.variants():
        if variant.op == op.name:
            for architecture in variant.architectures:
                variants[architecture] = variants.get(architecture, 0) + 1
    return {
        "op": op.name,
        "parameters": [{"name": p.name, "role": p.role} for p in op.parameters],
        "regimes": list(op.regimes),
        "implementations": list(op.implementations),
        "variants": variants,
        "no_variants": missing or "none",
    }


def _desk(pack: str, policy: str, full: bool, seed: int) -> tuple[Any, Any]:
    """A plan request and a context for one stage on this machine, bound to no change."""
    import tempfile

    from harness.documents import load_claim, load_policy_set
    from harness.domain.change import Change
    from harness.domain.stage import PlanRequest, StageContext
    from harness.engines.packs import load_pack
    from harness.measure.machine import read_machine

    loaded = load_pack(pack)
    claim = load_claim(loaded.claim_file())
    rules_of, zones, rules = load_policy_set(policy)
    machine = read_machine()
    change = Change(repository="none", base="0" * 40, head="0" * 40)
    tier = machine.best_tier
    request = PlanRequest(
        pack=loaded,
        claim=claim,
        policy=rules_of,
        zones=zones,
        rules=rules,
        change=change,
        machine=machine,
        tier=tier,
        is_full=full,
        seed=seed,
    )
    scratch = Path(tempfile.gettempdir())
    context = StageContext(
        pack=loaded,
        claim=claim,
        policy=rules_of,
        zones=zones,
        rules=rules,
        change=change,
        machine=machine,
        tier=tier,
        tree=None,
        cache=scratch,
        logs=scratch,
        ledger=scratch,
        progress=lambda _: None,
    )
    return request, context


def _is_chosen(check: Any, ops: Sequence[str] | None, cells: Sequence[str] | None) -> bool:
    is_op = not ops or check.op in ops
    return is_op and (not cells or any(text in check.id for text in cells))


def _require_known(ops: Sequence[str], known: Sequence[str]) -> None:
    from harness.domain.errors import InputError

    strangers = [op for op in ops if op not in known]
    if strangers:
        raise InputError(f"no op is called {', '.join(strangers)}; the pack has {', '.join(known)}")


def _require_some(checks: Sequence[Any], cells: Sequence[str] | None) -> None:
    from harness.domain.errors import InputError

    if not checks:
        raise InputError(
            f"no cell that runs here matches {', '.join(cells or ()) or 'the selection'}; leave out "
            "--cell to see them all"
        )


def _timing_table(rows: Sequence[tuple[Any, Any]]) -> Any:
    from rich.table import Table

    table = Table(
        title=f"{len(rows)} cells; times in microseconds a call", title_justify="left", pad_edge=False
    )
    for name in ("op", "model", "cell", "stock", "optimised", "ratio (interval)", "null", "witness", "kind"):
        table.add_column(name, overflow="fold")
    for t, witness in rows:
        seen = "none" if witness.optimised_us is None else f"{witness.optimised_us:.1f}"
        table.add_row(
            t.op,
            t.model,
            t.cell.label(),
            f"{t.stock_us:.1f}",
            f"{t.optimised_us:.1f}",
            f"{t.ratio:.2f} ({t.ratio_low:.2f}..{t.ratio_high:.2f})",
            f"{t.null_low:.2f}..{t.null_high:.2f}",
            f"{seen} {witness.status.value}",
            witness.kind,
        )
    return table
