"""`SpareMemory`: memory for rows that are soon copied elsewhere, which the next batch uses again.

Blocks of megabytes that come and go between samples that stay for a while leave a heap full of holes: in each
worker of a `DataLoader` it grew by 100 MB. A block that stays does not, and its pages are there already.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcache2.core.arrays import Array

__all__ = ["SpareMemory"]

_LEAST = 128 << 10  # bytes; smaller blocks leave small holes


class SpareMemory(threading.local):
    """One block for each thread, which is lent again when nothing has a part of it any more."""

    _block: Array = np.empty(0, np.uint8)
    _lent: weakref.ref[Any] | None = None

    def empty(self, size: int) -> Tensor:
        """Uint8 ``(size,)`` on the CPU, with anything in it."""
        if size < _LEAST:
            return torch.empty(size, dtype=torch.uint8, device="cpu")
        if len(self._block) < size or (self._lent is not None and self._lent() is not None):
            self._block = np.empty(size, np.uint8)
        part = self._block[:size]
        self._lent = weakref.ref(part)  # whatever has the tensor's memory has this array
        return torch.from_numpy(part)
