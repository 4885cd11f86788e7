"""The errors people see: one paragraph each (what, where, what to do), never a traceback.

A traceback means a fault of our own. Each type has the exit code that the command line gives for it.
"""

__all__ = ["DeviceMissing", "EvidenceError", "FasttrackError", "InputError", "ServiceError"]


class FasttrackError(Exception):
    """Base of every error that is told in words; the command line exits with `exit_code`."""

    exit_code = 2


class InputError(FasttrackError):
    """A file, option or range that somebody gave is wrong."""


class DeviceMissing(FasttrackError):
    """The machine lacks what the request needs: a GPU, a compiler, a package."""


class EvidenceError(FasttrackError):
    """A bundle or sample file does not verify, is incomplete, or belongs to another plan."""


class ServiceError(FasttrackError):
    """A service that was asked, such as GitHub, refused, did not answer, or answered with nonsense."""
