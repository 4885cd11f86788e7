"""A rank raises its flag before its data is there: no release, no acquire."""

from tests.faults.collective_pack import collective_fault, flag_exchange, lamport_rank

FAULT = collective_fault(
    "flag_before_the_data",
    title="A rank raises its flag before its data is there: no release, no acquire.",
    report="vllm-project/vllm#8558",
    fault=lambda rank: flag_exchange(rank, "flag_first"),
    repaired=lambda rank: flag_exchange(rank, "released"),
    planted=lambda rank: lamport_rank(rank, clears_ahead=1),
)
