"""A background thread computes after the call has returned."""

import threading
import time
from collections.abc import Callable
from typing import Any

from tests.faults.planting import op_fault


def fault(sound: Callable[..., None], **args: Any) -> None:
    args["launches"][1] += 1
    rest = {name: value for name, value in args.items() if name != "launches"}

    def later() -> None:
        time.sleep(0.05)
        sound(**rest, launches=args["launches"].clone())

    threading.Thread(target=later, daemon=True).start()


def repaired(sound: Callable[..., None], **args: Any) -> None:
    thread = threading.Thread(target=sound, kwargs=args)
    thread.start()
    thread.join()


FAULT = op_fault(
    "computed_in_a_thread",
    op="projection",
    title="A background thread computes after the call has returned.",
    report="gpu-mode/reference-kernels#162",
    fault=fault,
    repaired=repaired,
    expected="kernels",
    more=(),
)
