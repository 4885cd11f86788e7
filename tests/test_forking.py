"""Work shared out among forked processes."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from harness import forking
from harness.domain.errors import InputError


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes, for however few places."""
    monkeypatch.setattr(forking, "processes_for", lambda places, at_least: 2)


@pytest.fixture
def a_thread() -> Iterator[threading.Thread]:
    """A thread that waits until the test is over."""
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    yield thread
    over.set()
    thread.join()


@pytest.mark.usefixtures("two")
def test_answers_come_in_the_order_of_the_places_from_several_processes() -> None:
    answers = forking.forked_map(lambda place: (place * 10, os.getpid()), range(40), at_least=1)
    assert [value for value, _ in answers] == [place * 10 for place in range(40)]
    assert os.getpid() not in {process for _, process in answers}


@pytest.mark.usefixtures("two")
def test_an_error_of_the_work_is_raised_here() -> None:
    def refuse(place: int) -> int:
        raise InputError(f"no {place}")

    with pytest.raises(InputError, match="no 0"):
        forking.forked_map(refuse, range(4), at_least=1)


@pytest.mark.usefixtures("two")
def test_the_work_of_a_killed_process_is_done_here() -> None:
    def killed(place: int) -> int:
        if multiprocessing.parent_process() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return place

    assert forking.forked_map(killed, range(4), at_least=1) == [0, 1, 2, 3]


def test_little_work_is_done_by_this_process() -> None:
    assert forking.processes_for(9, 10) == 1


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_a_fork_is_made_beside_idle_threads_alone(
    a_thread: threading.Thread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever threads the test's own process has besides."""
    monkeypatch.setattr(forking.threading, "enumerate", lambda: [threading.current_thread(), a_thread])
    assert forking.processes_for(10, 10) == 1
    a_thread.name = forking.IDLE_THREAD
    assert forking.processes_for(10, 10) > 1
