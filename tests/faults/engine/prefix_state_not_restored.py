"""A prefix hit restores the cache's pages and forgets the recurrent state."""

from tests.faults.planting import engine_fault

FAULT = engine_fault(
    "prefix_state_not_restored",
    title="A prefix hit restores the cache's pages and forgets the recurrent state.",
    report="vllm-project/vllm#53912",
    target="engine",
    at="k3_decode.state:Pool.resume",
    fault={"caches.kda[layer].recurrent[home] = state.recurrent": "pass"},
    repaired={
        "caches.kda[layer].recurrent[home] = state.recurrent": "caches.kda[layer].recurrent[home].copy_(state.recurrent)"
    },
    checks=("coverage/prefix/",),
    expected="coverage",
)
