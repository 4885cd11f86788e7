"""Prefix caching never hits, and nothing says so."""

from tests.faults.planting import engine_fault

FAULT = engine_fault(
    "prefix_hits_switched_off",
    title="Prefix caching never hits, and nothing says so.",
    report="vllm-project/vllm#54360",
    target="engine",
    at="k3_decode.prefixes:PrefixCache.keep",
    fault={"if self._capacity == 0 or": "if self._capacity >= 0 or"},
    repaired={"if self._capacity == 0 or": "if not self._capacity or"},
    checks=("coverage/prefix/",),
    expected="coverage",
)
