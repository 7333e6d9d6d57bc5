"""Columns: the rows of one leaf as bytes, whatever their dtype is, in memory that grows.

A column on the CPU reserves as much address space as the whole budget, and the kernel gives memory to the
pages that have been written. So it grows without a copy, one `index_select` gathers from it, and memory that
is given up goes back to the system at once. On other devices a column is copied when it grows.
"""

from __future__ import annotations

import mmap
import sys

import numpy as np
import torch
from torch import Tensor

from torchcache2.core.gather import gather, write
from torchcache2.core.transfer import Runtime

__all__ = ["Column", "make_column"]

_PAGE = mmap.PAGESIZE
# Without this flag the system counts reserved address space as memory, and refuses to fork the process.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
_HUGE = 8 << 20  # memory that grows by this many bytes or more asks for huge pages


class Column:
    """Rows of `row_bytes` bytes each on any device; growing moves them.

    Attributes
    ----------
    row_bytes : int
    capacity : int
        Rows that there is memory for.
    """

    def __init__(self, row_bytes: int, device: torch.device) -> None:
        self.row_bytes = row_bytes
        self.capacity = 0
        self._device = device
        self._data = self._allocate(0)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.capacity * self.row_bytes

    def cost(self, rows: int) -> int:
        """Bytes that making room for so many rows takes at its peak."""
        return rows * self.row_bytes if rows > self.capacity else 0

    def grow(self, rows: int) -> None:
        """Make room for so many rows."""
        if rows > self.capacity:
            data = self._allocate(rows)
            data[: self.capacity] = self._data
            self._data, self.capacity = data, rows

    def shrink(self, rows: int) -> None:
        """Give back the memory behind so many rows."""
        if rows < self.capacity:
            self._data, self.capacity = self._data[:rows].clone(), rows

    def view(self, rows: int) -> Tensor:
        """The first rows, uint8 of shape ``(rows, row_bytes)``."""
        return self._data[:rows]

    def gather(self, positions: Tensor, runtime: Runtime | None) -> Tensor:
        """A copy of the rows at some positions, in their order."""
        return self._data.index_select(0, positions)

    def write(self, first: int, values: Tensor) -> None:
        """Write values of any dtype, from a row on."""
        write(self._data, first, values)

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy rows over others; `source` and `target` share none."""
        source, target = source.to(self._device), target.to(self._device)
        self._data.index_copy_(0, target, self._data.index_select(0, source))

    def _allocate(self, rows: int) -> Tensor:
        return torch.empty((rows, self.row_bytes), dtype=torch.uint8, device=self._device)


class _ReservedColumn(Column):
    """A column in reserved address space: it grows and shrinks in place, by whole pages."""

    def __init__(self, row_bytes: int, limit: int) -> None:
        self._committed = 0
        self._limit = max(_PAGE, -(-limit // _PAGE) * _PAGE)
        self._map = mmap.mmap(-1, self._limit, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        super().__init__(row_bytes, torch.device("cpu"))

    @property
    def nbytes(self) -> int:
        return self._committed

    def cost(self, rows: int) -> int:
        return max(0, self._pages(rows) - self._committed)

    def grow(self, rows: int) -> None:
        size = self._pages(rows)
        if size > self._limit:
            raise MemoryError(f"{size} bytes in a column limited to {self._limit}")
        if size > self._committed:
            if size - self._committed >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
                self._map.madvise(mmap.MADV_HUGEPAGE, self._committed, size - self._committed)
            self._committed, self.capacity = size, size // self.row_bytes

    def shrink(self, rows: int) -> None:
        size = self._pages(rows)
        if size < self._committed:
            self._map.madvise(mmap.MADV_DONTNEED, size, self._committed - size)
            if hasattr(mmap, "MADV_NOHUGEPAGE"):
                # Otherwise a huge page that begins before this range could take it in again.
                self._map.madvise(mmap.MADV_NOHUGEPAGE, size, self._committed - size)
            self._committed, self.capacity = size, size // self.row_bytes

    def gather(self, positions: Tensor, runtime: Runtime | None) -> Tensor:
        return gather(self._data, positions, runtime=runtime)

    def _pages(self, rows: int) -> int:
        return -(-rows * self.row_bytes // _PAGE) * _PAGE

    def _allocate(self, rows: int) -> Tensor:
        rows = self._limit // self.row_bytes
        data = torch.frombuffer(self._map, dtype=torch.uint8, count=rows * self.row_bytes)
        return data.view(rows, self.row_bytes)


class _NoColumn(Column):
    """A column of rows without bytes."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(0, device)
        self.capacity = np.iinfo(np.int64).max

    def shrink(self, rows: int) -> None:
        pass

    def move(self, source: Tensor, target: Tensor) -> None:
        pass

    def gather(self, positions: Tensor, runtime: Runtime | None) -> Tensor:
        return torch.empty((len(positions), 0), dtype=torch.uint8, device=self._device)


def make_column(row_bytes: int, limit: int, device: torch.device) -> Column:
    """A column of rows of so many bytes, which will never have more than `limit` bytes in all."""
    if row_bytes == 0:
        return _NoColumn(device)
    if device.type == "cpu" and hasattr(mmap, "MAP_ANONYMOUS") and hasattr(mmap, "MADV_DONTNEED"):
        try:
            return _ReservedColumn(row_bytes, limit)
        except (OSError, OverflowError):
            pass  # this system reserves no more address space than it has memory
    return Column(row_bytes, device)
