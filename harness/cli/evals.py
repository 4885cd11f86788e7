"""`fasttrack evals list|run|compare`."""

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.selectors import JsonOutput, Out, PackName, Resume, Selection, make_selected_plan, selecting

if TYPE_CHECKING:  # records load when a command runs
    from harness.domain.plan import Plan
    from harness.domain.policy import Proof

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True)
BundleA = Annotated[Path, typer.Argument(metavar="A", help="Bundle: folder or .tar.zst.")]
BundleB = Annotated[Path, typer.Argument(metavar="B", help="Bundle to compare with.")]
Data = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="hub|fixture|PATH",
        help="Rows of mrcr and aime25: the hub's at the pinned revision, generated ones in a small model's "
        "words, a Parquet or JSON-lines file, or a folder with the hub's files. Of drift: a file of text.",
    ),
]
EngineName = Annotated[str, typer.Option("--engine", help="in-process, or vllm: servers of --server.")]
ServerFile = Annotated[
    Path | None,
    typer.Option(
        "--server", help="Settings of both servers (harness/engines/README.md); with --engine vllm."
    ),
]
Tasks = Annotated[
    list[str] | None,
    typer.Option("--task", help="Run this eval whether the policy asks for it or not; may be repeated."),
]


@app.command("list")
def list_evals(pack: PackName = "k3_decode", json: JsonOutput = False) -> None:
    """List the evals that a pack can be judged by, with model, scorer, number of items and data."""
    from harness.cli.console import out, print_json

    rows = [*_embedded(pack), *_official(), *_features()]
    if json:
        print_json(rows)
        return
    for row in rows:
        size = f"{row['smoke']} {row['unit']} ({row['full']} with --full), " if row["smoke"] else ""
        data = f", {row['dataset']} at {str(row['revision'])[:12]}" if "dataset" in row else ""
        how = f"scorer {row['scorer']}" if row["scorer"] else str(row["proves"])
        out.print(
            f"{row['name']}: {row['model']}, {size}{how}{data}",
            markup=False, soft_wrap=True,
        )  # fmt: skip


@app.command()
@selecting(without=("stage", "machine"), policy="smoke")
def run(
    selection: Selection,
    name: Annotated[list[str] | None, typer.Argument(help="Which; all of the policy where none.")] = None,
    task: Tasks = None,
    data: Data = None,
    out: Out = Path("out/evals"),
    resume: Resume = False,
    engine: EngineName = "in-process",
    server: ServerFile = None,
    json: JsonOutput = False,
) -> None:
    """Run evals, stock and optimised on the same items, into a bundle.

    With --task the bundle is made under the policy with its evals replaced by these, and says so; the gate
    asks for the policy's own all the same.
    """
    from harness.cli.finish import RunOptions, finish_run, run_checks, validate_selection
    from harness.evidence.run_folder import open_run

    chosen = replace(selection, stages=("evals",), only=tuple(name or selection.only))
    if engine != "in-process" or server is not None:
        task = _served_tasks(task or [], engine, server, data)
    elif task:
        _require_known(task, selection.pack)
    if not task and data is None:
        raise typer.Exit(validate_selection(chosen, out, RunOptions(resume, True, json)))
    plan = _asked_plan(chosen, _subjects(task or [], data), out if resume else None)
    with open_run(out, plan) as run_folder:
        run_checks(plan, run_folder, selection.repo, keep_going=True)
        raise typer.Exit(finish_run(plan, run_folder, as_json=json))


@app.command()
def compare(first: BundleA, second: BundleB, json: JsonOutput = False) -> None:
    """Compare the evals of two bundles: 0 alike, 1 not, 2 not comparable, as scores over other rows are."""
    from harness.cli.compare import compare_stage
    from harness.cli.console import out, print_json
    from harness.domain.check import StageName

    if unlike := _other_rows(first, second):
        if json:
            print_json({"obstacles": unlike, "rows": [], "exit_code": 2})
        for words in () if json else unlike:
            out.print(f"not comparable: {words}", markup=False, soft_wrap=True)
        raise typer.Exit(2)
    raise typer.Exit(compare_stage(first, second, StageName.EVALS, as_json=json))


def _other_rows(first: Path, second: Path) -> list[str]:
    """Checks of both bundles that were asked over other rows. Generated rows follow the plan's seed, which
    differs from run to run as those of embedded tasks do.
    """
    from harness.domain.check import StageName
    from harness.evidence.pack import bundle_folder
    from harness.evidence.reader import open_bundle

    found: list[dict[str, tuple[str, str]]] = []
    for path in (first, second):
        with bundle_folder(path) as folder:
            bundle = open_bundle(folder)
            tables = {c.id: bundle.samples(c.id) for c in bundle.plan.of_stage(StageName.EVALS)}
            found.append({})
            for check, samples in tables.items():
                data = None if samples is None else samples.table("data")
                for row in () if data is None else data.records():
                    found[-1][check] = (str(row["kind"]), str(row["digest"]))
    one, two = found
    return [
        f"{check} was asked over {one[check][0]} rows {one[check][1][:12]}, and over {two[check][1][:12]}"
        for check in sorted(one.keys() & two.keys())
        if one[check][0] != "generated" and one[check][1] != two[check][1]
    ]


def _served_tasks(tasks: list[str], engine: str, server: Path | None, data: str | None) -> list[str]:
    """The tasks as they are asked of servers; tells the sampler where the servers' settings lie. Raises
    `InputError` for what servers cannot be asked.
    """
    from harness.domain.errors import InputError
    from harness.engines.served import FILE_VARIABLE, load_settings
    from harness.stages.evals.features import FEATURES
    from harness.stages.evals.planning import ENGINE, OFFICIAL

    if engine != "vllm" or server is None:
        raise InputError("servers are asked with `--engine vllm --server FILE`, both together")
    load_settings(server)
    os.environ[FILE_VARIABLE] = str(server.resolve())
    known = (*OFFICIAL, *FEATURES, "features", ENGINE)
    if not tasks or (wrong := [task for task in tasks if task not in known]):
        what = f"--task {wrong[0]}" if tasks else "no --task"
        raise InputError(f"{what}: of servers can be asked {', '.join(known)}; name one or more with --task")
    if any(task in OFFICIAL for task in tasks) and data in (None, "fixture"):
        raise InputError("official tasks of servers need rows: --data hub, or --data FILE")
    return [task if task in OFFICIAL and data == "hub" else f"{task}_served" for task in tasks]


def _subjects(tasks: list[str], data: str | None) -> tuple[str, ...]:
    """Subjects that the planner knows, for tasks over these rows; tells the sampler where the rows lie."""
    from harness.domain.errors import InputError
    from harness.stages.evals.data import FOLDER_VARIABLE
    from harness.stages.evals.planning import OFFICIAL

    readers = (*OFFICIAL, "drift") if data not in (None, "hub", "fixture") else tuple(OFFICIAL)
    served = tuple(f"{task}_served" for task in OFFICIAL)
    if data is not None and any(task in served for task in tasks) and Path(data).is_file():
        os.environ[FOLDER_VARIABLE] = str(Path(data).resolve())
        return tuple(tasks)
    if data is not None and not any(task in readers for task in tasks):
        known = ", ".join(readers)
        raise InputError(f"--data {data} says what {known} read; name one of them with --task")
    suffix = {None: "", "hub": "", "fixture": "_fixture"}.get(data)
    if suffix is None:
        path = Path(str(data)).resolve()
        if not path.exists():
            raise InputError(f"--data {data}: there is no such file or folder; say hub, fixture, or a path")
        os.environ[FOLDER_VARIABLE] = str(path)
        suffix = "_local" if path.is_file() else ""
    return tuple(f"{task}{suffix}" if task in readers else task for task in tasks)


def _require_known(tasks: list[str], pack: str) -> None:
    """Raises `InputError` for a name that `fasttrack evals list` does not have."""
    from harness.domain.errors import InputError
    from harness.stages.evals.planning import FORMS, OFFICIAL

    listed = [str(row["name"]) for row in (*_embedded(pack), *_official(), *_features())]
    known = list(dict.fromkeys((*listed, *OFFICIAL, "features")))
    for task in tasks:
        name, _, form = task.rpartition("_")
        if task not in known and (name not in known or form not in FORMS):
            raise InputError(f"--task {task}: there is no such eval; there are {', '.join(known)}")


def _asked_plan(selection: Selection, subjects: tuple[str, ...], resumed: Path | None) -> "Plan":
    """The plan of these evals under the selection's policy; raises `InputError` where --out holds another
    run.
    """
    from harness.domain.check import StageName
    from harness.domain.errors import InputError
    from harness.engines.packs import harness_digest, load_pack, pack_digest
    from harness.evidence.run_folder import load_plan
    from harness.planner import CodeDigests, make_plan, request_again

    stored = None if resumed is None else load_plan(resumed)
    chosen = replace(selection, nonce=stored.nonce) if stored is not None else selection
    base = make_selected_plan(replace(chosen, only=()))
    proofs = tuple(_asked_proof(p, subjects) if p.stage is StageName.EVALS else p for p in base.policy.proofs)
    policy = base.policy.model_copy(update={"name": f"{base.policy.name}.evals", "proofs": proofs})
    pack = load_pack(base.pack)
    request = replace(request_again(base, pack, base.machine), policy=policy)
    digests = CodeDigests(harness_digest(), pack_digest(pack))
    made = make_plan(request, digests, base.nonce, (StageName.EVALS,), selection.only)
    plan = made.model_copy(update={"change_digest": base.change_digest})
    if stored is not None and plan.digest() != stored.digest():
        raise InputError(f"{resumed} holds a run of another plan; start anew in another folder (--out)")
    return plan


def _asked_proof(proof: "Proof", subjects: tuple[str, ...]) -> "Proof":
    """The policy's proof of evals for these subjects: cells that it demands of others are not asked."""
    cells = [cell.model_dump() for cell in proof.cells]
    for cell in cells:
        cell["evals"] = tuple(name for name in cell["evals"] if name in subjects)
    kept = [new for new, old in zip(cells, proof.cells, strict=True) if new["evals"] or not old.evals]
    return type(proof).model_validate(proof.model_dump() | {"subjects": subjects, "cells": kept})


def _embedded(pack: str) -> list[dict[str, object]]:
    from harness.engines.packs import load_pack
    from harness.stages.evals.planning import drift_tokens
    from harness.stages.evals.scorers import SCORER_IDS

    loaded = load_pack(pack)
    drift: dict[str, object] = {
        "name": "drift", "model": loaded.smoke_model, "scorer": "kl-to-oracle/1",
        "smoke": drift_tokens(False), "full": drift_tokens(True), "unit": "positions",
    }  # fmt: skip
    return [
        drift,
        *(
            {"name": t.name, "model": t.model, "scorer": SCORER_IDS[t.scorer], "smoke": t.smoke_items,
             "full": t.full_items, "unit": "items"}
            for t in loaded.eval_tasks()
        ),
    ]  # fmt: skip


def _official() -> list[dict[str, object]]:
    from harness.stages.evals.data import sources
    from harness.stages.evals.scorers import SCORER_IDS

    return [
        {"name": name, "model": "served, or a small one with --data", "smoke": None, "full": None,
         "unit": "items", "scorer": " and ".join(SCORER_IDS[s] for s in _scorers(name)),
         "dataset": source.dataset, "revision": source.revision, "files": dict(source.files)}
        for name, source in sources().items()
    ]  # fmt: skip


def _scorers(name: str) -> tuple[str, ...]:
    return ("aime", "lm_eval_aime25") if name == "aime25" else ("mrcr",)


def _features() -> list[dict[str, object]]:
    from harness.stages.evals.features import FEATURES

    return [
        {"name": name, "model": "small", "scorer": None, "smoke": None, "full": None, "proves": proves}
        for name, proves in FEATURES.items()
    ]
