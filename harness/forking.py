"""Pure work shared out among forked processes, which inherit what it works on.

Invariant: what `forked_map` gives does not depend on the number of processes, nor on whether there are any.
"""

import contextlib
import multiprocessing
import os
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Final, TypeVar

__all__ = ["IDLE_THREAD", "forked_map", "processes_for"]

MAX_PROCESSES: Final = 8
"""Each holds what one piece of the work needs."""
CHUNKS: Final = 8
"""Pieces of the work that each process takes one after another, so that none waits long for the last."""
IDLE_THREAD: Final = "waits for its process to end"
"""Name of threads that hold no lock, whatever they wait for: a fork beside them is safe."""
T = TypeVar("T")

_work: Callable[[int], Any] | None = None
"""What forked processes do. They inherit it: a closure cannot be sent."""


def forked_map(work: Callable[[int], T], places: Sequence[int], at_least: int) -> list[T]:
    """`work` of each place, in order; by several processes where there are `at_least` so many places.

    Answers are pickled. An error that `work` raises is raised here. Where a process was killed, as for want
    of memory, this one does all of the work again.
    """
    global _work
    processes = processes_for(len(places), at_least)
    if processes == 1:
        return [work(place) for place in places]
    _work = work
    try:
        with contextlib.ExitStack() as stack:
            # Python warns of a fork beside threads; those here are idle, or of libraries that handle it.
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore", DeprecationWarning)
            fork = multiprocessing.get_context("fork")
            pool = stack.enter_context(ProcessPoolExecutor(processes, mp_context=fork))
            return list(pool.map(_inherited, places, chunksize=1 + len(places) // (processes * CHUNKS)))
    except BrokenProcessPool:
        return [work(place) for place in places]
    finally:
        _work = None


def processes_for(places: int, at_least: int) -> int:
    """How many processes share so many pieces of work. One where a fork is unsafe or not worth it."""
    others = [
        t for t in threading.enumerate() if t.name not in (IDLE_THREAD, threading.current_thread().name)
    ]
    is_safe = sys.platform == "linux" and not others
    if places < at_least or not is_safe or multiprocessing.parent_process() is not None:
        return 1
    return min(MAX_PROCESSES, len(os.sched_getaffinity(0)))


def _inherited(place: int) -> Any:
    assert _work is not None, "only forked processes come here"
    return _work(place)
