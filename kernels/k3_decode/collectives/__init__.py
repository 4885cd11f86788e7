"""How ranks combine their parts: meetings of a forward, and the mailbox exchange that serves them on GPUs."""

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
