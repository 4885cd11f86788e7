"""The table of recipes as records. Invariant: every machine says where its line comes from, and one without
an optimised path says why.
"""

from typing import Literal, Self

from pydantic import Field, model_validator

from harness.documents.load import load_record
from harness.domain.record import Positive, Record
from harness.domain.resources import data_folder

__all__ = ["Drafter", "MachineRecipe", "ModelRecipe", "load_models"]


class Drafter(Record):
    """How drafts are made and what acceptance is to be expected of them."""

    config: str
    """JSON of `--speculative-config`, with DRAFTS where the number of drafts goes."""
    max_drafts: Positive
    source: str
    golden_acceptance: tuple[float, ...]
    """Tokens a verify step, by number of drafts from 1 on."""
    golden_source: str


class MachineRecipe(Record):
    """One machine's line."""

    gpus: str = Field(pattern=r"^[1-9][0-9]*x[A-Z0-9]+$")
    arguments: tuple[str, ...]
    source: str = Field(min_length=1)
    is_specialised: bool
    why_not: str = ""
    is_impossible: bool = False
    """Whether not even stock can be served there."""

    @model_validator(mode="after")
    def _says_why_not(self) -> Self:
        if not self.is_specialised and not self.why_not:
            raise ValueError(f"{self.gpus}: has no optimised path and does not say why")
        if self.is_impossible and self.is_specialised:
            raise ValueError(f"{self.gpus}: cannot both be impossible and have an optimised path")
        return self


class ModelRecipe(Record):
    """One model: what is served, the switch, and its machines."""

    model: str
    weights: str
    weights_source: str
    weights_tb: float = Field(gt=0)
    common: tuple[str, ...]
    switch: str
    """The one argument that the optimised arm has and the stock arm has not."""
    switch_source: str
    drafter: Drafter | None = None
    max_batch: Positive
    machines: tuple[MachineRecipe, ...] = Field(min_length=1)


class _Table(Record):
    schema_version: Literal[1]
    models: tuple[ModelRecipe, ...] = Field(min_length=1)


def load_models() -> tuple[ModelRecipe, ...]:
    """Every model of the table; raises `InputError` where the table is broken."""
    return load_record(_Table, data_folder("sweeps") / "recipes" / "models.yaml").models
