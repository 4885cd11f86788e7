"""One OpenMP thread: the tests' tensors are small, and spinning threads slow every process beside them."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

from hypothesis import settings  # after the environment is set, as it may load numpy

# The same examples in every run: a random draw that fails once in a while belongs into a search, not into CI.
settings.register_profile("fixed", derandomize=True)
settings.load_profile("fixed")
