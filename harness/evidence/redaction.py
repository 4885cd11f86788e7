"""Secrets and private paths leave text before it enters a bundle.

Two nets. Literal: the value of every environment variable that is on neither list here is replaced wherever
it appears, also percent-encoded, JSON-escaped or in base64. Formats: credentials known by their shape, such
as a URL's user part, an `Authorization` header or a GitHub token. What neither net can see: a secret of
plain letters shorter than 12 in a variable with an innocent name, and a secret that no variable holds and
no format shows.
"""

import base64
import json
import os
import re
from collections.abc import Mapping
from typing import Self
from urllib.parse import quote

from harness.domain.bundle import Environment
from harness.domain.check import Control, Figure, Finding, Outcome, Samples, SampleTable
from harness.domain.record import Scalar, sha256_hex
from harness.evidence.environment import ALLOWED_VARIABLES

__all__ = ["Redactor"]

MARK = "<redacted>"
PUBLIC_VARIABLES = frozenset({
    "CI", "COLORTERM", "COLUMNS", "EDITOR", "GITHUB_ACTIONS", "GITHUB_BASE_REF", "GITHUB_EVENT_NAME",
    "GITHUB_HEAD_REF", "GITHUB_JOB", "GITHUB_REF", "GITHUB_REF_NAME", "GITHUB_REPOSITORY",
    "GITHUB_SERVER_URL", "GITHUB_SHA", "GITHUB_WORKFLOW", "HOSTTYPE", "LANG", "LANGUAGE", "LC_ALL",
    "LC_CTYPE", "LESS", "LOGNAME", "LS_COLORS", "MACHTYPE", "MANPATH", "OSTYPE", "PAGER", "PATH",
    "PYTHONPATH", "RUNNER_ARCH", "RUNNER_NAME", "RUNNER_OS", "SHELL", "SHLVL", "TERM", "TERM_PROGRAM",
    "TZ", "USER", "VIRTUAL_ENV_PROMPT", "XDG_SESSION_TYPE",
})  # fmt: skip
"""Variables whose values say nothing private and may be words of the evidence itself."""
SHORTEST_SECRET = 6
LONGEST_PLAIN_WORD = 11
_SECRET_NAME = re.compile(
    r"(?i)(token|secret|passw|api_?key|auth|credential|cookie|private|signature|pat$|key$)"
)
_FORMATS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, flags), replacement)
    for pattern, replacement, flags in (
        (
            r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)",
            MARK,
            re.DOTALL,
        ),
        (r"\b([a-z][a-z0-9+.-]{1,20}://)[^/\s@\"'<>]{1,512}@", rf"\1{MARK}@", re.IGNORECASE),
        (
            r"\b((?:proxy-)?authorization|(?:set-)?cookie|x-[a-z-]*(?:key|token|secret)|private-token)"
            r"([\"']?\s*[:=]\s*)[^\r\n]{1,4096}",
            rf"\1\2{MARK}",
            re.IGNORECASE,
        ),
        (r"\b(bearer|basic)\s+[A-Za-z0-9+/_.=~-]{8,}", rf"\1 {MARK}", re.IGNORECASE),
        (
            r"\b(?:gh[opsur]_[A-Za-z0-9]{16,}|github_pat_[A-Za-z0-9_]{16,}|glpat-[A-Za-z0-9_-]{16,}"
            r"|hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|xox[a-z]-[A-Za-z0-9-]{10,}|npm_[A-Za-z0-9]{20,}"
            r"|pypi-[A-Za-z0-9_-]{20,}|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[A-Za-z0-9_-]{30,}|ya29\.[A-Za-z0-9_-]{16,}"
            r"|nvapi-[A-Za-z0-9_-]{16,}|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*)",
            MARK,
            0,
        ),
        (
            r"([?&;](?:access_token|token|api_?key|key|secret|password|passwd|sig|signature|x-amz-[a-z-]+)=)"
            r"[^&\s\"'#<>]{1,4096}",
            rf"\1{MARK}",
            re.IGNORECASE,
        ),
        (
            r"(--?[a-z-]*(?:token|password|passwd|secret|api-?key)[ =])(?![-<])\S{4,}",
            rf"\1{MARK}",
            re.IGNORECASE,
        ),
        (
            r"\b([A-Z0-9_]*(?:TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|CREDENTIALS)"
            r"(?:_[A-Z0-9_]+)?)([\"']?\s*[:=]\s*[\"']?)(?!\d+\b)(?!<)[^\s\"',;]{4,}",
            rf"\1\2{MARK}",
            0,
        ),
        (r"(?<![\w.])/(?:home|Users)/[^/\s:\"'<>]+", "~", 0),
    )
)


class Redactor:
    """Replaces secrets in text. Idempotent."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        literals: dict[str, str] = {}
        for name, value in variables.items():
            if _is_private(name, value):
                literals.update(dict.fromkeys(_spellings(value), MARK))
        home = variables.get("HOME", "")
        if len(home) > 1:
            literals[home.rstrip("/")] = "~"
        self._literals = literals
        ordered = sorted(literals, key=len, reverse=True)
        self._pattern = re.compile("|".join(re.escape(text) for text in ordered)) if ordered else None

    @classmethod
    def of_process(cls) -> Self:
        """A redactor that knows this process's environment."""
        return cls(os.environ)

    def text(self, text: str) -> str:
        """Text without secrets."""
        if self._pattern is not None:
            text = self._pattern.sub(lambda match: self._literals[match.group()], text)
        for pattern, replacement in _FORMATS:
            text = pattern.sub(replacement, text)
        return text

    def content(self, content: bytes) -> bytes:
        """A file's content without secrets; bytes that are no UTF-8 are kept as they are around them."""
        try:
            return self.text(content.decode("utf-8")).encode("utf-8")
        except UnicodeDecodeError:
            return self.text(content.decode("latin-1")).encode("latin-1")

    def file_name(self, name: str) -> str:
        """A name that a bundle may hold for a file whose own name it may not."""
        plain = re.sub(r"[^A-Za-z0-9_.-]", "_", self.text(name)).strip(".")[-60:]
        return f"{sha256_hex(name.encode('utf-8', 'surrogateescape'))[:12]}-{plain or 'file'}"

    def samples(self, samples: Samples) -> Samples:
        """Samples with every text cell, finding and the detail redacted."""
        return samples.model_copy(
            update={
                "detail": self.text(samples.detail),
                "findings": tuple(self._finding(f) for f in samples.findings),
                "tables": tuple(self._table(t) for t in samples.tables),
            }
        )

    def outcome(self, outcome: Outcome) -> Outcome:
        """Outcome with every free text redacted."""
        return outcome.model_copy(
            update={
                "summary": self.text(outcome.summary),
                "next_step": self.text(outcome.next_step),
                "control": None if outcome.control is None else self._control(outcome.control),
                "figures": tuple(self._figure(f) for f in outcome.figures),
                "findings": tuple(self._finding(f) for f in outcome.findings),
            }
        )

    def environment(self, environment: Environment) -> Environment:
        """Environment with command line and values redacted."""
        return environment.model_copy(
            update={
                "command": tuple(self.text(" ".join(environment.command)).split(" ")),
                "variables": tuple((name, self.text(value)) for name, value in environment.variables),
            }
        )

    def _finding(self, finding: Finding) -> Finding:
        texts = {
            name: self.text(value)
            for name in ("message", "path", "excerpt", "remedy", "waived")
            if (value := getattr(finding, name)) is not None
        }
        texts["excerpt"] = texts["excerpt"][:400]
        return finding.model_copy(update=texts)

    def _figure(self, figure: Figure) -> Figure:
        missing = None if figure.missing is None else self.text(figure.missing)
        return figure.model_copy(update={"missing": missing, "note": self.text(figure.note)})

    def _control(self, control: Control) -> Control:
        texts = {"description": self.text(control.description), "observed": self.text(control.observed)}
        return control.model_copy(update=texts)

    def _table(self, table: SampleTable) -> SampleTable:
        known: dict[str, str] = {}

        def clean(value: Scalar) -> Scalar:
            if not isinstance(value, str) or len(value) < SHORTEST_SECRET:
                return value
            if value not in known:
                known[value] = self.text(value)
            return known[value]

        if not any(isinstance(v, str) for row in table.rows for v in row):
            return table
        return table.model_copy(update={"rows": tuple(tuple(clean(v) for v in row) for row in table.rows)})


def _is_private(name: str, value: str) -> bool:
    """Whether a variable's value must not appear in a bundle."""
    if name in ALLOWED_VARIABLES or name in PUBLIC_VARIABLES or name == "HOME":
        return False
    if len(value) < SHORTEST_SECRET or re.fullmatch(r"[\d.:,]+", value):
        return False
    is_word = re.fullmatch(r"[A-Za-z_-]+", value) is not None and len(value) <= LONGEST_PLAIN_WORD
    return not is_word or _SECRET_NAME.search(name) is not None


def _spellings(value: str) -> tuple[str, ...]:
    """A value as it may appear in text."""
    spellings = {value, value.strip(), quote(value, safe=""), quote(value), json.dumps(value)[1:-1]}
    spellings.add(base64.b64encode(value.encode("utf-8", "surrogateescape")).decode())
    return tuple(s for s in spellings if len(s) >= SHORTEST_SECRET)
