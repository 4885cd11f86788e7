"""`fasttrack tune`: search an op's declared choices on this machine, under its tests."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.selectors import JsonOutput, PackName, PolicyName

__all__ = ["app"]

app = typer.Typer()


@app.command()
def tune(
    op: Annotated[str, typer.Argument(help="Op by name.")],
    pack: PackName = "k3_decode",
    policy: PolicyName = "smoke",
    cells: Annotated[
        list[str] | None,
        typer.Option(
            "--cells", help="Cells whose label holds this text; may be repeated. Default: one a shape."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Only this preset's shapes.")] = None,
    trials: Annotated[int, typer.Option("--trials", min=1, help="Configurations tried in one cell.")] = 24,
    blocks: Annotated[int, typer.Option("--blocks", min=8, help="Pairs of a full timing.")] = 16,
    limit_s: Annotated[
        float,
        typer.Option("--limit-s", min=1, help="Seconds of one cell's search, held-out repeats not counted."),
    ] = 600.0,
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="Seed of inputs and of the order of trials.")
    ] = 0,
    built: Annotated[
        Path | None, typer.Option("--built", help="Folder where compiled kernels are kept from run to run.")
    ] = None,
    processes: Annotated[int, typer.Option("--processes", min=1, help="Compilers side by side.")] = 2,
    out: Annotated[Path, typer.Option("--out", help="Folder of the record, logs and table.")] = Path(
        "out/tune"
    ),
    write: Annotated[
        bool, typer.Option("--write", help="Put what was chosen into the pack's own table.")
    ] = False,
    json: JsonOutput = False,
) -> None:
    """Search an op's configurations: each must pass its tests before its time counts, all trials are kept,
    and the winner must beat what is there now on repeats that the search did not see.

    Exit code: 0 when every cell ended with a choice that passes its tests, 1 when one did not.
    """
    from harness.cli.console import err, print_json
    from harness.cli.console import out as said
    from harness.engines.packs import load_pack
    from harness.tuning.run import Wanted, load_table, table_after
    from harness.tuning.run import tune as search_cells
    from harness.tuning.search import Budget

    loaded = load_pack(pack)
    budget = Budget(trials=trials, blocks=blocks, held_out_blocks=max(24, blocks), limit_s=limit_s)
    wanted = Wanted(
        loaded,
        op,
        tuple(cells or ()),
        policy,
        seed,
        budget,
        model,
        processes,
        "fasttrack " + " ".join(sys.argv[1:]),
        built,
    )
    out.mkdir(parents=True, exist_ok=True)
    record = search_cells(wanted, out, lambda text: err.print(text, markup=False, soft_wrap=True))
    (out / "record.json").write_bytes(record.canonical() + b"\n")
    place = loaded.tuned_file(record.arch) if write else out / f"{record.arch}.json"  # type: ignore[attr-defined]  # `tune` refuses packs without
    table = table_after(load_table(place), record)
    place.write_text(table.model_dump_json(indent=1) + "\n", encoding="utf-8")
    if json:
        print_json(record)
    else:
        for study in record.studies:
            said.print(
                f"{study.verdict}  {study.cell.label()} {study.model}: {study.words}",
                markup=False,
                soft_wrap=True,
            )
        said.print(f"record {out / 'record.json'}, table {place}", markup=False, soft_wrap=True)
    raise typer.Exit(0 if all(s.verdict != "not_judged" for s in record.studies) else 1)
