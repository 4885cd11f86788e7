"""What prepares a sample is timed with it, and makes both arms look alike."""

from tests.faults.played_timing import timer_faulty

FAULT = timer_faulty(
    "set_up_inside_the_span",
    "What prepares a sample is timed with it, and makes both arms look alike.",
    "tile-ai/TileOPs#695",
    fault={"    reset()\n    begun.record()\n": "    begun.record()\n    reset()\n"},
    repaired={"    reset()\n    begun.record()\n": "    reset()\n    reset()\n    begun.record()\n"},
)
