"""How drafts come about in a server that we start: read from its own argument, told, and held to its label.

Pure. Invariant: an acceptance that is forced is never called measured, and one that is measured never forced.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

__all__ = ["Speculative", "label_objection", "speculative_of"]

ARGUMENTS = ("--speculative-config", "-sc")


class Speculative(NamedTuple):
    """vLLM's `--speculative-config`, as far as acceptance depends on it."""

    method: str
    drafts: int
    draft_sampling: str
    rejection: str
    forced_length: float | None
    """Of synthetic rejection, which accepts what it was told to."""

    @property
    def is_synthetic(self) -> bool:
        """Whether the acceptance is forced."""
        return self.rejection == "synthetic"

    def words(self) -> str:
        """For people and manifests."""
        forced = "" if self.forced_length is None else f" of length {self.forced_length:g}"
        return (
            f"{self.method}, {self.drafts} drafts, {self.draft_sampling} drafting, "
            f"{self.rejection} rejection{forced}"
        )


def speculative_of(arguments: Sequence[str]) -> Speculative | None:
    """What a command line says, with vLLM's defaults; None without drafts. Raises `ValueError` for a value
    that is no such configuration.
    """
    told = _value(arguments)
    if told is None:
        return None
    try:
        found: dict[str, Any] = dict(json.loads(told))
        drafts = int(found["num_speculative_tokens"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{ARGUMENTS[0]} is {told[:80]!r}; it must be JSON with num_speculative_tokens"
        ) from error
    length = found.get("synthetic_acceptance_length")
    return Speculative(
        method=str(found.get("method", "not named")),
        drafts=drafts,
        draft_sampling=str(found.get("draft_sample_method", "greedy")),
        rejection=str(found.get("rejection_sample_method", "standard")),
        forced_length=None if length is None else float(length),
    )


def label_objection(found: Speculative | None, label: str | None, drafts: int | None) -> str | None:
    """Why an acceptance's label does not fit the server; None where it does."""
    if found is None:
        return None if label is None else "acceptance is labelled, and the servers make no drafts"
    if label is None:
        return f"the servers make drafts ({found.words()}): say under `acceptance` how it comes about"
    if found.is_synthetic != (label == "synthetic"):
        return f"acceptance is labelled {label}, and the servers reject by {found.rejection!r}"
    if found.drafts != drafts:
        return f"acceptance is said of {drafts} drafts, and the servers make {found.drafts}"
    return None


def _value(arguments: Sequence[str]) -> str | None:
    """The last one given, in either form of an option. Raises `ValueError` for an option that may say the
    same in a form that is not read here.
    """
    found: str | None = None
    for place, word in enumerate(arguments):
        name, mark, value = word.partition("=")
        plain = name.replace("_", "-") if name.startswith("--") else name
        if plain in ARGUMENTS:
            found = value if mark else next(iter(arguments[place + 1 : place + 2]), None)
        elif plain.startswith("--spec") or plain == "--config":
            raise ValueError(
                f"{name} may set how drafts come about, and is not read here: say {ARGUMENTS[0]} JSON "
                "among the server's arguments instead"
            )
    return found
