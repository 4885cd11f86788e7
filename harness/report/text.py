"""How values and foreign text become words on a page: numbers with units, and text that can only be read.

Invariant: what `plain` gives holds no control character, no bidirectional override and no lone surrogate, so
that a page shows what a record says and in the order it says it. Escaping for HTML or Markdown comes after.
"""

import unicodedata
from urllib.parse import quote

from harness.domain.check import Figure

__all__ = [
    "STATUS_MARKS",
    "anchor",
    "compact",
    "figure_text",
    "label",
    "number",
    "plain",
    "repository_link",
    "source_link",
]

STATUS_MARKS = {
    "PASS": "✓",
    "FAIL": "✕",
    "NO_EVIDENCE": "∅",
    "INVALID": "≠",
    "INCONCLUSIVE": "≈",
    "SKIPPED": "·",
}
"""A shape for each status, so that nobody needs its colour."""
UNITS = {"_per_s": "/s", "_us": "µs", "_ms": "ms", "_ns": "ns", "_s": "s", "_bytes": "B", "_ulp": "ulp"}
"""By the end of a name; the first that fits."""
SHARES = ("share", "score", "agreement", "noise_floor", "power_at_margin")
WORDS = {
    "kl": "KL",
    "l2": "L2",
    "us": "µs",
    "p": "p",
    "gpu": "GPU",
    "mcnemar": "McNemar",
    "ulp": "ulp",
    "top1": "top-1",
}


def plain(text: str, limit: int = 2000) -> str:
    """Text of one line without anything that acts instead of being read; cut at `limit` characters."""
    kept = []
    for char in text[: limit + 1]:
        category = unicodedata.category(char)
        if char in "\n\r\t":
            kept.append(" ")
        elif category in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp"):
            kept.append(f"\\u{ord(char):04x}")
        else:
            kept.append(char)
    return "".join(kept[:limit]) + ("…" if len(text) > limit else "")


def label(name: str) -> str:
    """`optimised_relative_l2` as `optimised relative L2`, without the unit that its number carries."""
    for suffix in UNITS:
        if name.endswith(suffix) and len(name) > len(suffix):
            name = name.removesuffix(suffix)
            break
    return " ".join(WORDS.get(word, word) for word in plain(name, 80).split("_"))


def number(name: str, value: float | int) -> str:
    """A value with the unit that its name says."""
    if name.endswith("ratio"):
        return f"{value:.2f}\u00d7"
    if name.endswith("difference"):
        return f"{value:+.3f}"
    if name.endswith("bound_share"):
        return f"{value:.0%}"  # over 100 % where the bound is broken
    if any(name.endswith(s) for s in SHARES) and -1 <= value <= 1:
        return f"{value:.1%}"
    unit = next((u for suffix, u in UNITS.items() if name.endswith(suffix)), "")
    return f"{_digits(value)}{'' if unit in ('', '/s') else ' '}{unit}"


def figure_text(figure: Figure) -> str:
    """A figure with its interval, or that it was not measured."""
    if figure.value is None:
        return "not measured"
    text = number(figure.name, figure.value)
    if figure.low is not None and figure.high is not None:
        text += f" [{number(figure.name, figure.low)}, {number(figure.name, figure.high)}]"
    return text


def anchor(check: str) -> str:
    """Fragment of a check's place on the page."""
    return "check-" + "".join(c if c.isalnum() or c in "._-" else "-" for c in check)


def repository_link(repository: str) -> str | None:
    """Address of a repository on github.com; None for any other text."""
    prefix = "https://github.com/"
    parts = repository.removeprefix(prefix).removesuffix(".git").strip("/").split("/")
    if not repository.startswith(prefix) or len(parts) != 2:
        return None
    return prefix + "/".join(quote(part, safe="") for part in parts)


def source_link(repository: str, sha: str, path: str, line: int | None = None) -> str | None:
    """Address of a file's line, where the repository is one on github.com."""
    address = repository_link(repository)
    fragment = "" if line is None else f"#L{line}"
    return None if address is None else f"{address}/blob/{sha}/{quote(path)}{fragment}"


def compact(value: float) -> str:
    """Three digits: `0.52`, `3.42e-3`, `1,024`."""
    return _digits(value)


def _scientific(value: float) -> str:
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def _digits(value: float | int) -> str:
    size = abs(value)
    if value == 0:
        return "0"
    if size >= 1e7 or size < 1e-2:
        return _scientific(value)
    if float(value).is_integer() or size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"
