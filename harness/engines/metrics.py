"""vLLM's `/metrics` as numbers: counters since an arm opened, and how many requests ran at once.

Only names that a version exports are counted: one that is absent is not zero.
"""

import math
import re
from collections.abc import Mapping

__all__ = ["COUNTERS", "RUNNING", "acceptance_length", "counted", "parse_metrics"]

RUNNING = "vllm:num_requests_running"
COUNTERS: Mapping[str, str] = {
    "prefix_queries": "vllm:prefix_cache_queries_total",
    "prefix_hits": "vllm:prefix_cache_hits_total",
    "draft_steps": "vllm:spec_decode_num_drafts_total",
    "drafted": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "generated_tokens": "vllm:generation_tokens_total",
    "preemptions": "vllm:num_preemptions_total",
}
"""Our names, which `serving.ArmServer.counters` promises, and vLLM's."""
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{[^}]*\})?\s+(\S+)(?:\s+\S+)?")


def parse_metrics(text: str) -> dict[str, float]:
    """Values by metric, added up over labels; lines that are no sample, and values that are not finite, are
    left out: they count nothing.
    """
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = _SAMPLE.fullmatch(line.strip())
        if match is None or line.startswith("#"):
            continue
        try:
            value = float(match[2])
        except ValueError:
            continue
        if math.isfinite(value):
            found[match[1]] = found.get(match[1], 0.0) + value
    return {name: value for name, value in found.items() if math.isfinite(value)}


def counted(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, int]:
    """What each counter gained; a counter that went back means that the server was started anew, and counts
    from zero."""
    gained: dict[str, int] = {}
    for name, metric in COUNTERS.items():
        if metric in after:
            start = before.get(metric, 0.0)
            gained[name] = round(after[metric] - (start if start <= after[metric] else 0.0))
    return gained


def acceptance_length(counters: Mapping[str, int]) -> float | None:
    """Tokens a verify step: the accepted drafts and the one that is always kept; None where nothing was
    drafted."""
    steps = counters.get("draft_steps", 0)
    return 1.0 + counters.get("accepted", 0) / steps if steps else None
