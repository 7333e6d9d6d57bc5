"""`Arena`: the rows of one namespace and schema, densely, in columns that grow in place.

A column on the CPU reserves as much address space as the whole budget, and the kernel gives memory to the
pages that have been written. So it grows without a copy, one `index_select` gathers from it, and memory that
is given up goes back to the system at once. On other devices a column is copied when it grows. Columns are
bytes, whatever the dtype of the rows is.

Rows lie at 0 … n-1; when some are removed, the last ones move into their places. Sizes are exact: they count
whole pages and, while a column or table is copied, both copies.

Not thread-safe: the tier holds a lock. The tier also turns inference mode off.
"""

from __future__ import annotations

import mmap
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcache2.core.arrays import Bytes2D, Ordinals, Words
from torchcache2.core.gather import gather, write
from torchcache2.core.rows import Rows
from torchcache2.core.schema import Schema
from torchcache2.core.transfer import Runtime, StreamOrder
from torchcache2.tiers.index import KeyIndex

__all__ = ["Arena"]

_PAGE = mmap.PAGESIZE
# Without this flag the system counts reserved address space as memory, and refuses to fork the process.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
_SLAB = 64 << 20  # a column grows by doubling up to this many bytes at a time
_HUGE = 8 << 20  # memory that grows by this many bytes or more asks for huge pages


class Arena:
    """Rows of one schema under their keys, and when each was last used.

    The columns of the output are on `device`, and none will ever exceed `limit` bytes. With the `runtime` of
    the accelerator that the rows came from, rows are gathered into page-locked memory.
    """

    def __init__(
        self, schema: Schema, device: torch.device, limit: int, runtime: Runtime | None = None
    ) -> None:
        self.schema = schema
        self.device = device
        self._runtime = runtime
        self._order = StreamOrder(device)
        host = torch.device("cpu")
        sizes = [leaf.row_bytes for leaf in schema.leaves]
        self._columns = [_column(size, limit, device) for size in sizes]
        self._keys, self._ticks = _column(16, limit, host), _column(8, limit, host)
        self._all = [*self._columns, self._keys, self._ticks]
        self._index = KeyIndex(self._key_words())

    def __len__(self) -> int:
        return len(self._index)

    @property
    def room(self) -> int:
        """Rows that can be added without growing."""
        rows = min(column.capacity for column in self._all) - len(self)
        return min(rows, self._index.room)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row with its key and tick."""
        return sum(column.row_bytes for column in self._all)

    @property
    def nbytes(self) -> int:
        """Bytes allocated: columns, keys, ticks, and the table."""
        return sum(column.nbytes for column in self._all) + self._index.nbytes

    @property
    def ticks(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """When each row was last used, shape (n,); writable."""
        return self._ticks.view(len(self)).view(torch.int64).view(-1).numpy()

    def cost(self, count: int) -> int:
        """Bytes that making room for `count` more rows takes at its peak."""
        rows = len(self) + count
        return sum(column.cost(rows) for column in self._all) + self._index.growth(count)

    def slab(self, count: int) -> int:
        """How many rows to make room for at once when `count` are needed: doubles, up to 64 MB."""
        widest = max(column.row_bytes for column in self._all)
        return max(count, min(len(self), _SLAB // widest))

    def reserve(self, count: int) -> bool:
        """Make room for `count` more rows; False if the system has no memory for them."""
        rows = len(self) + count
        self._begin()
        try:
            for column in self._all:
                column.grow(rows)
            self._index.reserve(count)
        except (OSError, MemoryError, RuntimeError):
            return False
        finally:
            self._index.keys = self._key_words()
            self._end()
        return True

    def find(self, words: Words) -> Ordinals:
        """Row of each key, or -1."""
        return self._index.find(words)

    def gather(self, ordinals: Ordinals) -> Rows:
        """A copy of the rows with these ordinals, in their order."""
        positions = torch.from_numpy(ordinals).to(self.device)
        columns = []
        self._begin()
        for leaf, column in zip(self.schema.leaves, self._columns, strict=True):
            picked = column.gather(positions, self._runtime).view(-1).view(leaf.stored)
            columns.append(picked.view(len(ordinals), *leaf.stored_shape))
        self._end()
        return Rows(self.schema, columns, len(ordinals))

    def append(self, keys: Bytes2D, rows: Rows, tick: int) -> None:
        """Add rows under distinct keys that are not here; `room` has been made for them."""
        first, count = len(self), len(rows)
        self._begin()
        for column, values in zip(self._columns, rows.laid_out_as(self.schema).columns, strict=True):
            column.write(first, values)
        self._end()
        self._ticks.write(first, torch.full((count,), tick, device="cpu"))
        # This comes last, so that there is never a key without its row.
        self._index.add(keys.view("<u8"))

    def remove(self, ordinals: Ordinals) -> None:
        """Forget rows; the last rows take their places."""
        source, target = self._index.remove(ordinals)
        if len(source) == 0:
            return
        sources, targets = torch.from_numpy(source), torch.from_numpy(target)
        self._begin()
        for column in (*self._columns, self._ticks):
            column.move(sources, targets)
        self._end()

    def shrink(self) -> None:
        """Give back the memory behind the last row."""
        self._begin()
        for column in self._all:
            column.shrink(len(self))
        self._end()
        self._index.keys = self._key_words()

    def _begin(self) -> None:
        if self._order.is_needed:
            self._order.begin([column.view(column.capacity) for column in self._columns if column.row_bytes])

    def _end(self) -> None:
        if self._order.is_needed:
            self._order.end()

    def _key_words(self) -> Words:
        words: Words = self._keys.view(self._keys.capacity).numpy().view("<u8")
        return words


class _Column:
    """Rows of `row_bytes` bytes each on any device; growing moves them."""

    def __init__(self, row_bytes: int, device: torch.device) -> None:
        self.row_bytes = row_bytes
        self.capacity = 0
        self._device = device
        self._data = self._allocate(0)

    @property
    def nbytes(self) -> int:
        return self.capacity * self.row_bytes

    def cost(self, rows: int) -> int:
        return rows * self.row_bytes if rows > self.capacity else 0

    def grow(self, rows: int) -> None:
        if rows > self.capacity:
            data = self._allocate(rows)
            data[: self.capacity] = self._data
            self._data, self.capacity = data, rows

    def shrink(self, rows: int) -> None:
        if rows < self.capacity:
            self._data, self.capacity = self._data[:rows].clone(), rows

    def view(self, rows: int) -> Tensor:
        return self._data[:rows]

    def gather(self, positions: Tensor, runtime: Runtime | None) -> Tensor:
        return self._data.index_select(0, positions)

    def write(self, first: int, values: Tensor) -> None:
        write(self._data, first, values)

    def move(self, source: Tensor, target: Tensor) -> None:
        source, target = source.to(self._device), target.to(self._device)
        self._data.index_copy_(0, target, self._data.index_select(0, source))

    def _allocate(self, rows: int) -> Tensor:
        return torch.empty((rows, self.row_bytes), dtype=torch.uint8, device=self._device)


class _ReservedColumn(_Column):
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


class _NoColumn(_Column):
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


def _column(row_bytes: int, limit: int, device: torch.device) -> _Column:
    if row_bytes == 0:
        return _NoColumn(device)
    if device.type == "cpu" and hasattr(mmap, "MAP_ANONYMOUS") and hasattr(mmap, "MADV_DONTNEED"):
        try:
            return _ReservedColumn(row_bytes, limit)
        except (OSError, OverflowError):
            pass  # this system reserves no more address space than it has memory
    return _Column(row_bytes, device)
