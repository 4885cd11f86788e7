"""What faults are planted in: the installed pack, its smoke plan, a scratch repository and an honest bundle.

Checks are those that the planner makes of the claim under the smoke policy, unchanged but for a shorter text
of the drift eval and sweeps that time every block (edited times are then judged for what they show, not for
where the run would have stopped), so that a fault is caught here only where a plain `fasttrack validate`
would have caught it; the suite picks the few that touch what was patched. What no fault changes (honest
samples, the bundle) is made once a run, in a folder that all workers share.
"""

import fcntl
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from tempfile import mkdtemp

from harness.documents import load_claim, load_policy_set
from harness.domain.bundle import BundleState, Environment
from harness.domain.change import Change
from harness.domain.check import Check, Outcome, Samples, StageName
from harness.domain.errors import FasttrackError, InputError
from harness.domain.faults import FaultColumn, Sighting
from harness.domain.machine import Tier
from harness.domain.pack import Pack
from harness.domain.plan import Plan
from harness.domain.policy import Policy, Proof
from harness.domain.stage import PlanRequest, StageContext
from harness.engines.packs import harness_digest, load_pack, pack_digest
from harness.evidence.bundle import write_bundle
from harness.evidence.reader import open_bundle
from harness.evidence.run_folder import open_run
from harness.evidence.verify import verify
from harness.executors.marks import Marks
from harness.faults.recorded import once
from harness.gate import Submission, decide, load_submission
from harness.gate.replan import replan
from harness.measure.machine import read_machine
from harness.pipeline import judge_samples, rejudge
from harness.planner import CodeDigests, make_plan, plan_seed
from harness.repository import load_change
from harness.stages import stage_of
from harness.worker import LIGHT_STAGES, sample_check

__all__ = ["Bench"]

NONCE = "00000000fa017000"
DRIFT_STEPS = 40
"""Positions of the drift eval here; a plain run has 96, so that it sees no less."""
STATISTICAL = frozenset({StageName.SWEEP})
"""Stages whose verdict noise alone can move; tasks among the evals are too."""
BUNDLE_POLICY = Policy(
    name="faults", summary="What the honest bundle of the fault suite must show.", zone_map="fasttrack",
    proofs=(Proof(stage=StageName.ISOLATION), Proof(stage=StageName.EVALS, subjects=("drift",))),
)  # fmt: skip

TEST = """from numpy import isclose


def test_rows() -> None:
    assert isclose(1.0, 1.0 + 1e-5, atol=1e-3)
"""
"""A test of the scratch repository, for changes that weaken one."""


class Bench:
    """One worker's workplace; everything it makes lies under `folder`."""

    def __init__(
        self,
        folder: Path,
        pack: str = "k3_decode",
        seed: int = 0,
        tier: Tier = Tier.SMOKE,
        cache: Path | None = None,
    ) -> None:
        self.folder = folder
        self.cache = cache if cache is not None else folder / "stages" / "cache"
        self.seed = seed
        self.tier = tier
        self._pack_name = pack
        self._plans: dict[StageName, Plan] = {}
        folder.mkdir(parents=True, exist_ok=True)

    @cached_property
    def pack(self) -> Pack:
        """The installed pack; its oracle answers each question once."""
        return once(load_pack(self._pack_name))

    @cached_property
    def request(self) -> PlanRequest:
        """What a plain smoke run of the pack's own claim plans from, bound to no change."""
        policy, zones, rules = load_policy_set("smoke")
        change = Change(repository="none", base="0" * 40, head=f"{self.seed:040x}")
        return PlanRequest(
            pack=self.pack, claim=load_claim(self.pack.claim_file()), policy=policy, zones=zones, rules=rules,
            change=change, machine=read_machine(), tier=self.tier, is_full=False,
            seed=plan_seed(change.head, NONCE),
        )  # fmt: skip

    def plan(self, stage: StageName) -> Plan:
        """One stage's part of a plain smoke run; isolation is planned with a change."""
        if stage not in self._plans:
            digests = CodeDigests(harness_digest(), pack_digest(self.pack))
            self._plans[stage] = make_plan(self.request, digests, NONCE, (stage,))
        return self._plans[stage]

    def checks(self, *parts: str) -> tuple[Check, ...]:
        """Planned checks that this machine can run and whose id begins with any of `parts`, in plan order;
        `{arch}` in a part stands for the machine's own architecture.

        Raises `InputError` for a part that no id begins with: the fault then looks at nothing.
        """
        parts = tuple(part.replace("{arch}", self.request.machine.arch) for part in parts)
        stages = [s for s in LIGHT_STAGES if any(part.startswith(f"{s.value}/") for part in parts)]
        checks = [c for s in stages for c in self.plan(s).checks if c.unavailable is None]
        idle = [part for part in parts if not any(c.id.startswith(part) for c in checks)]
        if idle:
            raise InputError(
                f"no planned check's id begins with {', '.join(idle)}; name checks of `fasttrack plan`"
            )
        return tuple(_shortened(c) for c in checks if c.id.startswith(parts))

    def run(self, checks: Sequence[Check], request: PlanRequest | None = None) -> tuple[Sighting, ...]:
        """What the real stages say of checks, sampled and judged here and now."""
        return tuple(self.seen(check, self._outcome(check, request or self.request)) for check in checks)

    def seen(self, check: Check, outcome: Outcome) -> Sighting:
        """An outcome as a sighting."""
        is_task = check.stage is StageName.EVALS and check.subject != "drift"
        return Sighting(
            column=check.stage.value, subject=check.id, status=outcome.status.value,
            words=outcome.summary[:600], is_statistical=check.stage in STATISTICAL or is_task,
        )  # fmt: skip

    def honest(self, part: str) -> tuple[Check, Samples]:
        """The first planned check whose id begins with `part`, and samples of it from the pack as it is."""
        check = self.checks(part)[0]
        kept = self.folder / "honest" / f"{check.id.replace('/', '~')}.json"
        with self._once(kept) as is_first:
            if is_first:
                samples = self._sampled(check, self.request)
                kept.write_bytes(samples.canonical())
        return check, Samples.from_json(kept.read_bytes())

    def judge(self, check: Check, samples: Samples) -> Sighting:
        """What the real judge says of samples."""
        return self.seen(check, judge_samples(self.plan(StageName.COVERAGE), check, samples))

    def context(self, request: PlanRequest) -> StageContext:
        """Folders and inputs of a stage for a request."""
        folder = self.folder / "stages"
        for place in (self.cache, folder / "logs", folder / "ledger"):
            place.mkdir(parents=True, exist_ok=True)
        return StageContext(
            pack=request.pack, claim=request.claim, policy=request.policy, zones=request.zones,
            rules=request.rules, change=request.change, machine=request.machine, tier=request.tier, tree=None,
            cache=self.cache, logs=folder / "logs", ledger=folder / "ledger",
            progress=lambda _: None,
        )  # fmt: skip

    def isolate(self, edit: Callable[[Path], None]) -> tuple[Sighting, ...]:
        """What isolation says of a commit made by `edit` on top of the pack's own tree."""
        repo = Path(mkdtemp(dir=self.folder, prefix="change-")) / "repo"
        shutil.copytree(self.repository(), repo)
        edit(repo)
        _commit(repo)
        try:
            change, tree = load_change(repo, "HEAD~1", "HEAD")
            with tree:
                request = replace(self.request, change=change)
                context = replace(self.context(request), tree=tree)
                isolation = stage_of(StageName.ISOLATION)
                checks = isolation.plan(request)
                return tuple(self.seen(check, isolation.run(check, context)) for check in checks)
        finally:
            shutil.rmtree(repo.parent)

    def repository(self) -> Path:
        """A repository with two commits: the pack's sources, then an honest change to one of them."""
        place = self.folder / "repository"
        with self._once(self.folder / "repository.made") as is_first:
            if is_first:
                _make_repository(place, self.pack)
        return place

    def bundle(self) -> Path:
        """A fresh copy of an honest bundle, which verifies and which the gate admits under its policy."""
        place = self.folder / "bundle"
        with self._once(self.folder / "bundle.made") as is_first:
            if is_first:
                self._write_bundle(place)
        copy = Path(mkdtemp(dir=self.folder, prefix="copy-")) / "bundle"
        shutil.copytree(place, copy)
        return copy

    def weigh(self, folder: Path, head: str | None = None) -> tuple[Sighting, ...]:
        """What `bundle verify` and the gate say of a bundle."""
        verification = verify(folder, _rejudge(folder), replan)
        problems = "; ".join(f"{p.path} {p.message}" for p in verification.problems)
        first = _refused("verify", verification.state is not BundleState.VERIFIED, problems)
        verdict = decide([load_submission(folder, _rejudge(folder), replan)], BUNDLE_POLICY, head)
        return first, _refused("gate", verdict.exit_code != 0, "; ".join(verdict.reasons))

    def scratch(self) -> Path:
        """A new empty folder; the caller removes it."""
        return Path(mkdtemp(dir=self.folder, prefix="scratch-"))

    def submission(self, folder: Path) -> Submission:
        """A bundle as the gate takes it."""
        return load_submission(folder, _rejudge(folder), replan)

    def _outcome(self, check: Check, request: PlanRequest) -> Outcome:
        return judge_samples(self.plan(StageName.COVERAGE), check, self._sampled(check, request))

    def _sampled(self, check: Check, request: PlanRequest) -> Samples:
        """Samples made here, with this process's clock in the place of the one outside."""
        marks = Marks()
        return marks.attach(sample_check(check, replace(self.context(request), mark=marks.add)))

    def _write_bundle(self, place: Path) -> None:
        repo = self.repository()
        change, tree = load_change(repo, "HEAD~1", "HEAD")
        zones, rules = self.request.zones, self.request.rules
        with tree:
            request = replace(
                self.request, policy=BUNDLE_POLICY, change=change, seed=plan_seed(change.head, NONCE),
                zones=zones, rules=rules,
            )  # fmt: skip
            digests = CodeDigests(harness_digest(), pack_digest(self.pack))
            plan = make_plan(request, digests, NONCE)
            context = replace(self.context(request), tree=tree)
            with open_run(place, plan) as run:
                for check in plan.checks:
                    samples = run.clean(sample_check(check, context))
                    run.record(judge_samples(plan, check, samples), samples)
                write_bundle(run, Environment(command=("fasttrack", "validate")))

    @contextmanager
    def _once(self, mark: Path) -> Iterator[bool]:
        """Whether the caller is the first of all workers to make `mark`; others wait until it is there."""
        mark.parent.mkdir(parents=True, exist_ok=True)
        with mark.with_name(f"{mark.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            is_first = not mark.exists()
            yield is_first
            if is_first:
                mark.touch()


def _shortened(check: Check) -> Check:
    """The drift eval over fewer positions, sweeps without an early stop; any other check as it is."""
    if check.stage is StageName.SWEEP:
        thresholds = tuple(
            t.model_copy(update={"value": 0.0}) if t.name == "interval_width" else t
            for t in check.thresholds
            if t.name != "time_s"
        )
        return check.model_copy(update={"thresholds": thresholds})
    if check.subject != "drift":
        return check
    parameters = tuple((k, min(DRIFT_STEPS, int(v or 0)) if k == "steps" else v) for k, v in check.parameters)
    return check.model_copy(update={"parameters": parameters})


def _rejudge(folder: Path) -> Callable[[Check, Samples | None], Outcome | None]:
    """The real judge; nothing for a bundle whose plan cannot be read."""
    try:
        return rejudge(open_bundle(folder).plan)
    except FasttrackError:
        return lambda _check, _samples: None


def _refused(subject: str, is_refused: bool, words: str) -> Sighting:
    column: FaultColumn = "bundle"
    return Sighting(
        column=column,
        subject=subject,
        status="REFUSED" if is_refused else "PASS",
        words=(words or "sound")[:600],
    )


def _make_repository(place: Path, pack: Pack) -> None:
    inner = place / pack.repository_prefix
    shutil.copytree(
        pack.root, inner, ignore=shutil.ignore_patterns("__pycache__", "*.jsonl", "*.safetensors", "*.svg")
    )
    tests = place / "tests" / pack.name / "test_rows.py"
    tests.parent.mkdir(parents=True)
    tests.write_text(TEST)
    _git(place, "init", "-q", "-b", "main")
    _commit(place)
    note = inner / "README.md"
    note.write_text("What this pack is, and how its ops are checked.\n")
    _commit(place)


def _commit(repo: Path) -> None:
    _git(repo, "add", "-A", "-f", ".")
    _git(repo, "commit", "-q", "--allow-empty", "-m", "change")


def _git(repo: Path, *arguments: str) -> None:
    who = ("-c", "user.name=faults", "-c", "user.email=faults@localhost", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *who, *arguments], cwd=repo, check=True, capture_output=True)
