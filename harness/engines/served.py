"""What is served to both arms, and the little in which they differ: the settings of a server comparison.

A file that a person writes. Arms are started by us one after another, or are two servers that somebody else
started (`url`). Invariant: what both arms share is written once, so that the arms can only differ in their
own arguments and environment, which are the switch.
"""

import os
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from harness.documents.load import load_record
from harness.domain.errors import InputError
from harness.domain.record import Number, Positive, Record, Whole
from harness.engines.measured import MeasuredArms
from harness.engines.speculation import label_objection, speculative_of

__all__ = ["FILE_VARIABLE", "Acceptance", "ServedArm", "ServerSettings", "load_settings"]

FILE_VARIABLE = "FASTTRACK_SERVER"
"""Path of the settings, for the process that samples."""
Setting = tuple[str, str]


class ServedArm(Record):
    """What one arm has for itself."""

    arguments: tuple[str, ...] = ()
    """Behind the common ones; for stock mostly none."""
    environment: tuple[Setting, ...] = ()
    url: str = Field(default="", pattern=r"^(|https?://[^\s/]+)$")
    """Of a server that runs already, such as `http://127.0.0.1:8001`; empty: it is started here."""
    observer: str = ""
    """File that the observer in such a server writes to, where it lies on this machine: the server's
    `FASTTRACK_OBSERVER`. Empty: nobody observed it.
    """
    traces: str = ""
    """Folder of such a server's profiler (`torch_profiler_dir`), where it lies on this machine."""

    @model_validator(mode="after")
    def _files_are_of_a_url(self) -> Self:
        if (self.observer or self.traces) and not self.url:
            raise ValueError(
                "a server that is started here is observed anyway: leave `observer` and `traces` out"
            )
        return self


class Acceptance(Record):
    """How acceptance comes about where drafts are made, so that no figure travels without it."""

    label: Literal["measured", "golden", "synthetic"]
    drafts: Positive
    golden: Number | None = None
    """Tokens a step that the published curve has for that many drafts."""
    tolerance: Number = Field(default=0.1, gt=0)
    """Share by which a measured length may lie under the golden one before it is called out."""

    def words(self, length: float) -> str:
        """A length with its label, and beside the golden one where it was measured."""
        told = f"{length:.3f} ({self.label}"
        if self.label == "measured" and self.golden is not None:
            is_short = length < float(self.golden) * (1 - float(self.tolerance))
            verdict = "below" if is_short else "in line with"
            told += f", {verdict} the golden {float(self.golden):g} for {self.drafts} drafts"
        return f"{told})"


class ServerSettings(Record):
    """One comparison of two servers."""

    schema_version: Literal[1] = 1
    model: str = Field(min_length=1)
    """Folder or hub id, as the server is told."""
    served_name: str = Field(min_length=1)
    """What requests call it, and what the server must say that it serves."""
    program: tuple[str, ...] = ("vllm",)
    common: tuple[str, ...] = ()
    """Arguments of both arms behind `serve MODEL`."""
    environment: tuple[Setting, ...] = ()
    stock: ServedArm = ServedArm()
    optimised: ServedArm
    poison: ServedArm | None = None
    """An arm made wrong on purpose, where the settings have one."""
    observed: tuple[Setting, ...] = ()
    """What the observer must see chosen in the optimised arm and not in stock, where the switch holds for the
    whole server, such as (attention, FLASHMLA); empty: the engine says step by step which path ran.
    """
    has_profiler: bool = False
    """Whether servers that are started here tell the kernels of a few steps, by their own profiler."""
    key_file: str = ""
    """File with the key that the server asks for; the key itself stands in no file of ours."""
    port: Whole = 0
    """0: any free one."""
    start_limit_s: Number = Field(default=600, gt=0)
    answer_limit_s: Number = Field(default=900, gt=0)
    top_logprobs: Whole = 5
    acceptance: Acceptance | None = None
    measured: MeasuredArms | None = None
    """Engines of the same model that a program of the pack measures from inside."""

    @model_validator(mode="after")
    def _arms_differ(self) -> Self:
        if (self.stock.url == "") != (self.optimised.url == ""):
            raise ValueError(
                "either both arms have a url or none: a started server and a foreign one are unlike"
            )
        if self.stock.observer and self.stock.observer == self.optimised.observer:
            raise ValueError("both arms have one observer file: give each server a file of its own")
        same = (self.stock.arguments, self.stock.environment) == (
            self.optimised.arguments,
            self.optimised.environment,
        )
        if self.stock.url and self.stock.url == self.optimised.url:
            raise ValueError("both arms have one url, so there is nothing to compare")
        if not self.stock.url and same:
            raise ValueError(
                "the arms do not differ: put the switch under optimised.arguments or .environment"
            )
        if self.is_started and (wrong := self._speculation_objection()) is not None:
            raise ValueError(wrong)
        if self.poison is not None and bool(self.poison.url) != bool(self.stock.url):
            raise ValueError("the poisoned arm must be started or named like the others")
        return self

    def _speculation_objection(self) -> str | None:
        """Why the arms' drafts cannot be compared, or their acceptance not be called what it is called."""
        stock, optimised = (
            speculative_of((*self.common, *a.arguments)) for a in (self.stock, self.optimised)
        )
        if stock != optimised:
            words = (found.words() if found else "no drafts" for found in (stock, optimised))
            return "the arms draft in unlike ways: " + " and ".join(words)
        told = self.acceptance
        return label_objection(stock, told.label if told else None, told.drafts if told else None)

    @property
    def is_started(self) -> bool:
        """Whether the servers are ours to start and stop."""
        return not self.stock.url

    def arm(self, name: str) -> ServedArm:
        """An arm by name; raises `InputError` for one that the settings do not have."""
        found = {"stock": self.stock, "optimised": self.optimised, "poison": self.poison}.get(name)
        if found is None:
            raise InputError(f"the server settings have no arm {name!r}")
        return found

    def command(self, name: str, host: str, port: int) -> tuple[str, ...]:
        """The command line of an arm."""
        arm = self.arm(name)
        return (
            *self.program, "serve", self.model, f"--served-model-name={self.served_name}", f"--host={host}",
            f"--port={port}", *self.common, *arm.arguments,
        )  # fmt: skip

    def child_environment(self, name: str) -> dict[str, str]:
        """Variables of a program that belongs to an arm, such as its load generator."""
        return {**os.environ, **dict(self.environment), **dict(self.arm(name).environment)}

    def speculation(self, name: str) -> str:
        """How an arm drafts, in words."""
        found = speculative_of((*self.common, *self.arm(name).arguments))
        return "none" if found is None else found.words()

    def switch(self) -> str:
        """In words: what the optimised arm has beyond stock."""
        only = [a for a in self.optimised.arguments if a not in self.stock.arguments]
        less = [f"without {a}" for a in self.stock.arguments if a not in self.optimised.arguments]
        differs = [f"{k}={v}" for k, v in self.optimised.environment if (k, v) not in self.stock.environment]
        return " ".join((*only, *less, *differs)) or f"server {self.optimised.url}"


def load_settings(path: Path) -> ServerSettings:
    """The settings in a YAML or JSON file; raises `InputError` for anything else."""
    return load_record(ServerSettings, path)
