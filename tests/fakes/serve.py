"""The sampling child on the fake pack: `python -m tests.fakes.serve JOB BEHAVIOUR`.

BEHAVIOUR: `honest`, or what the candidate does when a session opens: `segfault`, `exit`, `says_and_exits`,
`hang`, `raise`; or what the harness does: `harness_fault`, `obstacle` (a server that lies), `no_start` (it
ends before it is ready).
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from harness import worker
from harness.domain.errors import ServiceError
from tests.fakes.pack import FakePack


class MisbehavingPack(FakePack):
    """Does one bad thing whenever a session is opened."""

    def __init__(self, behaviour: str) -> None:
        super().__init__()
        self._behaviour = behaviour

    def open_session(self, request: Any, observer: Any) -> Any:
        if self._behaviour == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self._behaviour == "exit":
            os._exit(3)
        if self._behaviour == "says_and_exits":
            print("last words of the candidate", flush=True)
            os._exit(3)
        if self._behaviour == "hang":
            time.sleep(3600)
        if self._behaviour == "raise":
            raise RuntimeError("illegal memory access")
        return super().open_session(request, observer)


def _meets_a_liar(check: Any, context: Any) -> Any:
    raise ServiceError("http://127.0.0.1:1/tokenize answers without tokens: {}")


def main() -> None:
    """Serve a job."""
    job, behaviour = Path(sys.argv[1]), sys.argv[2]
    worker.load_pack = lambda name: MisbehavingPack(behaviour)  # type: ignore[assignment,return-value]  # a fake
    if behaviour == "no_start":
        sys.exit("no module named harness.stages.missing")
    if behaviour == "harness_fault":
        worker.sample_check = lambda check, context: 1 / 0  # type: ignore[assignment,return-value]  # a fault of ours
    if behaviour == "obstacle":
        worker.sample_check = _meets_a_liar
    worker.serve(worker.Job.model_validate_json(job.read_bytes()))


if __name__ == "__main__":
    main()
