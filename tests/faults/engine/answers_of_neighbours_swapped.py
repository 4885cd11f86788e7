"""The fast path hands each request its neighbour's logits."""

from tests.faults.planting import engine_fault

FAULT = engine_fault(
    "answers_of_neighbours_swapped",
    title="The fast path hands each request its neighbour's logits.",
    report="vllm-project/vllm#51187",
    target="engine",
    at="k3_decode.engine:Engine._run",
    fault={
        "return self._strategy.drive(forwards)[0]": "out = self._strategy.drive(forwards)[0]\n    return out.roll(1, 0) if is_optimised else out"
    },
    repaired={
        "return self._strategy.drive(forwards)[0]": "out = self._strategy.drive(forwards)[0]\n    return out if is_optimised else out"
    },
    checks=("evals/drift", "coverage/path/{arch}.tp1.dcp1.b2.c24.d0.bf16.decode"),
    expected="evals",
)
