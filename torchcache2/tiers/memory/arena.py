"""`Arena`: the rows of one namespace and schema, densely, in columns that grow.

Rows lie at 0 … n-1; when some are removed, the last ones take their places. Sizes are exact: they include
whole pages and, while a column or table is copied, both copies.

Not thread-safe: the tier holds a lock. The tier also turns inference mode off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import torch

from torchcache2.core.keys import Bytes2D, Ordinals, Words
from torchcache2.core.memory import Runtime, StreamOrder
from torchcache2.core.rows import Rows, Schema
from torchcache2.tiers.index import KeyIndex
from torchcache2.tiers.memory.columns import host_column, row_column

_SLAB = 64 << 20  # a column grows by at most this at a time, unless the rows need more


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
        self._columns = [row_column(size, limit, device, runtime, are_remote) for size in sizes]
        self._keys, self._ticks = host_column(16, limit), host_column(8, limit)
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
        for column in self._columns:
            data = column.view(count)[ordinal].numpy().data if column.row_bytes else memoryview(bytearray())
            row.append(data)
        return ordinal, row

    def gather(self, ordinals: Ordinals) -> Rows:
        """A copy of the rows with these ordinals, in their order."""
        columns = []
        with self._in_order() if self._order.is_needed else contextlib.nullcontext():
            for leaf, column in zip(self.schema.leaves, self._columns, strict=True):
                picked = column.gather(ordinals, leaf.stored)
                is_flat = len(leaf.shape) == 1
                columns.append(picked if is_flat else picked.view(len(ordinals), *leaf.stored_shape))
        return Rows(self.schema, columns, len(ordinals))

    def append(self, keys: Bytes2D, rows: Rows, tick: int) -> None:
        """Add rows under new, distinct keys; the caller has made `room` for them."""
        first, count = len(self), len(rows)
        with self._in_order():
            for column, values in zip(self._columns, rows.laid_out_as(self.schema).columns, strict=True):
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
