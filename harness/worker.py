"""The first half of every check: sample, and nothing else.

Two callers. `serve` is the child process behind `executors.local`: it reads check ids from its input and
answers with samples, so that candidate code never runs in the process that judges. `work` is `fasttrack
worker PLAN`: it samples what a plan asks of a GPU machine and packs the raw samples into one gzip file of
JSON lines for `fasttrack collect`. Neither needs more than pydantic, rfc8785, torch and the pack. An
exception whose traceback passes through the pack's folder is the candidate's (`crashed`); any other is ours
(`fault`).
"""

import argparse
import gzip
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from harness.domain.change import Change, SourceTree
from harness.domain.check import Check, Samples, StageName
from harness.domain.errors import DeviceMissing, EvidenceError, FasttrackError, InputError
from harness.domain.machine import Machine, Tier
from harness.domain.pack import Pack
from harness.domain.plan import Plan
from harness.domain.record import Digest, Record
from harness.domain.stage import StageContext
from harness.engines.packs import harness_digest, load_pack, pack_digest
from harness.executors.local import ChildSampler
from harness.executors.sandbox import limit_this_process
from harness.forking import IDLE_THREAD
from harness.measure.machine import read_machine
from harness.stages import stage_of

__all__ = [
    "LIGHT_STAGES",
    "Job",
    "WorkerHeader",
    "lay_out",
    "needs_network",
    "node_objections",
    "read_plan",
    "read_samples",
    "sample_check",
    "serve",
    "serve_command",
    "work",
]

LIGHT_STAGES = (StageName.KERNELS, StageName.COVERAGE, StageName.EVALS, StageName.SWEEP)
"""Stages whose sampling needs no repository and no compiler: what a worker runs."""
MAX_SAMPLE_LINE_BYTES = 256 * 2**20


class Job(Record):
    """What a child needs to know. Lives in the run folder and dies with it."""

    plan: str
    """Path of the plan's JSON file."""
    repo: str | None
    cache: str
    logs: str
    ledger: str


class WorkerHeader(Record):
    """First line of a sample file: whose samples these are."""

    schema_version: Literal[1] = 1
    plan_digest: Digest
    harness_digest: Digest
    pack_digest: Digest
    machine: Machine
    tier: Tier


def serve_command(job_file: Path) -> tuple[str, ...]:
    """Command line of the child process.

    `-P`: else `-m` puts the current folder first, and a pull request's `harness` would judge in our place.
    """
    return (sys.executable, "-P", "-m", "harness.worker", "--serve", str(job_file))


def lay_out(plan: bytes, folder: Path, repo: Path | None = None) -> Path:
    """Put a plan and its job into a folder of this machine; the job's file. Without a repository the builds
    of base and head cannot be told apart.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plan_file, job_file = folder / "plan.json", folder / "job.json"
    plan_file.write_bytes(plan)
    places = {name: str(folder / name) for name in ("cache", "logs", "ledger")}
    found = None if repo is None else str(repo.resolve())
    job_file.write_bytes(Job(plan=str(plan_file), repo=found, **places).canonical())
    return job_file


def node_objections(plan: bytes) -> tuple[str, ...]:
    """What makes this machine another one than the plan's, or its code other code; empty where nothing
    does. Its memory and its name are not asked for.
    """
    made, here = Plan.model_validate_json(plan), read_machine()
    seen: dict[str, tuple[object, object]] = {
        "the harness": (made.harness_digest[:12], harness_digest()[:12]),
        "the pack": (made.pack_digest[:12], pack_digest(load_pack(made.pack))[:12]),
    }
    for name in type(here).model_fields:
        if name != "memory_bytes":
            seen[name.replace("_", " ")] = getattr(made.machine, name), getattr(here, name)
    return tuple(
        f"{n}: {own!r} here, {planned!r} planned" for n, (planned, own) in seen.items() if own != planned
    )


def needs_network(plan: Plan) -> bool:
    """Whether a check of the plan asks a server: only then has the child a network."""
    return any(dict(check.parameters).get("engine") == "vllm" for check in plan.checks)


def serve(job: Job) -> None:
    """Answer check ids from standard input until it closes. Standard output is kept for answers alone."""
    limit_this_process()
    threading.Thread(target=_end_with_parent, name=IDLE_THREAD, daemon=True).start()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a candidate prints goes to the log

    def say(key: str, value: object) -> None:
        answers.write(json.dumps({key: value}) + "\n")
        answers.flush()

    plan = read_plan(Path(job.plan))
    context = make_context(plan, load_pack(plan.pack), job, lambda text: say("note", text))
    context = replace(context, mark=lambda word: say("mark", word))
    checks = {check.id: check for check in plan.checks}
    say("ready", True)
    for line in sys.stdin:
        check = checks[line.strip()]
        try:
            say("samples", sample_check(check, context).model_dump(mode="json"))
        except FasttrackError as error:  # a server or a file that is not what it has to be, told in words
            say("obstacle", str(error))
        except Exception:  # noqa: BLE001  # the parent must hear of every fault, whatever it is
            say("fault", traceback.format_exc())


def _end_with_parent() -> None:
    """End this process and all that it started once nobody holds the other end of its input: whoever asked
    is gone, and what still ran would disturb other times.
    """
    watch = select.poll()
    watch.register(0, 0)  # a hang-up is always told
    watch.poll()
    os.killpg(0, signal.SIGKILL)


def work(
    plan: Plan, out: Path, folder: Path, on_note: Callable[[str], None], repo: Path | None = None
) -> int:
    """Sample a plan's light checks here into the file `out`; gives the number of checks sampled.

    Raises `DeviceMissing` when this machine is not the kind that the plan was made for.
    """
    machine = read_machine()
    _require_same_kind(plan, machine)
    pack = load_pack(plan.pack)
    header = WorkerHeader(
        plan_digest=plan.digest(),
        harness_digest=harness_digest(),
        pack_digest=pack_digest(pack),
        machine=machine,
        tier=plan.tier,
    )
    _require_same_code(plan, header)
    job_file = lay_out(plan.canonical(), folder, repo)
    todo = [c for c in plan.checks if c.stage in LIGHT_STAGES and c.unavailable is None]
    with gzip.open(out, "wt", encoding="utf-8") as sink, (folder / "child.log").open("ab") as log:
        sink.write(header.model_dump_json() + "\n")
        sampler = ChildSampler(
            serve_command(job_file), plan.tier, on_note, log, has_network=needs_network(plan)
        )
        try:
            for number, check in enumerate(todo, 1):
                on_note(f"{number}/{len(todo)} {check.id}")
                sink.write(sampler.sample(check).model_dump_json() + "\n")
        finally:
            sampler.close()
    return len(todo)


def read_samples(path: Path, plan: Plan) -> tuple[WorkerHeader, tuple[Samples, ...]]:
    """A worker's file, bound to the plan; raises `EvidenceError` for another plan's or a broken one."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as source:
            lines = _bounded_lines(source)
            header = WorkerHeader.model_validate_json(next(lines, ""))
            samples = tuple(Samples.model_validate_json(line) for line in lines)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise EvidenceError(
            f"{path}: not a complete sample file of `fasttrack worker` ({type(error).__name__}: "
            f"{str(error).splitlines()[0]}); copy it again, or run the worker again"
        ) from error
    if header.plan_digest != plan.digest():
        raise EvidenceError(
            f"{path}: made for plan {header.plan_digest[:12]}, not for this plan {plan.digest()[:12]}; "
            "collect it "
            "with the plan file that the worker was given"
        )
    _require_same_code(plan, header)
    return header, samples


def make_context(plan: Plan, pack: Pack, job: Job, on_note: Callable[[str], None]) -> StageContext:
    """What stages may use in this process; reads the change again where a repository is given."""
    change, tree = plan.change, None
    if job.repo is not None:
        change, tree = _load_range(plan, Path(job.repo))
    cache, logs, ledger = Path(job.cache), Path(job.logs), Path(job.ledger)
    for place in (cache, logs, ledger):
        place.mkdir(parents=True, exist_ok=True)
    return StageContext(
        pack=pack, claim=plan.claim, policy=plan.policy, zones=plan.zones, rules=plan.rules,
        change=change, machine=plan.machine, tier=plan.tier, tree=tree, cache=cache, logs=logs, ledger=ledger,
        progress=on_note, checks=plan.checks,
    )  # fmt: skip


def _load_range(plan: Plan, repo: Path) -> tuple[Change, SourceTree]:
    """The planned range read again; raises `InputError` when it is no longer what was planned."""
    from harness.repository import (
        Limits,
        load_change,
    )  # a worker has no repository and need not have its packages

    limits = Limits(plan.policy.max_changed_files, plan.policy.max_diff_bytes)
    change, tree = load_change(repo, plan.change.base, plan.change.head, limits, pr=plan.change.pr)
    change = change.model_copy(update={"is_dirty": plan.change.is_dirty})
    if change.digest() != plan.change_digest:
        raise InputError(
            f"{repo}: {plan.change.base[:12]}..{plan.change.head[:12]} is not what it was when planned"
        )
    return change, tree


def sample_check(check: Check, context: StageContext) -> Samples:
    """Samples of one check; a candidate's exception becomes samples that ended as `crashed`."""
    begun = time.monotonic()
    try:
        samples = stage_of(check.stage).sample(check, context)
    except Exception as error:
        if not _is_candidates(error, context.pack.root):
            raise
        last = traceback.format_exception_only(error)[-1].strip()
        return Samples(
            check=check.id, tier=context.tier, ended="crashed", duration_s=time.monotonic() - begun,
            detail=f"the candidate raised {last[:600]}",
        )  # fmt: skip
    return samples.model_copy(update={"duration_s": time.monotonic() - begun})


def _is_candidates(error: BaseException, pack_root: Path) -> bool:
    """Whether the exception, or one that it was raised in the course of, came out of the pack's own code."""
    root = str(pack_root.resolve()) + os.sep
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        frames = traceback.extract_tb(one.__traceback__)
        if any(os.path.realpath(frame.filename).startswith(root) for frame in frames):
            return True
        seen.add(id(one))
        one = one.__cause__ or one.__context__
    return False


def _require_same_kind(plan: Plan, machine: Machine) -> None:
    planned = [(gpu.name, gpu.arch) for gpu in plan.machine.gpus]
    here = [(gpu.name, gpu.arch) for gpu in machine.gpus]
    if here[: len(planned)] != planned:
        raise DeviceMissing(
            f"the plan was made for {planned or 'a machine without GPUs'} and this machine has "
            f"{here or 'none'}; make "
            "the plan for this machine: `fasttrack doctor --json` here, then `fasttrack plan --machine FILE "
            "--save PLAN`"
        )


def _require_same_code(plan: Plan, header: WorkerHeader) -> None:
    for what, planned, seen in (
        ("harness", plan.harness_digest, header.harness_digest),
        ("pack", plan.pack_digest, header.pack_digest),
    ):
        if planned != seen:
            raise EvidenceError(
                f"the {what} here (digest {seen[:12]}) is not the one that the plan was made with "
                f"({planned[:12]}); "
                "use the same checkout on both machines, or make the plan again"
            )


def read_plan(path: Path) -> Plan:
    try:
        return Plan.model_validate_json(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}: no plan can be read here ({error.strerror}); check the path") from error
    except ValidationError as error:
        raise InputError(
            f"{path}: holds no plan ({str(error).splitlines()[0]}); give what `fasttrack plan --save` wrote"
        ) from error


def _bounded_lines(source: Iterator[str]) -> Iterator[str]:
    for line in source:
        if len(line) > MAX_SAMPLE_LINE_BYTES:
            raise EvidenceError(
                f"a sample line of {len(line)} characters is over the limit of {MAX_SAMPLE_LINE_BYTES}"
            )
        yield line


def _main(argv: list[str] | None = None) -> int:
    """`python -m harness.worker`: the child process, or a worker on a machine without the command line's
    packages.
    """
    parser = argparse.ArgumentParser(prog="python -m harness.worker")
    parser.add_argument("plan", nargs="?", type=Path)
    parser.add_argument("--out", type=Path, default=Path("samples.jsonl.gz"))
    parser.add_argument("--folder", type=Path, default=Path("out/worker"))
    parser.add_argument("--repo", type=Path, help="with it the builds of base and head are compared here")
    parser.add_argument("--serve", type=Path, metavar="JOB")
    options = parser.parse_args(argv)
    if options.serve is not None:
        serve(Job.model_validate_json(options.serve.read_bytes()))
        return 0
    if options.plan is None:
        parser.error("a plan is needed")
    try:
        work(read_plan(options.plan), options.out, options.folder, _say, options.repo)
    except (InputError, DeviceMissing, EvidenceError) as error:
        _say(str(error))
        return 2
    return 0


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    sys.exit(_main())
