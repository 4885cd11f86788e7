"""How ranks combine their parts: meetings of a forward, and the mailbox exchange that serves them on GPUs.

Loads on use: the models of the exchange are planned with where no torch is.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from k3_decode.collectives.meetings import (
        Collective,
        Exchange,
        gather,
        reduce,
        run_alone,
        run_distributed,
        run_ranks,
    )

__all__ = ["Collective", "Exchange", "gather", "reduce", "run_alone", "run_distributed", "run_ranks"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from k3_decode.collectives import meetings

    return getattr(meetings, name)
