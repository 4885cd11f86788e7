"""A git directory of our own over somebody else's objects.

Invariant: it holds no configuration, attributes, refs, replace refs, grafts or hooks but ours; only objects
come from the judged repository, and nothing is written to it.
"""

import tempfile
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from harness.repository.git import hardened_environment

__all__ = ["ScratchGit"]

_CONFIG: Final = """\
[core]
\trepositoryformatversion = 0
\tbare = true
\tbigFileThreshold = 16m
"""


class ScratchGit:
    """Owns a temporary folder until closed."""

    def __init__(self, objects: Path) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fasttrack-git-")
        self.root = Path(self._folder.name)
        (self.root / "HEAD").write_text("ref: refs/heads/none\n")
        (self.root / "config").write_text(_CONFIG)
        (self.root / "refs").mkdir()
        (self.root / "objects").mkdir()
        self.environment = {
            **hardened_environment(),
            "GIT_DIR": str(self.root),
            "GIT_OBJECT_DIRECTORY": str(objects),
        }

    def close(self) -> None:
        """Delete the folder."""
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
