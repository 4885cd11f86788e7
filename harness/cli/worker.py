"""`fasttrack worker` and `fasttrack collect`: sample on a bare GPU machine, judge anywhere afterwards."""

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.selectors import JsonOutput, KeepGoing, Out

__all__ = ["collect_app", "worker_app"]

worker_app = typer.Typer()
collect_app = typer.Typer()
PlanFile = Annotated[Path, typer.Argument(help="A plan written by `fasttrack plan --save`.")]


@worker_app.command()
def worker(
    plan: PlanFile,
    out: Annotated[Path, typer.Option("--out", help="The one file to bring back.")] = Path(
        "samples.jsonl.gz"
    ),
    folder: Annotated[Path, typer.Option("--folder", help="Scratch: compiled kernels, logs.")] = Path(
        "out/worker"
    ),
    repo: Annotated[
        Path | None, typer.Option("--repo", help="Repository: also compare the builds of base and head.")
    ] = None,
) -> None:
    """Run a plan's checks here, with few packages and no network; leaves samples for `fasttrack collect`."""
    from harness.cli.console import err
    from harness.worker import read_plan, work

    count = work(read_plan(plan), out, folder, lambda text: err.print(text, markup=False), repo)
    err.print(f"{count} checks sampled into {out}; now: fasttrack collect {plan} {out}", markup=False)


@collect_app.command()
def collect(
    plan: PlanFile,
    samples: Annotated[Path, typer.Argument(help="The worker's samples.jsonl.gz.")],
    out: Out = Path("out/collect"),
    repo: Annotated[
        Path | None, typer.Option("--repo", help="Repository: also run isolation and audit here.")
    ] = None,
    keep_going: KeepGoing = True,
    json: JsonOutput = False,
) -> None:
    """Judge a worker's samples, run here what needs no GPU, and make the bundle and its report."""
    from harness.cli.finish import finish_run, run_checks
    from harness.collect import collect_samples
    from harness.evidence.run_folder import open_run
    from harness.worker import read_plan

    made = read_plan(plan)
    with open_run(out, made) as run:
        header, _ = collect_samples(made, samples, run)
        if repo is not None:
            run_checks(made, run, repo, keep_going)
        raise typer.Exit(finish_run(made, run, as_json=json, machine=header.machine))
