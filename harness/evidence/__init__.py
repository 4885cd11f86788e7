"""Bundles: written as a run goes, verified by anyone, signed, packed and compared.

Evidence lies below the stages and trusts nobody: what it cannot derive itself (an outcome from samples) it
takes as a callable.
"""

__all__: list[str] = []
