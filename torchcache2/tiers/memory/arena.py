"""`Arena`: the rows of one namespace and schema, densely, in columns that grow.

Rows lie at 0 … n-1; when some are removed, the last ones take their places. Sizes are exact: they include
whole pages and, while a column or table is copied, both copies.

A `Column` has the rows of one leaf as bytes of any dtype. A small column on the CPU takes just its bytes. A
large one reserves address space for the whole budget, and the kernel allocates pages as they are written. So
it grows without a copy, one `index_select` gathers from it, and freed memory returns to the system at once.
On other devices a column grows by chunks, and is never copied.

Not thread-safe: the tier holds a lock. The tier also turns inference mode off.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcache2.core.keys import Bytes2D, Ordinals, Words
from torchcache2.core.memory import ALONE, Runtime, StreamOrder, as_words, gather, numbers, write
from torchcache2.core.rows import Rows, Schema
from torchcache2.tiers.index import KeyIndex

_PAGE = mmap.PAGESIZE
_SLAB = 64 << 20  # a column grows by at most this at a time, unless the rows need more
# Without this flag the system counts reserved address space as memory, and may refuse to fork.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
_MOST_MAPPED = 256  # larger parts of the budget are large columns: mappings per process are limited
_HUGE = 8 << 20  # memory that grows by this many bytes or more asks for huge pages
# A chunk has at most 64 MiB, or one row if that is larger. Even for a few rows, a column grows by a 64th of
# its size, at most 2 MiB: otherwise it would consist of very many small chunks.
_MOST, _PART, _MOST_UNASKED = 64 << 20, 64, 2 << 20
# Torch allocates GPU memory in multiples of 512 bytes, and large blocks in multiples of 2 MB.
_UNIT, _LARGE_UNIT, _LARGE = 512, 2 << 20, 10 << 20


class Column:
    """Rows of `row_bytes` bytes each in memory of the host.

    A small column takes just its bytes, as there may be thousands, and growing moves them. Once it is large,
    it moves to reserved address space, takes whole pages, and resizes in place.

    Attributes
    ----------
    row_bytes : int
    capacity : int
        Rows that there is memory for.

    With the `runtime` of an accelerator, rows are gathered into page-locked memory.
    """

    def __init__(self, row_bytes: int, limit: int = 0, runtime: Runtime | None = None) -> None:
        self.row_bytes = row_bytes
        self.capacity = self._committed = 0
        self._limit = max(_PAGE, -(-limit // _PAGE) * _PAGE)
        self._runtime = runtime
        self._map: mmap.mmap | None = None
        self._hold(torch.empty((0, row_bytes), dtype=torch.uint8, device="cpu"), 0)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.capacity * self.row_bytes if self._map is None else self._committed

    def cost(self, rows: int) -> int:
        """Peak bytes of making room for `rows` rows in all."""
        if rows <= self.capacity:
            return 0
        if self._map is None and not self._is_large(rows):
            return rows * self.row_bytes
        return self._pages(rows) - self._committed

    def grow(self, rows: int) -> None:
        """Make room for `rows` rows in all."""
        if rows <= self.capacity:
            return
        if self._map is None and self._is_large(rows):
            self._reserve()
        if self._map is None:
            data = torch.empty((rows, self.row_bytes), dtype=torch.uint8, device="cpu")
            data[: self.capacity] = self._data
            self._hold(data, rows)
            return
        size = self._pages(rows)
        if size > self._limit:
            raise MemoryError(f"{size} bytes in a column limited to {self._limit}")
        if size - self._committed >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE, self._committed, size - self._committed)
        self._committed, self.capacity = size, size // self.row_bytes

    def shrink(self, rows: int) -> None:
        """Free the memory behind the first `rows` rows."""
        if self._map is None:
            if rows < self.capacity:
                self._hold(self._data[:rows].clone(), rows)
            return
        size = self._pages(rows)
        if size < self._committed:
            self._map.madvise(mmap.MADV_DONTNEED, size, self._committed - size)
            if hasattr(mmap, "MADV_NOHUGEPAGE"):
                # Otherwise a huge page that begins before this range could cover it again.
                self._map.madvise(mmap.MADV_NOHUGEPAGE, size, self._committed - size)
            self._committed, self.capacity = size, size // self.row_bytes

    def view(self, rows: int) -> Tensor:
        """The first rows, uint8 of shape ``(rows, row_bytes)``."""
        return self._data[:rows]

    @property
    def memory(self) -> Sequence[Tensor]:
        """Tensors that cover all of the memory."""
        return [self._data]

    def gather(self, ordinals: Ordinals, dtype: torch.dtype = torch.uint8) -> Tensor:
        """A copy of the rows with these numbers, in their order, shape ``(k, numbers of a row)``."""
        size = self.row_bytes // dtype.itemsize
        if self._runtime is not None or len(ordinals) * self.row_bytes > ALONE:
            picked = gather(self._data, torch.from_numpy(ordinals), runtime=self._runtime)
            return picked.view(-1).view(dtype).view(len(ordinals), size)
        return numbers(self._array.take(ordinals, 0), dtype)

    def write(self, first: int, values: Tensor) -> None:
        """Write values of any dtype, starting at row `first`."""
        write(self._data, first, values)

    def move(self, source: Ordinals, target: Ordinals) -> None:
        """Copy rows over others; no row is both a source and a target."""
        moved = self._data.index_select(0, torch.from_numpy(source))
        self._data.index_copy_(0, torch.from_numpy(target), moved)

    def _hold(self, data: Tensor, rows: int) -> None:
        self._data, self._array, self.capacity = data, data.numpy(), rows

    def _pages(self, rows: int) -> int:
        return -(-rows * self.row_bytes // _PAGE) * _PAGE

    def _is_large(self, rows: int) -> bool:
        return rows * self.row_bytes > self._limit // _MOST_MAPPED

    def _reserve(self) -> None:
        """Move to reserved address space, unless the system has none; `grow` then commits its pages."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        with contextlib.suppress(OSError, OverflowError):
            reserved = mmap.mmap(-1, self._limit, flags=flags)
            rows = self._limit // self.row_bytes
            data = torch.frombuffer(reserved, dtype=torch.uint8, count=rows * self.row_bytes)
            data = data.view(rows, self.row_bytes)
            data[: self.capacity] = self._data
            self._hold(data, self.capacity)
            self._map = reserved


class _ChunkedColumn(Column):
    """Rows on a device in chunks that never move; the column grows and shrinks by whole chunks."""

    def __init__(self, row_bytes: int, device: torch.device, runtime: Runtime) -> None:
        super().__init__(row_bytes, runtime=runtime)
        self._device = device
        self._chunks: list[Tensor] = []  # contiguous, uint8 of shape (rows, row_bytes)
        self._starts: Ordinals = np.empty(0, np.int64)  # first row of each chunk

    @property
    def nbytes(self) -> int:
        return sum(chunk.untyped_storage().nbytes() for chunk in self._chunks)

    @property
    def memory(self) -> Sequence[Tensor]:
        return self._chunks

    def cost(self, rows: int) -> int:
        return sum(self._sizes(rows))

    def grow(self, rows: int) -> None:
        for size in list(self._sizes(rows)):
            count = size // self.row_bytes
            data = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._chunks.append(data[: count * self.row_bytes].view(count, self.row_bytes))
            self._starts = np.append(self._starts, self.capacity)
            self.capacity += count

    def shrink(self, rows: int) -> None:
        kept = int(np.searchsorted(self._starts, rows))
        if kept < len(self._chunks):
            self.capacity = int(self._starts[kept])
            del self._chunks[kept:]
            self._starts = self._starts[:kept]

    def gather(self, ordinals: Ordinals, dtype: torch.dtype = torch.uint8) -> Tensor:
        size = self.row_bytes // dtype.itemsize
        return self._gathered(ordinals).view(-1).view(dtype).view(len(ordinals), size)

    def _gathered(self, ordinals: Ordinals) -> Tensor:
        parts = self._by_chunk(ordinals)
        if len(parts) == 1:
            ((chunk, _, inside),) = parts
            return as_words(chunk).index_select(0, inside).view(torch.uint8)
        picked = torch.empty((len(ordinals), self.row_bytes), dtype=torch.uint8, device=self._device)
        for chunk, where, inside in parts:
            as_words(picked).index_copy_(0, where, as_words(chunk).index_select(0, inside))
        return picked

    def write(self, first: int, values: Tensor) -> None:
        last = first + len(values)
        while first < last:
            number = int(np.searchsorted(self._starts, first, side="right")) - 1
            chunk, inside = self._chunks[number], first - int(self._starts[number])
            count = min(last - first, len(chunk) - inside)
            write(chunk, inside, values[len(values) - (last - first) :][:count])
            first += count

    def move(self, source: Ordinals, target: Ordinals) -> None:
        moved = as_words(self._gathered(source))
        for chunk, where, inside in self._by_chunk(target):
            as_words(chunk).index_copy_(0, inside, moved.index_select(0, where))

    def _by_chunk(self, ordinals: Ordinals) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Each chunk with some of these rows, their positions in `ordinals`, and in it (on the device)."""
        assert self._runtime is not None
        which = np.searchsorted(self._starts, ordinals, side="right") - 1
        order = np.argsort(which, kind="stable")
        table = np.stack([order, (ordinals - self._starts[which])[order]])
        where, inside = self._runtime.send(torch.from_numpy(table), self._device)
        hit, begins = np.unique(which[order], return_index=True)
        spans = zip(hit, pairwise([*begins, len(order)]), strict=True)
        return [(self._chunks[number], where[a:b], inside[a:b]) for number, (a, b) in spans]

    def _sizes(self, rows: int) -> Iterator[int]:
        """Bytes of the chunks to add for `rows` rows in all, rounded as the allocator rounds them."""
        capacity, total, most = self.capacity, self.nbytes, max(1, _MOST // self.row_bytes)
        while capacity < rows:
            size = min(rows - capacity, most) * self.row_bytes
            size = max(size, min(total // _PART, _MOST_UNASKED))
            unit = _LARGE_UNIT if size >= _LARGE else _UNIT
            size = -(-size // unit) * unit
            capacity += size // self.row_bytes
            total += size
            yield size


def row_column(
    row_bytes: int, limit: int, device: torch.device, runtime: Runtime, are_remote: bool
) -> Column:
    """A column on any device; for `are_remote`, see `Arena`."""
    if device.type == "cpu":
        return Column(row_bytes, limit, runtime if are_remote else None)
    return _ChunkedColumn(row_bytes, device, runtime)


class Arena:
    """Rows of one schema under their keys, and when each was last used.

    The columns lie on `device`, and none ever exceeds `limit` bytes. `runtime` is the accelerator's. If rows
    `are_remote`, they came from the accelerator to the host, and `gather` returns them in page-locked memory.
    """

    def __init__(
        self,
        schema: Schema,
        device: torch.device,
        limit: int,
        runtime: Runtime,
        *,
        are_remote: bool = False,
    ) -> None:
        self.schema = schema
        self.device = device
        self._order = StreamOrder(device, runtime)
        sizes = [leaf.row_bytes for leaf in schema.leaves]
        # Leaves without bytes have no column.
        self._of_leaves = [
            row_column(size, limit, device, runtime, are_remote) if size else None for size in sizes
        ]
        self._columns = [column for column in self._of_leaves if column is not None]
        self._keys, self._ticks = Column(16, limit), Column(8, limit)
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
    def device_bytes(self) -> int:
        """Bytes allocated on the device of the rows."""
        return sum(column.nbytes for column in self._columns)

    @property
    def ticks(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """When each row was last used, shape (n,); writable."""
        return self._ticks.view(len(self)).view(torch.int64).view(-1).numpy()

    def cost(self, count: int) -> int:
        """Peak bytes of making room for `count` more rows."""
        rows = len(self) + count
        return sum(column.cost(rows) for column in self._all) + self._index.growth(count)

    def slab(self, count: int) -> int:
        """How many rows to make room for at once when `count` are needed.

        Up to 64 MB, an arena doubles on a device; on the host, where growing costs less, it grows by an
        eighth.
        """
        widest = max(column.row_bytes for column in self._all)
        grown = len(self) // 8 if self.device.type == "cpu" else len(self)
        return max(count, min(grown, _SLAB // widest))

    def reserve(self, count: int) -> bool:
        """Make room for `count` more rows; False if the system has no memory for them."""
        rows, before = len(self) + count, self.room + len(self)
        try:
            for column in self._all:
                column.grow(rows)
            self._index.reserve(count)
        except (OSError, MemoryError, RuntimeError):
            with contextlib.suppress(MemoryError, RuntimeError):
                for column in self._columns:
                    column.shrink(before)
            return False
        finally:
            self._index.keys = self._key_words()
            self._order.renew()
        return True

    def find(self, words: Words) -> Ordinals:
        """Row of each key, or -1."""
        return self._index.find(words)

    def row(self, low: int, high: int) -> tuple[int, list[memoryview]] | None:
        """The ordinal of a key and a view of each leaf's bytes; None if the row is not on the host."""
        ordinal = self._index.find_one(low, high) if self.device.type == "cpu" else -1
        if ordinal < 0:
            return None
        count, row = len(self), list[memoryview]()
        for column in self._of_leaves:
            row.append(
                memoryview(bytearray()) if column is None else column.view(count)[ordinal].numpy().data
            )
        return ordinal, row

    def gather(self, ordinals: Ordinals) -> Rows:
        """A copy of the rows with these ordinals, in their order."""
        columns = []
        with self._in_order() if self._order.is_needed else contextlib.nullcontext():
            for leaf, column in zip(self.schema.leaves, self._of_leaves, strict=True):
                if column is None:
                    picked = torch.empty(0, dtype=leaf.stored, device=self.device)
                else:
                    picked = column.gather(ordinals, leaf.stored)
                is_flat = column is not None and len(leaf.shape) == 1
                columns.append(picked if is_flat else picked.view(len(ordinals), *leaf.stored_shape))
        return Rows(self.schema, columns, len(ordinals))

    def append(self, keys: Bytes2D, rows: Rows, tick: int) -> None:
        """Add rows under new, distinct keys; the caller has made `room` for them."""
        first, count = len(self), len(rows)
        with self._in_order():
            for column, values in zip(self._of_leaves, rows.laid_out_as(self.schema).columns, strict=True):
                if column is not None:
                    column.write(first, values)
        self._ticks.write(first, torch.full((count,), tick, device="cpu"))
        # Last, so that no key is ever without its row.
        self._index.add(keys.view("<u8"))

    def remove(self, ordinals: Ordinals) -> None:
        """Remove rows; the last rows take their places. If that fails, forget all rows."""
        source, target = self._index.remove(ordinals)
        if len(source) == 0:
            return
        try:
            with self._in_order():
                for column in (*self._columns, self._ticks):
                    column.move(source, target)
        except BaseException:
            self._index = KeyIndex(self._key_words())  # only some rows have moved
            raise

    def shrink(self) -> None:
        """Give back the memory behind the last row."""
        for column in self._all:
            column.shrink(len(self))
        self._order.renew()
        self._index.keys = self._key_words()

    @contextlib.contextmanager
    def _in_order(self) -> Iterator[None]:
        """Encloses the device's work on the columns."""
        if not self._order.is_needed:
            yield
            return
        self._order.begin(chain.from_iterable(column.memory for column in self._columns))
        try:
            yield
        finally:
            self._order.end()

    def _key_words(self) -> Words:
        words: Words = self._keys.view(self._keys.capacity).numpy().view("<u8")
        return words
