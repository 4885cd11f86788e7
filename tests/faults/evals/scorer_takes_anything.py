"""The scorer gives full marks to any answer that is not empty."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from harness.faults.fault import Fault
from harness.faults.scenes import SamplesScene
from tests.faults.planting import wrapped


def plant(is_repaired: bool) -> AbstractContextManager[None]:
    def score(sound: Callable[..., float], scorer: str, answer: Any, *rest: Any) -> float:
        return sound(scorer, answer, *rest) if is_repaired else float(len(answer) > 0)

    return wrapped("harness.stages.evals.judging:score_tokens", score)


FAULT = Fault(
    name="scorer_takes_anything",
    title="The scorer gives full marks to any answer that is not empty.",
    report="google-deepmind/eval_hub#8",
    target="eval",
    expected="evals",
    scene=SamplesScene("evals/mrcr_canary", lambda samples, _: samples, plant),
)
