"""The base of an lse, as a type: kernels of others give natural logarithms and such of base 2, and nothing in
the numbers tells which.
"""

import math
from enum import Enum

__all__ = ["LogBase"]


class LogBase(float, Enum):
    """What a logarithm of summed exponentials was taken to; as a number, the base itself."""

    E = math.e
    TWO = 2.0
