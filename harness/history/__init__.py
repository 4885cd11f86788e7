"""Questions over many bundles."""

from harness.history.index import Index, Refreshed, open_index

__all__ = ["Index", "Refreshed", "open_index"]
