"""A row stream from its first step to its last, as `row_product.multiply` runs it, its loop in Python."""

from typing import Any

from k3_decode.cute import row_stream
from k3_decode.cute.row_plan import Place, Plan


def streamed(
    plan: Plan, place: Place, segments: Any, x: Any, norm_weight: Any = None, chain: int | None = None
) -> tuple[Any, Any]:
    """Sums of products, and sums of squares of x."""
    stream = row_stream.Stream(plan, place, segments, x, norm_weight, chain)
    if stream.turns:
        kept = row_stream.keep(stream)
        for _ in range(stream.turns):
            row_stream.turn(stream, kept)
        row_stream.resume(stream, kept)
    stream.run(stream.turns * stream.period, plan.steps)
    return stream.finished()
