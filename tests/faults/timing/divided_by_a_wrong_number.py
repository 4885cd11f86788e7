"""The time of all passes is divided by one pass too many."""

from tests.faults.played_timing import timer_faulty

FAULT = timer_faulty(
    "divided_by_a_wrong_number",
    "The time of all passes is divided by one pass too many.",
    "pytorch/pytorch#177765",
    fault={"* 1e3 / passes": "* 1e3 / (passes + 1)"},
    repaired={"* 1e3 / passes": "* 1e3 / len(range(passes))"},
)
