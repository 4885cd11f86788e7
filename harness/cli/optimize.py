"""`fasttrack optimize`: run a coding agent against the judge, within budgets."""

import os
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.selectors import JsonOutput, PackName, PolicyName

__all__ = ["app"]

app = typer.Typer()


@app.command()
def optimize(
    op: Annotated[str, typer.Argument(help="Op by name.")],
    agent: Annotated[str, typer.Option("--agent", help="Command line of the agent.")],
    pack: PackName = "k3_decode",
    policy: PolicyName = "smoke",
    repo: Annotated[Path, typer.Option("--repo", help="Repository with the op to begin with.")] = Path(),
    out: Annotated[Path, typer.Option("--out", help="Folder of the record; must be empty.")] = Path(
        "out/optimize"
    ),
    cell: Annotated[str, typer.Option("--cell", help="Time in a cell whose label holds this text.")] = "",
    attempts: Annotated[int, typer.Option("--attempts", min=1, help="Attempts at most.")] = 20,
    time_s: Annotated[float, typer.Option("--time-s", min=1, help="Seconds at most.")] = 3600.0,
    gpu_s: Annotated[
        float | None, typer.Option("--gpu-s", help="Seconds of judging on a GPU at most.")
    ] = None,
    plateau: Annotated[
        int, typer.Option("--plateau", min=1, help="Attempts in a row without one accepted.")
    ] = 8,
    target: Annotated[
        float | None, typer.Option("--target", help="Times as fast as at the beginning that are enough.")
    ] = None,
    agent_env: Annotated[
        list[str] | None,
        typer.Option("--agent-env", help="Variable that the agent may see; may be repeated."),
    ] = None,
    json: JsonOutput = False,
) -> None:
    """Run an agent until a verdict reaches the target, a budget is spent, or it ends; leave the best proved.

    Exit code: 0 when an attempt was accepted, 1 when none was, 2 when harness or pack were changed meanwhile.
    """
    from harness.agent.judge import Judge, Settings
    from harness.agent.loop import Budgets
    from harness.agent.loop import optimize as run_loop
    from harness.cli.console import err, print_json
    from harness.cli.console import out as said
    from harness.domain.errors import InputError
    from harness.engines.packs import load_pack

    if out.exists() and any(out.iterdir()):
        raise InputError(f"{out} already holds something; name another folder (--out), or remove it")
    place = out.resolve()
    settings = Settings(
        pack=load_pack(pack), repo=repo.resolve(), policy=_policy(policy), folder=place / "judge",
        workspace=place / "workspace", attempts=attempts, cell=cell,
    )  # fmt: skip
    judge = Judge.of(settings, op)
    variables = {name: os.environ[name] for name in agent_env or () if name in os.environ}
    budgets = Budgets(time_s=time_s, gpu_s=gpu_s, plateau=plateau, target=target)
    result = run_loop(judge, agent, budgets, place, variables, lambda text: err.print(text, markup=False))
    if json:
        print_json(result)
    else:
        best = "nothing was proved" if result.best is None else f"attempt {result.best} is the best"
        said.print(f"{result.ended}: {result.words}", markup=False, soft_wrap=True)
        said.print(
            f"{result.attempts} attempts, {result.accepted} accepted; {best}; "
            f"{result.over_start:.2f} times as fast as at the beginning; {place / 'best'}, {judge.journal}",
            markup=False, soft_wrap=True,
        )  # fmt: skip
    raise typer.Exit(2 if result.ended == "tampered" else 0 if result.accepted else 1)


def _policy(policy: str) -> str:
    """A policy's name as it is, a file by its whole path: commands run from other folders."""
    return str(Path(policy).resolve()) if Path(policy).is_file() else policy
