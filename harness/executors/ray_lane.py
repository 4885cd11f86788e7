"""One lane of a cluster: the process on a node that starts a sampling child and sends back what it gave.

Runs as a Ray actor, and knows nothing of Ray. A candidate only ever runs in the lane's child, so the end of a
lane is the infrastructure's and the end of its child is an observation. What checks leave in `logs` and
`ledger` travels with their samples, as nodes share no folder with the driver.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

from harness.domain.check import Check
from harness.domain.machine import Tier
from harness.executors.local import ChildSampler, HarnessFault

__all__ = ["CHILD_LOG", "FOLDERS", "Answer", "Lane", "LaneSetup", "clear_left"]

CHILD_LOG = "child.log"
PREFIX, HELD = "fasttrack-lane-", "held"
"""Of a lane's folder, and the file in it that a living lane has locked."""
FOLDERS = ("logs", "ledger")
MAX_FILE_BYTES = 64 * 2**20


class Answer(NamedTuple):
    """What one check gave on a node."""

    samples: str
    """JSON of `Samples`; empty where the harness broke."""
    fault: str
    files: tuple[tuple[str, str, bytes], ...]
    """(folder, name, bytes) of every file that is new or grew."""


class LaneSetup(NamedTuple):
    """What a lane is made from; the callables are found by their names on the node."""

    tier: Tier
    lay_out: Callable[[bytes, Path], Path]
    """Writes the plan and what a child needs into a folder; gives the file that the child is started with."""
    command: Callable[[Path], tuple[str, ...]]
    """The child's command line on this node."""
    objections: Callable[[bytes], tuple[str, ...]]
    """What keeps this node from being taken for the plan's machine; empty where nothing does."""
    has_network: bool


def clear_left() -> int:
    """Remove the folders of lanes that are gone, as a lane that is killed cannot remove its own; how many.

    A lane holds a lock in its folder while it lives, so that whose lock is free has no owner.
    """
    removed = 0
    for held in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{HELD}"):
        if held.parent.is_symlink():  # what somebody else put there
            continue
        with contextlib.suppress(OSError), os.fdopen(os.open(held, os.O_RDWR | os.O_NOFOLLOW), "rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(held.parent, ignore_errors=True)
            removed += 1
    return removed


def _own_folder() -> tuple[Path, IO[bytes]]:
    """A new folder, and its lock, which nobody took before us."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        held = (folder / HELD).open("ab")
        fcntl.flock(held, fcntl.LOCK_EX)
        if os.fstat(held.fileno()).st_nlink:
            return folder, held
        held.close()


class Lane:
    """Samples checks one after another on the node it lives on."""

    def __init__(self, plan: bytes, setup: LaneSetup) -> None:
        clear_left()
        self._folder, self._held = _own_folder()
        for name in FOLDERS:
            (self._folder / name).mkdir()
        self._sent: dict[Path, int] = {}
        self._refused = setup.objections(plan)
        self._log = (self._folder / "logs" / CHILD_LOG).open("ab")
        job = setup.lay_out(plan, self._folder)
        self._sampler = ChildSampler(
            setup.command(job), setup.tier, lambda _note: None, self._log, has_network=setup.has_network
        )

    def refuses(self) -> tuple[str, ...]:
        """How this node differs from the plan's machine."""
        return self._refused

    def sample(self, check: Check) -> Answer:
        """Samples of one check, with what it left behind."""
        try:
            samples, fault = self._sampler.sample(check).model_dump_json(), ""
        except HarnessFault as error:
            samples, fault = "", str(error)
        self._log.flush()
        return Answer(samples, fault, tuple(self._new_files()))

    def close(self) -> None:
        """End the child and remove the lane's folder."""
        self._sampler.close()
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._held.close()

    def _new_files(self) -> Iterator[tuple[str, str, bytes]]:
        """Files of checks whole; of the child's log, which only grows, what is new."""
        for folder in FOLDERS:
            for path in sorted((self._folder / folder).iterdir()):
                size = path.stat().st_size if path.is_file() else 0
                seen = self._sent.get(path, 0)
                if size == seen or size > MAX_FILE_BYTES:
                    continue
                self._sent[path] = size
                with path.open("rb") as file:
                    file.seek(seen if path.name == CHILD_LOG else 0)
                    yield folder, path.name, file.read()
