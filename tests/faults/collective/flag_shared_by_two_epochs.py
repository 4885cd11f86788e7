"""One flag serves all epochs and the reader takes it back, so a raise that comes early is lost: a hang."""

from tests.faults.collective_pack import collective_fault, flag_exchange, lamport_rank

FAULT = collective_fault(
    "flag_shared_by_two_epochs",
    title="One flag serves all epochs and the reader takes it back, so an early raise is lost and ranks hang.",
    report="vllm-project/vllm#2760",
    fault=lambda rank: flag_exchange(rank, "shared_flag"),
    repaired=lambda rank: flag_exchange(rank, "released"),
    planted=lambda rank: lamport_rank(rank, clears_ahead=1),
)
