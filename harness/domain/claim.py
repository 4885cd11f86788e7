"""What a contributor says a change does: one YAML file beside the kernels, the only statement of scope.

Invariant: a claim that can be built has a non-empty envelope whose joint limits admit at least one cell, so
guard, tests, evals, sweeps and report can all be derived from it without asking again.
"""

from typing import Literal, Self

from pydantic import Field, model_validator

from harness.domain.cell import Arch, Cell, Dtype, Phase
from harness.domain.record import Name, Positive, Record, Whole

__all__ = [
    "Architecture", "Claim", "Envelope", "Feature", "Range", "Speculation", "SpeedPromise", "Switch",
]  # fmt: skip

Feature = Literal[
    "full_context", "temperature_sampling", "structured_output", "prefix_caching", "speculative_decoding"
]
"""Features of the serving engine that an optimisation must keep."""


class Range(Record):
    """Whole numbers from `min` to `max`, both included."""

    min: Whole = Field(ge=0)
    max: Whole = Field(ge=0)

    @model_validator(mode="after")
    def _is_not_empty(self) -> Self:
        if self.max < self.min:
            raise ValueError(f"range {self.min}..{self.max} is empty")
        return self

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int) and self.min <= value <= self.max


class Architecture(Record):
    """One architecture the claim names, and how far."""

    arch: Arch
    level: Literal["dispatched", "compiled"]
    """`dispatched` needs run evidence; `compiled` is audited only, and the guard declines there."""


class Envelope(Record):
    """Where the optimisation applies.

    The run-time guard, the tests, the evals and the sweeps all derive from it.
    """

    architectures: tuple[Architecture, ...] = Field(min_length=1)
    tp: tuple[Positive, ...] = Field(min_length=1)
    dcp: tuple[Positive, ...] = Field(min_length=1)
    batch: Range
    """Requests in a step."""
    batch_buckets: tuple[Positive, ...] = Field(min_length=1)
    """Upper edges of the dispatcher's batch buckets, rising; the last is `batch.max`."""
    context: Range
    drafts: Range
    kv_dtypes: tuple[Dtype, ...] = Field(min_length=1)
    phases: tuple[Phase, ...] = Field(min_length=1)
    max_rows_per_step: Whole = Field(ge=1)
    """Joint limit: requests x (drafts + 1)."""
    collectives: tuple[Name, ...] = ()
    """Ways for a model's ranks to meet, as the ledger names them; empty: left open."""

    @model_validator(mode="after")
    def _admits_a_cell(self) -> Self:
        if self.batch.min < 1 or self.context.min < 1:
            raise ValueError("envelope.batch and envelope.context start at 1 or more")
        if self.batch.min * (self.drafts.min + 1) > self.max_rows_per_step:
            raise ValueError(
                f"envelope admits no cell: batch {self.batch.min} x {self.drafts.min + 1} rows is over "
                f"max_rows_per_step {self.max_rows_per_step}"
            )
        if (
            list(self.batch_buckets) != sorted(set(self.batch_buckets))
            or self.batch_buckets[-1] != self.batch.max
        ):
            raise ValueError("envelope.batch_buckets must rise and end at batch.max")
        names = [a.arch for a in self.architectures]
        if len(set(names)) != len(names):
            raise ValueError("envelope.architectures names one architecture twice")
        return self

    def level(self, arch: str) -> str | None:
        """`dispatched`, `compiled` or None for an architecture the claim does not name."""
        return next((a.level for a in self.architectures if a.arch == arch), None)

    def admits(self, cell: Cell) -> bool:
        """Whether the optimised path must be taken in `cell`."""
        return (
            self.level(cell.arch) == "dispatched"
            and cell.tp in self.tp
            and cell.dcp in self.dcp
            and cell.batch in self.batch
            and cell.context in self.context
            and cell.drafts in self.drafts
            and cell.kv_dtype in self.kv_dtypes
            and cell.phase in self.phases
            and cell.rows <= self.max_rows_per_step
        )


class Switch(Record):
    """The one setting that selects the optimised path."""

    name: str
    """Setting as the engine knows it, such as `decode_backend`."""
    on: str
    off: str
    default: str
    """Value when nobody sets it; opt-in means that it equals `off`."""

    @model_validator(mode="after")
    def _is_opt_in(self) -> Self:
        if self.default != self.off:
            raise ValueError(
                f"switch {self.name!r} is not opt-in: default {self.default!r} is not {self.off!r}"
            )
        return self


class Speculation(Record):
    """How drafts come about and are kept, in both arms of any comparison: an acceptance length says nothing
    without it.
    """

    method: Name | None = None
    """As the engine knows it, such as `dspark`; None, as for the next two: left open."""
    draft_sampling: Literal["greedy", "probabilistic"] | None = None
    rejection: Literal["standard", "block"] | None = None
    """Of runs whose acceptance is measured."""
    synthetic_lengths: tuple[float, ...] = ()
    """Acceptance lengths that controlled runs may force; what they give is labelled synthetic."""
    golden: tuple[float, ...] = ()
    """Tokens a verify step, by drafts from 1 on, that a measured acceptance is held to."""
    golden_source: str = ""

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        for drafts, length in enumerate(self.golden, 1):
            if not 1 <= length <= drafts + 1:
                raise ValueError(
                    f"speculation.golden says {length:g} tokens a step for {drafts} drafts; 1 to "
                    f"{drafts + 1} are possible"
                )
        if any(length < 1 for length in self.synthetic_lengths):
            raise ValueError(
                "speculation.synthetic_lengths start at 1: a verify step keeps one token at least"
            )
        if self.golden and not self.golden_source:
            raise ValueError("speculation.golden needs golden_source: who measured it, and how")
        return self

    def golden_length(self, drafts: int) -> float | None:
        """Golden tokens a verify step; None for drafts that have none."""
        return self.golden[drafts - 1] if 1 <= drafts <= len(self.golden) else None


class SpeedPromise(Record):
    """A promised gain over stock in one cell, with the conditions that make it comparable."""

    arch: Arch
    level: Literal["op", "layer", "step"]
    subject: str
    """What is timed: an op's name, `kda_moe`, `mla_moe`, or `decode_step`."""
    tp: Positive
    batch: Positive
    context: Positive
    ratio: float = Field(gt=0)
    """Stock time over optimised time, at least."""
    conditions: str
    """What both arms leave out or share, such as the collectives that are absent."""


class Claim(Record):
    """What the change does, where, what it keeps and what it promises."""

    schema_version: Literal[1] = 1
    name: Name
    pack: Name
    summary: str = Field(min_length=1, max_length=2000)
    envelope: Envelope
    switch: Switch
    features: tuple[Feature, ...]
    """Features that still work inside and outside the envelope."""
    state: tuple[str, ...]
    """Names of the state that the optimised path may write."""
    files: tuple[str, ...] = Field(min_length=1)
    """Git-style globs of the files that the change may touch."""
    speed: tuple[SpeedPromise, ...] = ()
    speculation: Speculation | None = Field(default=None, exclude_if=lambda told: told is None)
    """None where the claim takes no drafts, or leaves open how they come about; such a claim's digest is what
    it was before claims could say.
    """

    @model_validator(mode="after")
    def _drafts_where_it_speculates(self) -> Self:
        if self.speculation is not None and self.envelope.drafts.max == 0:
            raise ValueError("the claim says how drafts come about, and envelope.drafts admits none")
        return self
