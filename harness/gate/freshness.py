"""Whether evidence of an older head still speaks of the head that is judged."""

from collections.abc import Callable
from dataclasses import dataclass

from harness.domain.check import Check, StageName

__all__ = ["Move", "why_stale"]

PROSE = (".md", ".rst")
"""Suffixes of files that cannot change what runs; `.txt` can: requirements.txt, CMakeLists.txt."""


@dataclass(frozen=True, slots=True)
class Move:
    """What changed between a bundle's head and the head that is judged."""

    paths: tuple[str, ...] | None
    """Repository paths; None where they cannot be known, which makes everything stale."""
    prefix: str
    """Where the pack lies in the repository."""
    ops_of_file: Callable[[str], tuple[str, ...]]
    """The pack's map from a file to the ops whose evidence it invalidates."""


def why_stale(check: Check, move: Move | None) -> str | None:
    """Why a check's evidence does not survive the move, or None where it does.

    Isolation judges the whole diff, so any move ends it. A pack file ends the evidence of its ops, and with
    it that of every check of the whole model. A file outside the pack may be anything the model runs through,
    so it ends all evidence that ran something, unless it is prose or a test.
    """
    if move is None or move.paths is None:
        return "the bundle is of another head, and what changed since is not known"
    if not move.paths:
        return None
    if check.stage is StageName.ISOLATION:
        return f"{len(move.paths)} files changed since, and isolation judges the whole diff"
    for path in move.paths:
        if path.startswith(move.prefix):
            ops = move.ops_of_file(path)
            if ops and (check.op is None or check.op in ops):
                return f"{path} changed since, which {check.op or 'the whole model'} depends on"
        elif not _is_harmless(path) and check.stage is not StageName.AUDIT:
            return f"{path} changed since, outside the pack, and may be part of what ran"
    return None


def _is_harmless(path: str) -> bool:
    return path.endswith(PROSE) or path.startswith(("docs/", "tests/"))
