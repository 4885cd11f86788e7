"""A factor is rounded down once a page: too little to fail at any length that a CPU tries alone."""

from collections.abc import Callable
from typing import Any

from tests.faults.planting import op_fault

LOST_PER_PAGE = 2.0**-13


def scaled(sound: Callable[..., None], loss: float, **args: Any) -> None:
    """The sound op, then every request's output times a factor that falls page by page."""
    sound(**args)
    for request, length in enumerate(args["lengths"].tolist()):
        mine = slice(request * args["rows"], (request + 1) * args["rows"])
        args["out"][mine] *= (1 - loss) ** (length // 64)


FAULT = op_fault(
    "error_of_every_page_adds_up",
    op="mla_attend",
    title="A factor is rounded down once a page: too little to fail at any length that a CPU tries alone.",
    report="vllm-project/vllm#59665",
    fault=lambda sound, **args: scaled(sound, LOST_PER_PAGE, **args),
    repaired=lambda sound, **args: scaled(sound, 0.0, **args),
    cells=(),
    more=("kernels/mla_attend/growth/cpu",),
)
