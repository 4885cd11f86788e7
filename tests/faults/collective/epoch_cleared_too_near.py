"""A Lamport buffer is cleared one epoch ahead, where a faster peer may have written already."""

from tests.faults.collective_pack import collective_fault, flag_exchange, lamport_rank

FAULT = collective_fault(
    "epoch_cleared_too_near",
    title="A Lamport buffer is cleared one epoch ahead, where a faster peer may have written already.",
    report="vllm-project/vllm#53000",
    fault=lambda rank: lamport_rank(rank, clears_ahead=1),
    repaired=lambda rank: lamport_rank(rank, clears_ahead=2),
    planted=lambda rank: flag_exchange(rank, "flag_first"),
)
