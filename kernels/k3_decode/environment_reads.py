"""Whether the package's own Python asks for the environment while kernels are imported or traced.

One trace serves all architectures, and what was traced without a GPU stands for what a GPU will run. A source
that reads a variable could be other code elsewhere, behind the compiler's back. Invariant: a read counts
where the nearest code outside of Python's own library is the package's; what the compiler asks for itself
does not. Code without a file (of `eval` or `exec`) is whose file called it. A source that goes around
`os.environ` (`posix.environ`, /proc/self/environ, a C library, the compiler's private objects) is not seen.
"""

import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["noted_reads"]

KIND: Any = type(os.environ)
READS = ("__getitem__", "__iter__", "__len__", "__repr__")
"""Methods that tell something of the environment; those of a mapping go through them."""
LIBRARY = str(Path(sysconfig.get_paths()["stdlib"]))


@contextmanager
def noted_reads(root: Path) -> Iterator[list[str]]:
    """Inside the block, a list that fills with the reads of `os.environ` by code under `root`, in words."""
    found: list[str] = []
    kept = {name: getattr(KIND, name) for name in READS}

    def noting(name: str) -> Any:
        def method(self: Any, *asked: Any) -> Any:
            place = _asker(root)
            if place is not None:
                words = f"{place} reads {asked[0] if asked else 'all'} of the environment"
                found.extend([] if words in found else [words])
            return kept[name](self, *asked)

        return method

    for name in kept:
        setattr(KIND, name, noting(name))
    try:
        yield found
    finally:
        for name, method in kept.items():
            setattr(KIND, name, method)


def _asker(root: Path) -> str | None:
    """`file:line` under `root` of whoever asks; None where it is somebody else."""
    frame: Any = sys._getframe(2)
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    path = None if frame is None else Path(frame.f_code.co_filename)
    if path is None or not path.is_relative_to(root):
        return None
    return f"{path.relative_to(root).as_posix()}:{frame.f_lineno}"


def _is_library(file: str) -> bool:
    """Whether a frame's code is Python's own, or is no file's: then its caller answers for it."""
    return (file.startswith(LIBRARY) and "site-packages" not in file) or not os.path.isfile(file)
