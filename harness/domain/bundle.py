"""What a bundle says of itself: the manifest, the environment, and what verifying it found.

Invariant: a manifest binds every file of its bundle by digest, and binds the bundle to one plan, claim,
policy, harness and pull request head. It is written last, so a bundle without one is a run that has not
finished.
"""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import AwareDatetime, Field, model_validator

from harness.domain.change import Change, Sha
from harness.domain.check import CheckId, Finding
from harness.domain.machine import Machine, Tier
from harness.domain.plan import Plan
from harness.domain.record import Digest, Record, Whole

__all__ = [
    "BUNDLE_SCHEMA", "VOLATILE_FIELDS", "BundleState", "ChangeReference", "Environment", "FileEntry",
    "Manifest", "Problem", "SamplesHeader", "Verification", "VerificationStep",
]  # fmt: skip

BUNDLE_SCHEMA = 1
"""Schema version that this harness writes."""
VOLATILE_FIELDS = ("created",)
"""Fields of the manifest that may differ between two runs with the same plan, outcomes and samples."""

BundlePath = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9_.=~+@-]+(/[A-Za-z0-9_.=~+@-]+){0,5}$", max_length=240)
]


class FileEntry(Record):
    """One file of a bundle."""

    path: BundlePath
    """Relative to the bundle's root, with forward slashes."""
    sha256: Digest
    size: Whole = Field(ge=0)
    """In bytes."""


class ChangeReference(Record):
    """Which change the evidence is about; the plan holds the whole of it."""

    repository: str
    pr: Whole | None
    base: Sha
    head: Sha
    is_dirty: bool

    @classmethod
    def of(cls, change: Change) -> Self:
        """The reference to a change."""
        return cls(
            repository=change.repository,
            pr=change.pr,
            base=change.base,
            head=change.head,
            is_dirty=change.is_dirty,
        )


class Environment(Record):
    """Settings that can change a result. Variables come from an allow-list; text is redacted."""

    schema_version: Literal[1] = 1
    command: tuple[str, ...] = ()
    """Command line that made the run, redacted."""
    variables: tuple[tuple[str, str], ...] = ()
    """(name, value) of allow-listed variables that were set, sorted."""
    image_digest: str | None = None
    """Container image, where the run says which."""


class Manifest(Record):
    """`manifest.json`."""

    schema_version: Literal[1] = 1
    created: AwareDatetime
    """When the bundle was finished (UTC). Volatile."""
    harness_version: str
    harness_digest: Digest
    pack: str
    pack_digest: Digest
    claim_digest: Digest
    policy_digest: Digest
    plan_digest: Digest
    change: ChangeReference
    machine: Machine
    """Where the samples were made."""
    tier: Tier
    files: tuple[FileEntry, ...]
    """Every file but the manifest and `attestation.json`, sorted by path."""

    @model_validator(mode="after")
    def _files_are_sorted_and_distinct(self) -> Self:
        paths = [f.path for f in self.files]
        if paths != sorted(set(paths)):
            raise ValueError("manifest.files must be sorted by path, each path once")
        return self

    @classmethod
    def of(cls, plan: Plan, machine: Machine, files: tuple[FileEntry, ...], created: datetime) -> Self:
        """The manifest of a plan's finished run."""
        return cls(
            created=created,
            harness_version=plan.harness_version,
            harness_digest=plan.harness_digest,
            pack=plan.pack,
            pack_digest=plan.pack_digest,
            claim_digest=plan.claim.digest(),
            policy_digest=plan.policy.digest(),
            plan_digest=plan.digest(),
            change=ChangeReference.of(plan.change),
            machine=machine,
            tier=plan.tier,
            files=files,
        )


class SamplesHeader(Record):
    """`samples/<check>/samples.json`: a check's samples without the rows, which lie beside it in Parquet."""

    schema_version: Literal[1] = 1
    check: CheckId
    plan: Digest | None = None
    """Plan whose question these samples answer; None in bundles from before samples named it."""
    tier: Tier
    ended: Literal["ran", "crashed", "timed_out"]
    detail: str
    duration_s: float = Field(ge=0)
    findings: tuple[Finding, ...]
    tables: tuple[str, ...]
    """Names, in the order of the samples; each is a file `<name>.parquet`."""


class BundleState(StrEnum):
    """What verifying concluded."""

    VERIFIED = "verified"
    INCOMPLETE = "incomplete"
    """The run has not finished, or planned checks have no outcome; what is there holds."""
    UNCONFIRMED = "unconfirmed"
    """Its files hold together, but the harness or pack here, which is not the one that made it, plans or
    judges it otherwise, or cannot plan it at all.
    """
    BROKEN = "broken"


class Problem(Record):
    """One thing that does not hold."""

    path: str
    """File of the bundle, or a check's id; empty for the whole bundle."""
    message: str


class VerificationStep(Record):
    """One numbered step of verifying."""

    number: Whole
    name: str
    looked_at: Whole
    """Files, outcomes or samples that the step examined."""
    problems: tuple[Problem, ...] = ()
    """What is wrong: each makes the bundle broken."""
    missing: tuple[Problem, ...] = ()
    """What is not there yet: each makes the bundle incomplete."""
    differing: tuple[Problem, ...] = ()
    """What other code than the one that made the bundle gives otherwise: each leaves it unconfirmed."""
    skipped: str = ""
    """Why the step did not run; empty where it did."""
    note: str = ""
    """What the step could not look at."""


class Verification(Record):
    """What `fasttrack bundle verify` says."""

    schema_version: Literal[1] = 1
    state: BundleState
    bundle_digest: Digest | None
    """sha256 of the manifest's bytes; None where there is no manifest."""
    signer: str | None
    """Ed25519 public key (hex) whose signature holds; None for an unsigned bundle."""
    is_replanned: bool
    """Whether the plan was made again from claim and policy, with the same checks."""
    is_rederived: bool
    """Whether every outcome was judged again from its samples, to the same result."""
    made_with: Digest | None = None
    """Harness that made the bundle, as its plan says; None where there is no plan."""
    verified_with: Digest | None = None
    """Harness that planned again; None where no planner was given."""
    steps: tuple[VerificationStep, ...]

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Problems of all steps, in order; then what is missing; then what other code gives otherwise."""
        kinds = ("problems", "missing", "differing")
        return tuple(p for kind in kinds for step in self.steps for p in getattr(step, kind))
