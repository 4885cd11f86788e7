"""One point of the envelope: where a check looks."""

from typing import Literal

from pydantic import Field

from harness.domain.record import Record, Whole

__all__ = ["Arch", "Cell", "Dtype", "Phase"]

Arch = Literal["cpu", "sm_90a", "sm_100a", "sm_103a"]
"""An architecture that a claim may name; `cpu` is the CPU implementation of the same fused ops."""
Phase = Literal["decode", "verify", "prefill", "mixed"]
Dtype = Literal["bf16", "fp8"]


class Cell(Record):
    """(arch, tp, dcp, batch, context, drafts, dtype, phase). `batch` counts requests."""

    arch: Arch = "cpu"
    tp: Whole = Field(default=1, ge=1)
    dcp: Whole = Field(default=1, ge=1)
    batch: Whole = Field(default=1, ge=1)
    context: Whole = Field(default=64, ge=1)
    """Tokens in each request's KV cache, the step's own rows included."""
    drafts: Whole = Field(default=0, ge=0)
    kv_dtype: Dtype = "bf16"
    phase: Phase = "decode"

    @property
    def rows(self) -> int:
        """Rows that a step holds: requests x (drafts + 1)."""
        return self.batch * (self.drafts + 1)

    def label(self) -> str:
        """Short stable text, such as `cpu.tp1.dcp1.b4.c512.d0.bf16.decode`; part of check ids."""
        return (
            f"{self.arch}.tp{self.tp}.dcp{self.dcp}.b{self.batch}.c{self.context}.d{self.drafts}"
            f".{self.kv_dtype}.{self.phase}"
        )
