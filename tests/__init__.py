"""The tests."""

import os

# Torch reads it when it is imported, here and in the processes that tests start: as many workers as there are
# cores would otherwise have as many threads each, and wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
