"""What an executor is, and the one of this machine: several children beside each other.

An executor takes checks of one stage and gives samples as they come, each check once. It raises
`HarnessFault` when our own code or the infrastructure broke for good; what it gave before stays good.
"""

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Protocol

from harness.domain.check import Check, Samples
from harness.executors.local import ChildSampler, HarnessFault

__all__ = ["Executor", "LocalExecutor"]


class Executor(Protocol):
    """Where sampling runs."""

    def stream(
        self, checks: Sequence[Check], side_by_side: int, on_begin: Callable[[str], None]
    ) -> Generator[tuple[Check, Samples], None, None]:
        """Samples of each check as they come, at most `side_by_side` on one machine (or a GPU each); checks
        begin in the order given, and `on_begin` is told their ids.
        """
        ...

    def close(self) -> None:
        """End whatever still runs."""
        ...


class LocalExecutor:
    """Children of this process."""

    def __init__(self, samplers: Sequence[ChildSampler]) -> None:
        self._samplers = tuple(samplers)

    def stream(
        self, checks: Sequence[Check], side_by_side: int, on_begin: Callable[[str], None]
    ) -> Generator[tuple[Check, Samples], None, None]:
        """See `Executor`. The first fault ends the stream when the checks in flight are done; it is raised
        then.
        """
        waiting, free = list(checks), list(self._samplers[:side_by_side])
        running: dict[Future[Samples], tuple[Check, ChildSampler]] = {}
        fault: HarnessFault | None = None
        with ThreadPoolExecutor(max_workers=len(free)) as pool:
            while running or (waiting and fault is None):
                while waiting and free and fault is None:
                    check, sampler = waiting.pop(0), free.pop()
                    on_begin(check.id)
                    running[pool.submit(sampler.sample, check)] = (check, sampler)
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    check, sampler = running.pop(future)
                    free.append(sampler)
                    try:
                        samples = future.result()
                    except HarnessFault as error:
                        fault = error
                        continue
                    yield check, samples
        if fault is not None:
            raise fault

    def close(self) -> None:
        """End the children."""
        for sampler in self._samplers:
            sampler.close()
