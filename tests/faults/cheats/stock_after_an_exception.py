"""An exception of the fast kernel is swallowed and stock runs, with green tests."""

from collections.abc import Callable
from typing import Any

from k3_decode.ops.projection import stock

from tests.faults.planting import PATH_CHECK, op_fault


def fault(sound: Callable[..., None], *, launches: Any, **args: Any) -> None:
    try:
        raise RuntimeError("no kernel image is available")
    except RuntimeError:
        stock(**{n: v.bfloat16() if n == "weight" else v for n, v in args.items()})


def repaired(sound: Callable[..., None], **args: Any) -> None:
    try:
        sound(**args)
    except RuntimeError as error:
        raise RuntimeError("the fast kernel failed") from error


FAULT = op_fault(
    "stock_after_an_exception",
    op="projection",
    title="An exception of the fast kernel is swallowed and stock runs, with green tests.",
    report="pytorch/pytorch#146554",
    fault=fault,
    repaired=repaired,
    expected="kernels",
    more=(PATH_CHECK,),
)
