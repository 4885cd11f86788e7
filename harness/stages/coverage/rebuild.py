"""Two builds of the pack, base and head, opened side by side: do they differ in what the diff touches?

Table `builds` says of each side whether the pack was loaded from its own folder and how many optimised
launches it made; `loaded` gives a digest for each file, loaded module and compiled binary of each side;
`touched` which files of the pack the diff touches. Judged here too: comparing numbers of two builds that are
one, or that differ in more than the diff, says nothing about the diff.
"""

import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Literal

from harness.domain.change import SourceTree
from harness.domain.check import Check, Control, Figure, Outcome, Samples, SampleTable, Status, judged
from harness.domain.errors import InputError
from harness.executors.sandbox import sandboxed
from harness.stages.coverage.build_child import SEEN, BuildJob, BuildSeen
from harness.stages.coverage.next_steps import next_steps
from harness.stages.coverage.probe import Probe, Row
from harness.stages.coverage.witnesses import records

__all__ = ["judge_rebuild", "sample_rebuild"]

Side = Literal["base", "head"]
SIDES: tuple[Side, Side] = ("base", "head")
LIMIT_S = 300.0
MAX_NAMED = 4
Builds = Mapping[Side, Mapping[str, Mapping[str, str]]]
"""Digest by build, kind and name."""


def sample_rebuild(probe: Probe) -> tuple[SampleTable, ...]:
    """Both builds written out, opened and driven, each in a process of its own; nothing where there is no
    repository.
    """
    tree, prefix = probe.context.tree, probe.context.pack.repository_prefix
    touched = tuple((name,) for name in str(probe.check.parameter("touched") or "").split("\n") if name)
    builds: list[Row] = []
    loaded: list[Row] = []
    if tree is not None:
        with ThreadPoolExecutor(len(SIDES)) as pool:
            jobs = [(side, _written_build(probe, tree, side)) for side in SIDES]
            for side, seen in pool.map(lambda job: (job[0], _opened(probe, job[0], job[1])), jobs):
                builds.append((side, seen.is_own, seen.launches))
                for kind in ("files", "modules", "binaries"):
                    loaded += [(side, kind, name, digest) for name, digest in getattr(seen, kind)]
    return (
        SampleTable(name="two_builds", columns=("build", "is_own", "launches"), rows=tuple(builds)),
        SampleTable(name="loaded", columns=("build", "kind", "name", "digest"), rows=tuple(loaded)),
        SampleTable(
            name="touched", columns=("name",), rows=tuple((name.removeprefix(prefix),) for (name,) in touched)
        ),
    )


def judge_rebuild(check: Check, samples: Samples) -> Outcome:
    """PASS where base and head differ exactly in what the diff touches; INVALID where not."""
    sides = {side: _loaded(samples, side) for side in SIDES}
    objection = _objection(samples, sides)
    same = _objection(samples, {"base": sides["head"], "head": sides["head"]})
    control = Control(
        kind="planted",
        description="head's build in the place of base's",
        failed=bool(same),
        observed=same or "nobody noticed",
    )
    differing = {kind: len(_differing(sides, kind)) for kind in ("files", "modules", "binaries")}
    figures = tuple(Figure(name=f"differing_{kind}", value=count) for kind, count in differing.items())
    if not records(samples, "two_builds"):
        status, words = Status.NO_EVIDENCE, "without a repository there are no two builds"
    elif objection:
        status, words = Status.INVALID, objection
    else:
        status = Status.PASS
        words = (
            f"base and head differ in the {differing['files']} files that the diff touches and in no other; "
            f"of what was loaded, {differing['modules']} modules and {differing['binaries']} binaries differ"
        )
    return judged(check, samples, status, words, next_steps(check), control, figures)


def _objection(samples: Samples, sides: Builds) -> str:
    """What makes the two builds no base and head of this diff; empty where nothing does."""
    for row in records(samples, "two_builds"):
        if not row["is_own"]:
            return f"the pack of {row['build']} was loaded from elsewhere: neither build is what it is called"
        if not row["launches"]:
            return f"the build of {row['build']} launched no optimised op"
    touched = {str(row["name"]) for row in records(samples, "touched")}
    files = _differing(sides, "files")
    if left := sorted(touched - files):
        return f"the diff touches {_named(left)}, and both builds hold the same there"
    if more := sorted(files - touched):
        return f"the builds differ in {_named(more)}, which the diff does not touch"
    if strange := sorted(_differing(sides, "modules") - touched):
        return f"the code of {_named(strange)} is loaded differently, and the diff does not touch it"
    return ""


def _differing(sides: Builds, kind: str) -> set[str]:
    """Names whose digest is not the same on both sides. A module that one side alone loads is no difference
    of code; a file or binary that one side alone has is one.
    """
    base, head = sides["base"][kind], sides["head"][kind]
    names = base.keys() & head.keys() if kind == "modules" else base.keys() | head.keys()
    return {name for name in names if base.get(name) != head.get(name)}


def _loaded(samples: Samples, side: str) -> Mapping[str, Mapping[str, str]]:
    found: dict[str, dict[str, str]] = {"files": {}, "modules": {}, "binaries": {}}
    for row in records(samples, "loaded"):
        if row["build"] == side:
            found[str(row["kind"])][str(row["name"])] = str(row["digest"])
    return found


def _named(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def _written_build(probe: Probe, tree: SourceTree, side: Side) -> Path:
    """The pack of one side as files; gives the folder that goes first on the path. What this build compiled
    before stays beside them: a pack names it by its sources.
    """
    prefix = PurePosixPath(probe.context.pack.repository_prefix)
    folder = probe.context.cache / "builds" / side
    shutil.rmtree(folder / "source", ignore_errors=True)
    for name in tree.paths(side):
        path = PurePosixPath(name)
        if path.is_relative_to(prefix) and ".." not in path.parts:
            content = tree.read(side, name)
            place = folder / "source" / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content or b"")
    return folder / "source" / prefix.parent


def _opened(probe: Probe, side: Side, root: Path) -> BuildSeen:
    """What a child process saw of one build; raises `InputError` where the build does not run."""
    import os
    import subprocess
    import sys

    folder = probe.context.cache / "builds" / side
    folder.mkdir(parents=True, exist_ok=True)
    job = BuildJob(
        pack=probe.context.pack.name, root=str(root.resolve()), folder=str(folder.resolve()),
        request=probe.request("optimised"), seed=int(probe.check.parameter("seed") or 0),
    )  # fmt: skip
    path = folder / "job.json"
    path.write_bytes(job.canonical())
    command = (sys.executable, "-P", "-m", "harness.stages.coverage.build_child", str(path))
    places = ":".join(filter(None, (str(root.resolve()), *_our_places(), os.environ.get("PYTHONPATH"))))
    box = sandboxed(command, PYTHONPATH=places, PYTHONDONTWRITEBYTECODE="1")
    log = probe.context.logs / f"{probe.check.id.replace('/', '.')}.{side}.log"
    with log.open("wb") as sink:
        done = subprocess.run(
            box.argv, env=box.environment, stdout=sink, stderr=sink, timeout=LIMIT_S, check=False
        )
    if done.returncode or not (folder / SEEN).is_file():
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        raise InputError(
            f"the build of {side} did not run (exit code {done.returncode}): {''.join(last)[:300]}; its log "
            f"is {log.name}"
        )
    return BuildSeen.from_json((folder / SEEN).read_bytes())


def _our_places() -> Iterator[str]:
    """Where this harness lies, behind the build: a bare machine has it on its path alone."""
    yield str(Path(__file__).resolve().parents[3])
