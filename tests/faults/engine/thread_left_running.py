"""Work goes on in a thread after the step has returned."""

import threading

from tests.faults.planting import step_fault

DONE = threading.Event()


def start(wait: bool) -> None:
    thread = threading.Thread(target=DONE.wait if wait else bool)
    thread.start()
    if not wait:
        thread.join()


def stop() -> None:
    DONE.set()
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(timeout=5)
    DONE.clear()


FAULT = step_fault(
    "thread_left_running",
    title="Work goes on in a thread after the step has returned.",
    report="gpu-mode/reference-kernels#162",
    fault=lambda _: start(wait=True),
    repaired=lambda _: start(wait=False),
    undo=stop,
)
