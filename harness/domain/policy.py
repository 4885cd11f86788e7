"""What the project demands of any claim. Owned by gatekeepers; YAML under `policies/`.

Zones and rules live in their own files and are named here, so that several policies share them. `rules`
select findings of the isolation stage; `proofs` say which stage must prove what, at which tier.
"""

from datetime import date
from typing import Literal, Self

from pydantic import Field, model_validator

from harness.domain.check import Severity, StageName
from harness.domain.machine import Tier
from harness.domain.record import Name, Record, Setting, Whole

__all__ = [
    "AcceptanceRule",
    "CellDemand",
    "Example",
    "Policy",
    "Proof",
    "Rule",
    "Statistics",
    "Waiver",
    "Zone",
    "ZoneMap",
]

ZoneName = Literal[
    "model_code", "shared_core", "other_models", "tests", "docs", "build", "ci", "benchmarks", "policy",
    "harness",
    "unknown",
]  # fmt: skip


class Zone(Record):
    """Files by glob. The first zone of the map whose globs match a path is its zone."""

    name: ZoneName
    globs: tuple[str, ...] = Field(min_length=1)
    """Git-style patterns (`**`, `!` negates)."""
    why: str


class ZoneMap(Record):
    """Zones of one repository's tree, in order of precedence."""

    schema_version: Literal[1] = 1
    name: Name
    repository: str
    """What tree it describes, such as `vllm`."""
    zones: tuple[Zone, ...] = Field(min_length=1)


class Example(Record):
    """A file and whether the rule must find something in it. `line` is where, when it must."""

    name: str
    path: str
    before: str = ""
    after: str
    mode: Literal["100644", "100755", "120000", "160000", "000000"] = "100644"
    """Git's mode at head: plain, executable, symlink (`after` is its target), submodule, deleted."""
    encoding: Literal["utf-8", "latin-1"] = "utf-8"
    """Of the file's bytes at head; `latin-1` shows a rule text that is no UTF-8."""
    matches: bool
    line: Whole | None = None


class Rule(Record):
    """One thing that a diff must not do. One YAML file under `policies/rules`."""

    id: Name
    family: Literal["zones", "reach", "opt_in", "blast_radius", "features", "hygiene"]
    severity: Severity
    zones: tuple[ZoneName, ...] = ()
    """Zones whose files it reads; empty: all."""
    languages: tuple[Literal["python", "cpp", "cuda", "any"], ...] = ("any",)
    rationale: str
    remedy: str
    detector: str
    """`ast_grep`, `regex`, or the name of a built-in detector."""
    patterns: tuple[str, ...] = ()
    """For `ast_grep` and `regex`: any of these."""
    allow: tuple[str, ...] = ()
    """Values that are no finding, such as environment variables on the allow-list (regex)."""
    examples: tuple[Example, ...] = Field(min_length=2)

    @model_validator(mode="after")
    def _has_both_kinds_of_example(self) -> Self:
        if {e.matches for e in self.examples} != {True, False}:
            raise ValueError(f"rule {self.id!r} needs an example that must match and one that must not")
        return self


class Waiver(Record):
    """An accepted finding: who took it, why, where and until when."""

    rule: Name
    path: str
    """Git-style glob."""
    owner: str = Field(min_length=1)
    reason: str = Field(min_length=10)
    expires: date

    def words(self) -> str:
        """Owner, reason and expiry, as findings carry them."""
        return f"{self.owner}: {self.reason} (until {self.expires.isoformat()})"


class CellDemand(Record):
    """Cells of the envelope that need evidence of their own: every combination of what is listed.

    A batch is the upper edge of a bucket, a context the least length of a band; a step with drafts is a
    verify step. Combinations that the claim does not cover are none.
    """

    batch: tuple[Whole, ...] = (1,)
    context: tuple[Whole, ...] = (24,)
    drafts: tuple[Whole, ...] = (0,)
    tp: tuple[Whole, ...] = (1,)
    dcp: tuple[Whole, ...] = (1,)
    kv_dtype: tuple[Literal["bf16", "fp8"], ...] = ("bf16",)
    feature: tuple[Literal["temperature_sampling", "structured_output", "chunked_prefill"], ...] = ()
    """Features that must be at work in the cell; empty: none."""
    min_tokens: Whole = Field(default=1, ge=1)
    """What the optimised path must generate for such a cell not to be empty."""
    evals: tuple[str, ...] = ()
    """Where evals are what must hold it: their subjects; empty: each eval that is asked."""

    @model_validator(mode="after")
    def _features_decode(self) -> Self:
        if self.feature and any(self.drafts):
            raise ValueError("a feature is shown in decode steps; list drafts in a demand of their own")
        return self


class Proof(Record):
    """What one stage must show."""

    stage: StageName
    is_required: bool = True
    tier: Tier = Tier.SMOKE
    """Weakest tier whose evidence counts."""
    subjects: tuple[str, ...] = ()
    """Evals, sweeps or ops by name; empty: all that the claim derives."""
    thresholds: tuple[tuple[str, Setting], ...] = ()
    """Overrides of the stage's thresholds by name."""
    cells: tuple[CellDemand, ...] = ()
    """Cells that must not be empty. Of coverage: each is shown by a check of its own, beside those that
    follow from the claim. Of evals: each eval must have generated that much of its own tokens there. Of
    sweeps: a step is timed in each, over that many tokens of the optimised path.
    """

    @model_validator(mode="after")
    def _cells_are_of_stages_that_generate(self) -> Self:
        if self.cells and self.stage not in (StageName.COVERAGE, StageName.EVALS, StageName.SWEEP):
            raise ValueError(f"cells are demanded of coverage, evals and sweeps, not of {self.stage}")
        if self.stage is not StageName.EVALS and any(cell.evals for cell in self.cells):
            raise ValueError(f"evals are named where cells are demanded of evals, not of {self.stage}")
        if self.stage is StageName.SWEEP and any(cell.feature for cell in self.cells):
            raise ValueError("steps are timed without features; a demand of sweeps lists none")
        if self.stage is StageName.EVALS and any(
            (c.tp, c.dcp, c.kv_dtype, c.feature) != ((1,), (1,), ("bf16",), ()) for c in self.cells
        ):
            raise ValueError(
                "an eval's ranks, cache dtype and features are its own; a demand of evals lists batch, "
                "context and drafts"
            )
        named = {name for cell in self.cells for name in cell.evals}
        unasked = sorted(named - set(self.subjects)) if self.subjects else []
        if unasked and not any(subject.startswith("features") for subject in self.subjects):
            raise ValueError(f"cells are demanded of {', '.join(unasked)}, which `subjects` does not ask")
        return self


class Statistics(Record):
    """Error rates of the whole verdict."""

    alpha: float = Field(default=0.05, gt=0, lt=0.5)
    """False admission, held for each check."""
    family_false_alarm: float = Field(default=0.05, gt=0, lt=0.5)
    """FAIL when the arms do not differ, over all statistical checks of the plan (Holm)."""
    power: float = Field(default=0.8, gt=0, lt=1)


class AcceptanceRule(Record):
    """When a kernel's error is acceptable, relative to stock's own."""

    factor: float = Field(default=2.0, ge=1)
    floor_ulp: float = Field(default=2.0, ge=0)
    """In units in the last place of the output dtype at the row's scale."""
    hard_cap: float = Field(default=0.05, gt=0)
    """Relative L2 that no op may pass, whatever stock does."""


class Policy(Record):
    """The demands in one file."""

    schema_version: Literal[1] = 1
    name: Name
    summary: str
    zone_map: Name
    """File under `policies/zones`."""
    rule_families: tuple[str, ...] = ("zones", "reach", "opt_in", "blast_radius", "features", "hygiene")
    outside_pack_families: tuple[str, ...] = ("reach", "hygiene")
    """Families that judge files outside the pack's own part of the change."""
    allowed_zones: tuple[ZoneName, ...] = ("model_code", "tests", "docs")
    """Zones that the pack's part of the change may touch."""
    proofs: tuple[Proof, ...] = Field(min_length=1)
    acceptance: AcceptanceRule = AcceptanceRule()
    statistics: Statistics = Statistics()
    min_path_share: float = Field(default=0.95, ge=0, le=1)
    max_changed_files: Whole = Field(default=5000, ge=1)
    max_diff_bytes: Whole = Field(default=64 * 2**20, ge=1)
    is_dirty_allowed: bool = False
    signers: tuple[str, ...] = ()
    """Public keys (Ed25519, hex) whose bundles count; empty: unsigned bundles count and are shown as such."""
    min_replications: Whole = Field(default=0, ge=0)
    """Distinct signers, other than a bundle's own, who must have repeated a bundle with the same results."""
    waivers: tuple[Waiver, ...] = ()

    @model_validator(mode="after")
    def _names_each_stage_once(self) -> Self:
        stages = [p.stage for p in self.proofs]
        if len(set(stages)) != len(stages):
            raise ValueError(f"policy {self.name!r} names a stage twice in proofs")
        return self

    def proof(self, stage: StageName) -> Proof | None:
        """The demand on a stage, if there is one."""
        return next((p for p in self.proofs if p.stage is stage), None)
