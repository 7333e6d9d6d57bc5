"""Rows that wait to be written, and can be read meanwhile (`Pending`), and which can be (`Serialisable`)."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from torchcache2.core.errors import UnserialisableError
from torchcache2.core.keys import Array, Keys
from torchcache2.core.logs import WarnOnce
from torchcache2.core.memory import CUDA, Arriving, as_bytes
from torchcache2.core.process import ProcessLock
from torchcache2.core.rows import Rows, Schema
from torchcache2.files.layout import schema_text
from torchcache2.files.segment import Columns

_MOST_SCHEMAS = 1000


class Serialisable:
    """Warns once if outputs cannot be written; `message` has a placeholder for the reason."""

    def __init__(self, tell: WarnOnce, message: str) -> None:
        self._tell = tell
        self._message = message
        self._known: dict[Schema, bool] = {}

    def __call__(self, schema: Schema) -> bool:
        """Whether a schema has a JSON form; those that differ only in shapes are tried once."""
        known = self._known.get(schema.family)
        if known is None:
            try:
                schema_text(schema)
                known = True
            except UnserialisableError as error:
                self._tell("schema", self._message, str(error))
                known = False
            if len(self._known) > _MOST_SCHEMAS:
                self._known.clear()
            self._known[schema.family] = known
        return known


_CPU = torch.device("cpu")
_SLAB = 8 << 20
_ALIGNED = 64
_BATCH_BYTES = 2048  # estimated size of a batch's Python objects
_FEW, _JOINED, _MOST_JOINED = 8, 64, 1 << 20  # most rows to join a batch; its most rows and bytes


class Slabs:
    """Gives out pieces of large memory blocks: their huge pages make them cheap to fill.

    Python frees a block when its last piece is.
    """

    def __init__(self) -> None:
        self._lock = ProcessLock()
        self._slab = np.empty(0, np.uint8)
        self._used = 0

    def take(self, size: int) -> Array:
        """Memory of `size` bytes."""
        if size >= _SLAB:
            return np.empty(size, np.uint8)
        with self._lock():
            start = -(-self._used // _ALIGNED) * _ALIGNED
            if start + size > len(self._slab):
                self._slab, start = np.empty(_SLAB, np.uint8), 0
            self._used = start + size
            return self._slab[start : self._used]


class OwnRows:
    """A private copy of rows on the host; rows of an accelerator may arrive later.

    The `rows` may be on any device, and the caller may overwrite them afterwards. `slabs` provides the
    memory. With `is_added`, a few small rows on the host are left to `Pending.add`, which copies them before
    the caller continues.
    """

    def __init__(self, rows: Rows, slabs: Slabs, *, is_added: bool = False) -> None:
        self.schema = rows.schema
        plain = rows.in_logical_order()
        self.nbytes = len(rows) * rows.schema.row_bytes
        self._lock = ProcessLock()
        self._rows: Rows | None = None
        self.is_copied = True
        if any(map(CUDA.owns, plain.columns)):
            columns = [c if CUDA.owns(c) else c.to(_CPU, copy=True) for c in plain.columns]
            self._arriving: Arriving | None = Arriving(columns)
            return
        self._arriving = None
        is_here = all(column.device == _CPU for column in plain.columns)
        are_few = len(rows) <= _FEW and self.nbytes <= _MOST_JOINED
        self.is_copied = not (is_added and is_here and are_few)
        if not self.is_copied:
            self._rows = plain
            return
        copies = []
        for leaf, column in zip(plain.schema.leaves, plain.columns, strict=True):
            size = len(rows) * leaf.row_bytes
            if size == 0:
                copies.append(column.to(_CPU, copy=True))
                continue
            memory = slabs.take(size)
            target = torch.from_numpy(memory).view(leaf.stored).view(len(rows), *leaf.shape)
            if column.device == _CPU and column.is_contiguous():
                np.copyto(memory, as_bytes(column).numpy().reshape(-1))  # this wakes no threads
            else:
                target.copy_(column)
            copies.append(target)
        self._rows = Rows(plain.schema, copies, len(rows))

    @property
    def rows(self) -> Rows:
        """The rows, contiguous in logical order; waits for copies from an accelerator."""
        with self._lock():
            if self._rows is None and self._arriving is not None:
                columns = self._arriving.wait()
                self._rows = Rows(self.schema.in_logical_order, columns, len(columns[0]))
                self._arriving = None
            assert self._rows is not None
            return self._rows

    @property
    def is_here(self) -> bool:
        """Whether all copies from an accelerator have finished."""
        return self._arriving is None

    def with_room(self, count: int, capacity: int) -> OwnRows:
        """A copy of the first rows, with room for more behind them."""
        columns = []
        for column in self.rows.columns:
            columns.append(column.new_empty((capacity, *column.shape[1:])))
            _copy(columns[-1][:count], column[:count])
        return self._of(Rows(self.rows.schema, columns, capacity))

    def part(self, start: int, end: int) -> OwnRows:
        """Some of the rows, without a copy."""
        columns = [column[start:end] for column in self.rows.columns]
        return self._of(Rows(self.rows.schema, columns, end - start))

    def take(self, positions: Array) -> OwnRows:
        """A copy of some of the rows."""
        return self._of(self.rows.take(torch.from_numpy(positions)))

    def _of(self, rows: Rows) -> OwnRows:
        own = copy.copy(self)
        own.nbytes, own._rows = len(rows) * self.schema.row_bytes, rows
        return own


def _copy(target: Tensor, source: Tensor) -> None:
    """Copy a contiguous tensor on the host without waking torch's threads."""
    np.copyto(as_bytes(target).numpy(), as_bytes(source).numpy())


class Pending:
    """Rows that will be one segment.

    Attributes
    ----------
    namespace : bytes
    number : int
        This segment's number in the `NamespaceIndex`.
    nbytes, count : int
        Bytes and number of the rows.
    since : float
        When the first row was added, by the writer's clock.
    last : float
        When the last one was.
    name : str
        The file's name, once it is about to be written.
    dropped : bool
        Whether the rows have been forgotten.
    thread : int
        The `threading.get_ident` of the thread writing this segment; 0 if none.
    done : bool
        Whether the writer is finished with this segment, successfully or not.
    """

    checksums: Array | None = None  # rows in memory have none

    def __init__(self, namespace: bytes, number: int, since: float) -> None:
        self.namespace = namespace
        self.number = number
        self.batches: list[tuple[Keys, OwnRows]] = []  # the last one may have room for more
        self.nbytes = 0
        self.count = 0
        self.since = self.last = since
        self.name = ""
        self.dropped = False
        self.thread = 0
        self.done = False
        self._starts: list[int] = []
        self._counts: list[int] = []

    def __len__(self) -> int:
        return self.count

    def add(self, keys: Keys, own: OwnRows) -> int:
        """Add a batch; returns the number of its first row. The caller may write to its keys afterwards."""
        first = self.count
        if not self._join(keys, own):
            self._starts.append(first)
            self._counts.append(len(keys))
            own = own if own.is_copied else own.with_room(len(keys), len(keys))
            self.batches.append((Keys(keys.namespace, keys.data.copy(), keys.group), own))
            self.nbytes += _BATCH_BYTES
        self.nbytes += own.nbytes + 16 * len(keys)
        self.count += len(keys)
        return first

    def _join(self, keys: Keys, own: OwnRows) -> bool:
        """Add a few rows to the last batch if it has their schema; many batches cost memory and time.

        Other threads may be reading: existing rows never change, and growing copies them first.
        """
        count = len(keys)
        if count > _FEW or not self.batches or (used := self._counts[-1]) + count > _JOINED:
            return False
        before, last = self.batches[-1]
        is_large = (used + count) * own.schema.row_bytes > _MOST_JOINED
        if is_large or own.schema != last.schema or not (own.is_here and last.is_here):
            return False
        if used + count > len(before):
            capacity = 2 * (used + count)
            data = np.empty((capacity, before.data.shape[1]), np.uint8)
            data[:used] = before.data[:used]
            before, last = Keys(before.namespace, data, before.group), last.with_room(used, capacity)
        before.data[used : used + count] = keys.data
        for column, source in zip(last.rows.columns, own.rows.columns, strict=True):
            _copy(column[used : used + count], source)
        self.batches[-1], self._counts[-1] = (before, last), used + count
        return True

    def added(self) -> Iterator[tuple[Array, int]]:
        """The keys of each batch, and the number of its first row."""
        batches = zip(self.batches, self._starts, self._counts, strict=True)
        return ((keys.data[:count], first) for (keys, _), first, count in batches)

    def rows(self) -> list[tuple[Keys, Rows]]:
        """All rows, to be written."""
        found = []
        for (keys, own), count in zip(self.batches, self._counts, strict=True):
            if count < len(keys):
                keys, own = Keys(keys.namespace, keys.data[:count], keys.group), own.part(0, count)
            found.append((keys, own.rows.laid_out_as(own.schema)))
        return found

    def read_ahead(self, rows: Array) -> None:
        """Does nothing, as the rows are in memory."""

    def schemas(self, rows: Array) -> Iterator[tuple[Schema, Array]]:
        """Yields the schemas of some rows, each with the positions in `rows` of those that have it."""
        numbers = self._batches_of(rows)
        by_schema: dict[Schema, list[Array]] = {}
        for number in np.unique(numbers).tolist():
            schema = self.batches[number][1].schema
            by_schema.setdefault(schema, []).append(np.flatnonzero(numbers == number))
        for schema, parts in by_schema.items():
            yield schema, np.sort(np.concatenate(parts))

    def fill(self, columns: Columns, rows: Array, targets: Array) -> None:
        """Copy rows of one schema into columns, at `targets`."""
        numbers = self._batches_of(rows)
        for number in np.unique(numbers).tolist():
            which = np.flatnonzero(numbers == number)
            own = self.batches[number][1].rows
            chosen = rows[which] - self._starts[number]
            for column, source in zip(columns, own.columns, strict=True):
                column[targets[which]] = as_bytes(source).numpy()[chosen]

    def _batches_of(self, rows: Array) -> Array:
        starts = np.array(self._starts, np.int64)
        numbers: Array = np.searchsorted(starts, rows, side="right") - 1
        return numbers
