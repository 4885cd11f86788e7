"""`fasttrack recipe`: the exact server, benchmark and eval commands of a cell."""

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.selectors import JsonOutput

__all__ = ["app"]

app = typer.Typer()


@app.command()
def recipe(
    model: Annotated[str, typer.Option(help="Model of the table, such as kimi-k3.")],
    gpus: Annotated[str, typer.Option(help="Machine, such as 16xGB300.")],
    batch: Annotated[int, typer.Option(min=1, help="Concurrent requests.")] = 1,
    input_tokens: Annotated[int, typer.Option("--input", min=1, help="Prompt tokens.")] = 1,
    output_tokens: Annotated[int, typer.Option("--output", min=1, help="Generated tokens.")] = 1000,
    drafts: Annotated[int, typer.Option(min=0, help="Draft tokens a verify step.")] = 0,
    synthetic_acceptance: Annotated[
        float | None, typer.Option(help="Force this acceptance length instead of measuring it.")
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option("--save", help="Write both servers' settings, for `evals run --engine vllm --server`."),
    ] = None,
    json: JsonOutput = False,
) -> None:
    """Print the stock and optimised server commands, the benchmark and the evals. Runs nothing."""
    from harness.cli.console import out, print_json
    from harness.recipes import load_models
    from harness.recipes import recipe as make
    from harness.recipes.commands import Workload, shell

    workload = Workload(
        batch=batch,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        drafts=drafts,
        synthetic_acceptance=synthetic_acceptance,
    )
    models = load_models()
    found = make(models, model, gpus, workload)
    if save is not None:
        from harness.recipes.servers import server_settings

        save.write_text(server_settings(models, found, workload).model_dump_json(indent=1), encoding="utf-8")
    if json:
        print_json(found)
        return
    parts = (
        ("stock server", (found.stock,) if found.stock else ()),
        ("optimised server", (found.optimised,) if found.optimised else ()),
        ("benchmark, once against each", (found.bench,) if found.bench else ()),
        ("evals, once against each", found.evals),
    )
    out.print(f"{found.model} on {found.gpus}", style="bold", markup=False)
    for title, commands in parts:
        if commands:
            out.print(f"\n# {title}", markup=False)
        for command in commands:
            out.print(shell(command), markup=False, soft_wrap=True, highlight=False)
    out.print("\nnotes", style="bold")
    for note in found.notes:
        out.print(f"- {note}", markup=False, soft_wrap=True)
    out.print("\nsources", style="bold")
    for source in found.sources:
        out.print(f"- {source}", markup=False, soft_wrap=True)
