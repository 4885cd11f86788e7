"""fasttrack: the judge of GPU-kernel pull requests that ask for the fast track."""

__all__ = ["__version__"]

__version__ = "0.1.0"
