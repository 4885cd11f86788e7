"""`fasttrack evals list|run|compare`."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.selectors import JsonOutput, Out, PackName, Resume, Selection, selecting

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True)
BundleA = Annotated[Path, typer.Argument(metavar="A", help="Bundle: folder or .tar.zst.")]
BundleB = Annotated[Path, typer.Argument(metavar="B", help="Bundle to compare with.")]


@app.command("list")
def list_evals(pack: PackName = "k3_decode", json: JsonOutput = False) -> None:
    """List the evals that a pack can be judged by, with model, scorer and number of items."""
    from harness.cli.console import out, print_json
    from harness.engines.packs import load_pack
    from harness.stages.evals.planning import drift_tokens
    from harness.stages.evals.scorers import SCORER_IDS

    loaded = load_pack(pack)
    rows: list[dict[str, object]] = [
        {"name": "drift", "model": loaded.smoke_model, "scorer": "kl-to-oracle/1",
         "smoke": drift_tokens(False),
         "full": drift_tokens(True), "unit": "positions"}
    ]  # fmt: skip
    rows += [
        {"name": t.name, "model": t.model, "scorer": SCORER_IDS[t.scorer], "smoke": t.smoke_items,
         "full": t.full_items, "unit": "items"}
        for t in loaded.eval_tasks()
    ]  # fmt: skip
    if json:
        print_json(rows)
        return
    for row in rows:
        out.print(
            f"{row['name']}: {row['model']}, {row['smoke']} {row['unit']} ({row['full']} with --full), "
            f"scorer {row['scorer']}",
            markup=False, soft_wrap=True,
        )  # fmt: skip


@app.command()
@selecting(without=("stage", "machine"), policy="smoke")
def run(
    selection: Selection,
    name: Annotated[list[str] | None, typer.Argument(help="Which; all of the policy where none.")] = None,
    out: Out = Path("out/evals"),
    resume: Resume = False,
    json: JsonOutput = False,
) -> None:
    """Run evals, stock and optimised on the same items, into a bundle."""
    from harness.cli.finish import validate_selection

    chosen = replace(selection, stages=("evals",), only=tuple(name or selection.only))
    raise typer.Exit(validate_selection(chosen, out, resume=resume, keep_going=True, as_json=json))


@app.command()
def compare(first: BundleA, second: BundleB, json: JsonOutput = False) -> None:
    """Compare the evals of two bundles: 0 alike, 1 not, 2 not comparable."""
    from harness.cli.compare import compare_stage
    from harness.domain.check import StageName

    raise typer.Exit(compare_stage(first, second, StageName.EVALS, as_json=json))
