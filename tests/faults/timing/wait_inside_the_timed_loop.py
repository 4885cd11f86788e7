"""The timer waits for the device after every pass, so that the wait counts as work."""

from tests.faults.played_timing import timer_faulty

FAULT = timer_faulty(
    "wait_inside_the_timed_loop",
    "The timer waits for the device after every pass, so that the wait counts as work.",
    "flashinfer-ai/flashinfer-bench#195",
    fault={"        replay()\n": "        replay()\n        torch.cuda.synchronize()\n"},
    repaired={"    ended.synchronize()\n": "    ended.synchronize()\n    torch.cuda.synchronize()\n"},
)
