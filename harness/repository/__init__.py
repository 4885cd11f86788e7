"""A change and its files, read from a git repository that nobody trusts."""

from harness.repository.change import load_change
from harness.repository.limits import Limits
from harness.repository.revisions import merge_base, past_changes, require_repository
from harness.repository.tree import GitTree
from harness.repository.worktree import describe_dirt

__all__ = [
    "GitTree",
    "Limits",
    "describe_dirt",
    "load_change",
    "merge_base",
    "past_changes",
    "require_repository",
]
