"""`fasttrack kernels list|test|bench`: fused ops one at a time, for people who write them."""

from collections.abc import Sequence
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
    seed: Annotated[int, typer.Option("--seed", help="Seed of all inputs.")] = 0,
    json: JsonOutput = False,
) -> None:
    """Time ops against stock: interleaved, cold data, with stock against itself as the noise floor."""
    from harness.cli.console import err, out, print_json
    from harness.measure.bench import time_op
    from harness.stages import kernels

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
    timings = []
    for number, check in enumerate(checks, 1):
        err.print(f"[{number}/{len(checks)}] {check.id}", soft_wrap=True)
        implementation, shapes = str(check.parameter("implementation")), str(check.parameter("model"))
        if check.cell is None or check.op is None:
            raise AssertionError(f"{check.id} was planned without a cell or an op")
        timings.append(
            time_op(request.pack, check.op, implementation, check.cell, shapes, seed=seed, blocks=blocks)
        )
    if json:
        print_json({"timings": [t.model_dump(mode="json") for t in timings]})
        return
    out.print(_timing_table(timings))


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
    from pathlib import Path

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


def _timing_table(timings: Sequence[Any]) -> Any:
    from rich.table import Table

    table = Table(
        title=f"{len(timings)} cells; times in microseconds a call", title_justify="left", pad_edge=False
    )
    for name in ("op", "model", "cell", "stock", "optimised", "ratio (interval)", "null"):
        table.add_column(name, overflow="fold")
    for t in timings:
        table.add_row(
            t.op,
            t.model,
            t.cell.label(),
            f"{t.stock_us:.1f}",
            f"{t.optimised_us:.1f}",
            f"{t.ratio:.2f} ({t.ratio_low:.2f}..{t.ratio_high:.2f})",
            f"{t.null_low:.2f}..{t.null_high:.2f}",
        )
    return table
