"""`Segment`: reads rows of one segment. Each row is checked when it is read."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from xxhash import xxh3_64_intdigest

from torchcache2.core.keys import Array
from torchcache2.core.memory import empty_bytes, moved
from torchcache2.core.rows import Rows, Schema
from torchcache2.core.sizes import check_room
from torchcache2.files import codec as codecs
from torchcache2.files.descriptors import Descriptor, Descriptors
from torchcache2.files.encode import Encoded, row_checksums
from torchcache2.files.errors import DamagedError
from torchcache2.files.filesystem import FileSystem
from torchcache2.files.heads import parse_head, read_head
from torchcache2.files.lanes import lane
from torchcache2.files.layout import Layout

_CHECKED_AT_ONCE = 8 << 20  # bytes
Columns = list[np.ndarray[Any, np.dtype[np.uint8]]]


class Files(Protocol):
    """Files that are open."""

    def get(self, path: str) -> Descriptor:
        """The file of a path, open for reading."""
        ...


class Segment:
    """The index of one segment with n rows; the rows are read from the file when they are asked for.

    Attributes
    ----------
    path : str
    layout : Layout
    nbytes : int
        Bytes of the file.
    keys : ndarray of uint8, shape (n, 16), or None
        The key of each row; None when the owner of the segment has taken them into its index.
    """

    def __init__(
        self,
        fs: FileSystem,
        descriptors: Files,
        path: str,
        layout: Layout,
        start: int,
        index: dict[str, Array],
    ) -> None:
        self.fs = fs
        self._descriptors = descriptors
        self.path = path
        self.layout = layout
        self._start = start  # byte of the file at which the rows begin
        self.nbytes = start + layout.row_data_bytes
        self.keys: Array | None = index["keys"]
        self._checksums = index["checksums"]
        self._shapes = index.get("shapes")
        self._offsets = index.get("offsets")
        if self._offsets is not None and layout.payload_bytes < 1 << 32:
            self._offsets = self._offsets.astype(np.uint32)
        self._block_checksums = index.get("block_checksums")
        if self._block_checksums is not None:  # half of each is kept, as rows have checksums too
            self._block_checksums = self._block_checksums.astype(np.uint32)
        self._codec = codecs.codec(layout.codec)
        self._lanes = [lane(leaf.stored) for leaf in layout.schema.leaves]
        self._starts = layout.column_starts if layout.rows_per_block == 0 else []

    def __len__(self) -> int:
        return self.layout.count

    @property
    def index_bytes(self) -> int:
        """Bytes of memory that the index takes, without the keys."""
        arrays = (self._checksums, self._shapes, self._offsets, self._block_checksums)
        return sum(array.nbytes for array in arrays if array is not None)

    @classmethod
    def open(
        cls, fs: FileSystem, descriptors: Descriptors, path: str, *, limit: int, structured: bool = True
    ) -> Segment:
        """Read and check the index of a segment. A row may have `limit` bytes.

        Without `structured`, the rows can only be checked, but the classes of their structure need not exist;
        see `schema_from_json`. Raises an `OSError`, what `torchcache2.files.header.parse` raises, and an
        `OptionError` if the codec is not installed.
        """
        head, size = read_head(fs, path)
        return cls.of_head(fs, descriptors, path, head, size=size, limit=limit, structured=structured)

    @classmethod
    def of_head(
        cls,
        fs: FileSystem,
        descriptors: Descriptors,
        path: str,
        head: bytes,
        *,
        limit: int,
        size: int | None = None,
        structured: bool = True,
    ) -> Segment:
        """The same from the bytes before the rows, of a segment that need not be in its path.

        It must have `size` bytes; None: as many as the head states.
        """
        layout, index = parse_head(head, size, limit, structured=structured)
        return cls(fs, descriptors, path, layout, len(head), index)

    @classmethod
    def written(cls, fs: FileSystem, descriptors: Descriptors, path: str, encoded: Encoded) -> Segment:
        """The segment that has just been written."""
        return cls(fs, descriptors, path, encoded.layout, len(encoded.head), dict(encoded.index))

    def through(self, fs: FileSystem, files: Files) -> Segment:
        """The same segment, whose rows are read by `fs` from what `files` has for its path."""
        other = copy.copy(self)
        other.fs, other._descriptors = fs, files
        return other

    def schemas(self, rows: Array) -> Iterator[tuple[Schema, Array]]:
        """The schemas of some rows, shape ``(m,)``, and for each the positions in `rows` that have it."""
        if self._shapes is None:
            yield self.layout.schema, np.arange(len(rows))
            return
        shapes = self._shapes[rows]
        if (shapes == shapes[:1]).all():  # this costs far less than finding out how many there are
            if len(rows):
                yield self._schema_of(shapes[0].tolist()), np.arange(len(rows))
            return
        distinct, inverse = np.unique(shapes, axis=0, return_inverse=True)
        for i, extents in enumerate(distinct.tolist()):
            yield self._schema_of(extents), np.flatnonzero(inverse.reshape(-1) == i)

    def read_ahead(self, rows: Array) -> None:
        """Have the system read rows ahead: numbers of rows, shape ``(m,)``."""
        file = self._descriptors.get(self.path)
        if self._offsets is not None:
            blocks = np.sort(rows // self.layout.rows_per_block)
            ranges = list(zip(*self._ranges(blocks[_firsts(blocks, 0)]), strict=True))
        else:
            runs, ranges = _runs(np.sort(rows)), []
            for leaf, start in zip(self.layout.schema.leaves, self._starts, strict=True):
                base, size = self._start + start, leaf.row_bytes
                ranges += [(base + row * size, (end - first) * size) for first, end, row in runs if size]
        for offset, size in ranges:
            self.fs.will_need(file, offset, size)

    def read(self, rows: Array, columns: Columns, targets: Array) -> bool:
        """Read rows of one schema into columns; False if one of them is damaged.

        Parameters
        ----------
        rows : ndarray of int64, shape (m,)
            Numbers of the rows in the segment.
        columns : list of ndarray of uint8, shape (k, bytes)
            One for each leaf; `bytes` are those of the leaf in one row.
        targets : ndarray of int64, shape (m,)
            Where in the columns each row goes, less than k.
        """
        if len(rows) == 0:
            return True
        file = self._descriptors.get(self.path)
        order = np.argsort(rows, kind="stable")
        rows, targets = rows[order], targets[order]
        try:
            if self._offsets is None:
                self._read_columns(file, rows, columns, targets)
            else:
                self._read_blocks(file, rows, columns, targets)
        except DamagedError:
            return False
        found = row_checksums(columns, targets.tolist())
        return bool((found == self._checksums[rows]).all())

    def check(self) -> int:
        """Read all rows; how many of them are damaged."""
        damaged = 0
        row_bytes = max(1, self.layout.schema.row_bytes)
        step = 1 if self._shapes is not None else max(1, _CHECKED_AT_ONCE // row_bytes)
        for first in range(0, len(self), step):
            rows = np.arange(first, min(len(self), first + step))
            for schema, which in self.schemas(rows):
                columns = empty_columns(schema, len(which))
                if not self.read(rows[which], columns, np.arange(len(which))):
                    damaged += self._count_damaged(schema, rows[which])
        return damaged

    def _count_damaged(self, schema: Schema, rows: Array) -> int:
        columns = empty_columns(schema, 1)
        return sum(not self.read(rows[i : i + 1], columns, np.zeros(1, np.int64)) for i in range(len(rows)))

    def _read_columns(self, file: Descriptor, rows: Array, columns: Columns, targets: Array) -> None:
        runs, places = _runs(rows), targets.tolist()
        for column, start in zip(columns, self._starts, strict=True):
            size = column.shape[1]
            if size == 0:
                continue
            view = column.reshape(-1).data
            base = self._start + start
            for first, end, row in runs:
                buffers = [view[place * size : place * size + size] for place in places[first:end]]
                self.fs.read_all(file, buffers, base + row * size)

    def _read_blocks(self, file: Descriptor, rows: Array, columns: Columns, targets: Array) -> None:
        assert self._offsets is not None and self._block_checksums is not None
        per_block = self.layout.rows_per_block
        numbers = rows // per_block
        chosen = _firsts(numbers, 0)
        firsts = chosen.tolist()
        ends = [*firsts[1:], len(rows)]
        blocks = numbers[chosen].tolist()
        starts, sizes = self._ranges(numbers[chosen])
        checksums = self._block_checksums[blocks].tolist()
        for i, first in enumerate(firsts):
            data = memoryview(bytearray(sizes[i]))
            self.fs.read_all(file, [data], starts[i])
            if xxh3_64_intdigest(data) & 0xFFFFFFFF != checksums[i]:
                raise DamagedError("another checksum")
            if per_block == 1:
                place = targets[first]
                self._codec.decode(data, [column[place] for column in columns], self._lanes)
                if ends[i] - first > 1:  # the row is wanted at several places
                    for column in columns:
                        column[targets[first + 1 : ends[i]]] = column[place]
                continue
            count = min(per_block, len(self) - blocks[i] * per_block)
            outs = [np.empty((count, column.shape[1]), np.uint8) for column in columns]
            self._codec.decode(data, [out.reshape(-1) for out in outs], self._lanes)
            chosen = rows[first : ends[i]] - blocks[i] * per_block
            for column, out in zip(columns, outs, strict=True):
                column[targets[first : ends[i]]] = out[chosen]

    def _ranges(self, blocks: Array) -> tuple[list[int], list[int]]:
        """Where blocks begin in the file, and how long they are."""
        assert self._offsets is not None
        starts, ends = self._offsets[blocks].astype(np.int64), self._offsets[blocks + 1].astype(np.int64)
        return (self._start + starts).tolist(), (ends - starts).tolist()

    def _schema_of(self, extents: list[int]) -> Schema:
        rest = iter(extents)
        shapes = []
        for leaf in self.layout.schema.leaves:
            shapes.append(tuple(next(rest) if n < 0 else n for n in leaf.shape))
        return self.layout.schema.with_shapes(shapes)


def _runs(rows: Array) -> list[tuple[int, int, int]]:
    """Where runs of consecutive numbers begin and end in sorted rows, and the first number of each."""
    firsts = _firsts(rows, 1)
    bounds = firsts.tolist()
    return list(zip(bounds, [*bounds, len(rows)][1:], rows[firsts].tolist(), strict=True))


def _firsts(numbers: Array, step: int) -> Array:
    """Where, in sorted numbers, one is not the one before it plus `step`."""
    is_first = np.ones(len(numbers), bool)
    np.not_equal(numbers[1:], numbers[:-1] + step, out=is_first[1:])
    return is_first.nonzero()[0]


def empty_columns(schema: Schema, count: int) -> Columns:
    """Fresh columns, uint8 ``(count, bytes)``, for rows of a schema; `MemoryError` if they are too large."""
    check_room(count * schema.row_bytes)
    sizes = [leaf.row_bytes for leaf in schema.leaves]
    return [empty_bytes(count * size).numpy().reshape(count, size) for size in sizes]


def rows_of(schema: Schema, columns: Columns, count: int) -> Rows:
    """Columns of bytes as rows."""
    plain = schema.in_logical_order
    tensors = []
    for leaf, column in zip(plain.leaves, columns, strict=True):
        flat = torch.from_numpy(column.reshape(-1))
        tensors.append(flat.view(leaf.stored).view(count, *leaf.shape))
    rows = Rows(plain, tensors, count)
    if not any(leaf.channels_last for leaf in schema.leaves):
        return rows
    pairs = zip(schema.leaves, tensors, strict=True)
    return Rows(schema, [moved(t, 1, -1) if leaf.channels_last else t for leaf, t in pairs], count)
