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
_MOST = 4  # blocks of a thread


class SpareMemory(threading.local):
    """Blocks of each thread, which are lent again when nothing has a part of them any more."""

    def __init__(self) -> None:
        self._blocks: list[tuple[Array, weakref.ref[Any]]] = []  # and what is lent of each

    def empty(self, size: int) -> Tensor:
        """Uint8 ``(size,)`` on the CPU, with anything in it."""
        if size < _LEAST:
            return torch.empty(size, dtype=torch.uint8, device="cpu")
        free = [i for i, (_, lent) in enumerate(self._blocks) if lent() is None]
        i = free[0] if free else len(self._blocks)
        block = self._blocks[i][0] if free else None
        if block is None or len(block) < size:
            block = np.empty(size, np.uint8)
        part = block[:size]
        if i < _MOST:
            self._blocks[i : i + 1] = [(block, weakref.ref(part))]
        return torch.from_numpy(part)  # whatever has the tensor's memory has the array
