"""From log-probabilities to tokens: temperature, top-p, and output that must follow a grammar.

Sampling is no part of the optimised path: it takes what either path gives. Grammars are outlines-core's; it
is needed only where one is used.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Grammar", "GrammarMissing", "Sampling", "TokenTexts", "sample"]


class GrammarMissing(ImportError):
    """Structured output was asked for where outlines-core is not installed."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request's tokens are drawn."""

    temperature: float = 1.0
    """0: the likeliest token."""
    top_p: float = 1.0
    """Tokens are drawn from the smallest set of the likeliest ones whose probability reaches it."""

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1:
            raise ValueError(
                f"temperature {self.temperature} and top_p {self.top_p}: the first must be at least 0, "
                "the second above 0 and at most 1"
            )


@dataclass(frozen=True, slots=True)
class TokenTexts:
    """What tokens spell, for grammars. Tokens that are not listed are never allowed by one."""

    texts: Mapping[int, str]
    end: int
    """Token that ends an answer; it spells nothing."""
    vocab_size: int


class Grammar:
    """Which tokens may come next; starts at the beginning of an answer."""

    def __init__(self, pattern: str, tokens: TokenTexts) -> None:
        try:
            import outlines_core  # type: ignore[import-untyped,import-not-found,unused-ignore]  # has no types
        except ImportError as error:
            raise GrammarMissing(
                "structured output needs outlines-core, which is not installed; `pip install outlines-core`"
            ) from error
        by_text: dict[str, list[int]] = {}
        for token, text in tokens.texts.items():
            if token != tokens.end and text:
                by_text.setdefault(text, []).append(token)
        self._size, self._end = tokens.vocab_size, tokens.end
        self._guide = outlines_core.Guide(
            outlines_core.Index(pattern, outlines_core.Vocabulary(tokens.end, by_text))
        )

    @classmethod
    def of_schema(cls, schema: Mapping[str, object], tokens: TokenTexts) -> "Grammar":
        """The grammar of JSON texts that a JSON schema admits, without free whitespace."""
        try:
            from outlines_core import json_schema  # type: ignore[import-untyped,import-not-found,unused-ignore]  # ships no types
        except ImportError as error:
            raise GrammarMissing(
                "structured output needs outlines-core, which is not installed; `pip install outlines-core`"
            ) from error
        return cls(json_schema.build_regex_from_schema(json.dumps(schema), whitespace_pattern=""), tokens)

    def allowed(self) -> torch.Tensor:
        """Boolean [vocab]: tokens that may come next."""
        mask = torch.zeros(self._size, dtype=torch.bool)
        mask[torch.tensor(self._guide.get_tokens(), dtype=torch.long)] = True
        return mask

    def advance(self, token: int) -> None:
        """Takes a chosen token; `ValueError` for one that is not allowed. The end may be taken again."""
        if token != self._end:
            self._guide.advance(token)
        elif not self.is_finished:
            raise ValueError(f"the answer may not end here (token {token})")

    def rollback(self, tokens: int) -> None:
        """Forgets the last tokens, as a rejected draft must."""
        self._guide.rollback_state(tokens)

    @property
    def is_finished(self) -> bool:
        """Whether the answer may end here."""
        return bool(self._guide.is_finished())


def sample(
    logprobs: torch.Tensor,
    options: Sequence[Sampling],
    generator: torch.Generator,
    grammars: Sequence[Grammar | None] | None = None,
) -> list[int]:
    """One token for each row of log-probabilities [B, vocab]; grammars advance by what was chosen.

    Every row consumes one draw of the CPU generator, so that a row's token does not depend on how others are
    sampled. NaN log-probabilities are never chosen; a row without any allowed finite one raises `ValueError`.
    """
    scores = logprobs.detach().float().cpu().nan_to_num(nan=-torch.inf)
    draws = torch.rand(scores.shape[0], generator=generator, dtype=torch.float64)
    chosen: list[int] = []
    for i, option in enumerate(options):
        row = scores[i]
        grammar = grammars[i] if grammars is not None else None
        if grammar is not None:
            row = row.masked_fill(~grammar.allowed(), -torch.inf)
        if not bool(torch.isfinite(row).any()):
            raise ValueError(f"row {i} has no finite log-probability among its allowed tokens")
        token = _draw(row, option, float(draws[i]))
        if grammar is not None:
            grammar.advance(token)
        chosen.append(token)
    return chosen


def _draw(row: torch.Tensor, option: Sampling, draw: float) -> int:
    if option.temperature == 0:
        return int(row.argmax())
    ordered = torch.sort(row.double() / option.temperature, descending=True, stable=True)
    cumulative = torch.softmax(ordered.values, dim=0).cumsum(0)
    kept = int((cumulative < option.top_p).sum()) + 1
    limit = cumulative[min(kept, len(cumulative)) - 1]
    place = int((cumulative < draw * limit).sum())
    return int(ordered.indices[min(place, kept - 1)])
