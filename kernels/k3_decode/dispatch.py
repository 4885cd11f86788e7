"""Which path a step takes, decided from the claim's envelope and told to whoever listens.

`claim.yaml` is read and never restated: every limit below comes from it. A step is declined for one reason of
a closed list, the first that holds in the order of `Reason`. The phase is what the engine says it is, never
guessed from shapes: a prompt of drafts + 1 tokens looks just like a verify step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Literal

import yaml

__all__ = [
    "CLAIM_FILE",
    "Decision",
    "Dispatcher",
    "Envelope",
    "Guard",
    "Reason",
    "Site",
    "StepFacts",
    "Switch",
    "load_guard",
]

CLAIM_FILE = Path(__file__).with_name("claim.yaml")
Phase = Literal["decode", "verify", "prefill", "mixed"]


class Reason(StrEnum):
    """Why a step took its path."""

    TAKEN = "taken"
    SWITCH_OFF = "switch_off"
    MODEL_NOT_SUPPORTED = "model_not_supported"
    ARCH_COMPILED_ONLY = "arch_compiled_only"
    ARCH_NOT_CLAIMED = "arch_not_claimed"
    TP_NOT_CLAIMED = "tp_not_claimed"
    DCP_NOT_CLAIMED = "dcp_not_claimed"
    COLLECTIVE_NOT_CLAIMED = "collective_not_claimed"
    KV_DTYPE_NOT_CLAIMED = "kv_dtype_not_claimed"
    PHASE_NOT_CLAIMED = "phase_not_claimed"
    ROWS_NOT_UNIFORM = "rows_not_uniform"
    BATCH_OUT_OF_ENVELOPE = "batch_out_of_envelope"
    DRAFTS_OUT_OF_ENVELOPE = "drafts_out_of_envelope"
    ROWS_OVER_LIMIT = "rows_over_limit"
    CONTEXT_OUT_OF_ENVELOPE = "context_out_of_envelope"


@dataclass(frozen=True, slots=True)
class Envelope:
    """The claim's envelope, as the guard needs it; ranges include both ends."""

    levels: dict[str, str]
    """`dispatched` or `compiled` by architecture."""
    tp: tuple[int, ...]
    dcp: tuple[int, ...]
    batch: tuple[int, int]
    batch_buckets: tuple[int, ...]
    context: tuple[int, int]
    drafts: tuple[int, int]
    kv_dtypes: tuple[str, ...]
    phases: tuple[str, ...]
    max_rows_per_step: int
    collectives: tuple[str, ...] = ()
    """Ways for ranks to meet; empty: left open."""

    def admits_collective(self, name: str) -> bool:
        """Whether ranks may meet so."""
        return not self.collectives or name in self.collectives

    def bucket(self, requests: int) -> int | None:
        """Upper edge of the smallest bucket that holds `requests`; None outside the envelope."""
        if not self.batch[0] <= requests <= self.batch[1]:
            return None
        return next((edge for edge in self.batch_buckets if requests <= edge), None)


@dataclass(frozen=True, slots=True)
class Switch:
    """The setting that selects the optimised path."""

    name: str
    on: str
    off: str
    default: str

    def is_on(self, value: str | None) -> bool:
        """Whether a setting's value (None: not set) selects the optimised path; `ValueError` for no known
        value.
        """
        chosen = self.default if value is None else value
        if chosen not in (self.on, self.off):
            raise ValueError(f"{self.name} is {chosen!r}; it must be {self.on!r} or {self.off!r}")
        return chosen == self.on


@dataclass(frozen=True, slots=True)
class Guard:
    """What the run-time decision rests on."""

    envelope: Envelope
    switch: Switch


@dataclass(frozen=True, slots=True)
class Site:
    """What does not change while a model is served."""

    arch: str
    """`cpu`, or the GPU's, such as `sm_90a`."""
    tp: int
    dcp: int
    kv_dtype: str
    layers: int
    is_supported_model: bool
    """Whether the fused ops cover the model's mechanisms."""
    collective: str = "none"


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What the engine knows of a step before it runs."""

    step: int
    phase: Phase
    rows_by_request: tuple[int, ...]
    is_graph: bool
    context_min: int
    """Tokens of the shortest request, this step's rows included."""
    context_max: int


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided for one step, for the ledger."""

    step: int
    phase: Phase
    requests: int
    rows: int
    """Rows of the longest request."""
    tokens: int
    batch_bucket: int | None
    is_graph: bool
    tp: int
    dcp: int
    drafts: int
    context_min: int
    context_max: int
    path: Literal["stock", "optimised"]
    reason: Reason
    layer_paths: str
    """One letter a layer: `o` optimised, `s` stock."""
    collective: str
    tuned: str = ""
    """Kernels of an optimised step that take a tuned choice, each with its entry; empty: what is built in."""


class Dispatcher:
    """Decides step by step and tells the observer before the step runs."""

    def __init__(
        self,
        guard: Guard,
        site: Site,
        observer: Callable[[Decision], None] | None = None,
        tuned: Callable[[int, int], str] = lambda _requests, _rows: "",
    ) -> None:
        self._guard, self._site, self._observer, self._tuned = guard, site, observer, tuned
        self.is_on = False
        """Whether the switch selects the optimised path; may change between steps."""

    def decide(self, facts: StepFacts) -> Decision:
        """The path of one step."""
        site, reason = self._site, self._reason(facts)
        rows = max(facts.rows_by_request)
        is_taken = reason is Reason.TAKEN
        decision = Decision(
            step=facts.step,
            phase=facts.phase,
            requests=len(facts.rows_by_request),
            rows=rows,
            tokens=sum(facts.rows_by_request),
            batch_bucket=self._guard.envelope.bucket(len(facts.rows_by_request)),
            is_graph=facts.is_graph,
            tp=site.tp,
            dcp=site.dcp,
            drafts=rows - 1 if facts.phase == "verify" else 0,
            context_min=facts.context_min,
            context_max=facts.context_max,
            path="optimised" if is_taken else "stock",
            reason=reason,
            layer_paths=("o" if is_taken else "s") * site.layers,
            collective=site.collective,
            tuned=self._tuned(len(facts.rows_by_request), rows) if is_taken else "",
        )
        if self._observer is not None:
            self._observer(decision)
        return decision

    def _reason(self, facts: StepFacts) -> Reason:
        envelope, site = self._guard.envelope, self._site
        level = envelope.levels.get(site.arch)
        requests, rows = len(facts.rows_by_request), max(facts.rows_by_request)
        drafts = rows - 1 if facts.phase == "verify" else 0
        is_context_in = envelope.context[0] <= facts.context_min and facts.context_max <= envelope.context[1]
        objections = (
            (Reason.SWITCH_OFF, not self.is_on),
            (Reason.MODEL_NOT_SUPPORTED, not site.is_supported_model),
            (Reason.ARCH_COMPILED_ONLY, level == "compiled"),
            (Reason.ARCH_NOT_CLAIMED, level is None),
            (Reason.TP_NOT_CLAIMED, site.tp not in envelope.tp),
            (Reason.DCP_NOT_CLAIMED, site.dcp not in envelope.dcp),
            (Reason.COLLECTIVE_NOT_CLAIMED, not envelope.admits_collective(site.collective)),
            (Reason.KV_DTYPE_NOT_CLAIMED, site.kv_dtype not in envelope.kv_dtypes),
            (Reason.PHASE_NOT_CLAIMED, facts.phase not in envelope.phases),
            (Reason.ROWS_NOT_UNIFORM, len(set(facts.rows_by_request)) > 1),
            (Reason.BATCH_OUT_OF_ENVELOPE, envelope.bucket(requests) is None),
            (Reason.DRAFTS_OUT_OF_ENVELOPE, not envelope.drafts[0] <= drafts <= envelope.drafts[1]),
            (Reason.ROWS_OVER_LIMIT, requests * rows > envelope.max_rows_per_step),
            (Reason.CONTEXT_OUT_OF_ENVELOPE, not is_context_in),
        )
        return next((reason for reason, holds in objections if holds), Reason.TAKEN)


def load_guard(path: Path = CLAIM_FILE) -> Guard:
    """The guard of a claim file; `KeyError` or `TypeError` where the file is not a claim."""
    return _parse_guard(path.read_text(encoding="utf-8"))


@lru_cache(maxsize=4)
def _parse_guard(text: str) -> Guard:
    """One guard for equal texts: reading the YAML takes 20 ms, and every session asks for it."""
    claim = yaml.safe_load(text)
    envelope, switch = claim["envelope"], claim["switch"]
    return Guard(
        Envelope(
            levels={entry["arch"]: entry["level"] for entry in envelope["architectures"]},
            tp=tuple(envelope["tp"]),
            dcp=tuple(envelope["dcp"]),
            batch=_range(envelope["batch"]),
            batch_buckets=tuple(envelope["batch_buckets"]),
            context=_range(envelope["context"]),
            drafts=_range(envelope["drafts"]),
            kv_dtypes=tuple(envelope["kv_dtypes"]),
            phases=tuple(envelope["phases"]),
            max_rows_per_step=envelope["max_rows_per_step"],
            collectives=tuple(envelope.get("collectives", ())),
        ),
        Switch(switch["name"], switch["on"], switch["off"], switch["default"]),
    )


def _range(entry: dict[str, int]) -> tuple[int, int]:
    return entry["min"], entry["max"]
