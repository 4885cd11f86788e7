"""How much of a repository is read before it is refused."""

from dataclasses import dataclass

__all__ = ["Limits"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on one reading; policies set the first two."""

    max_changed_files: int = 5000
    max_diff_bytes: int = 64 * 2**20
    """Of patch text with no context lines."""
    max_blob_bytes: int = 16 * 2**20
    """Of one file that somebody wants to read."""
    timeout_s: float = 120.0
    """Of one git command."""
