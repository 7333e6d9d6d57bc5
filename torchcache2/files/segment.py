"""Segments: `encode` makes the bytes of one, `write` a file of them, and `Segment` reads its rows.

Each row is checked when it is read.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_64, xxh3_64_intdigest

from torchcache2.core.errors import DamagedError
from torchcache2.core.keys import Array, Bytes, Bytes2D, Keys
from torchcache2.core.memory import as_bytes, empty_bytes, moved
from torchcache2.core.rows import Rows, Schema
from torchcache2.core.sizes import check_room
from torchcache2.files import codec as codecs
from torchcache2.files.codec import MOST_PART, Codec, Lane, Piece, Plane, buffer, lane
from torchcache2.files.filesystem import Descriptor, Descriptors, FileSystem, write_whole
from torchcache2.files.layout import (
    BLOCK_BYTES,
    SEGMENT,
    TEMPORARY,
    Layout,
    parse,
    parse_head,
    read_head,
    schema_text,
)

_LEAST_SAVED = 0.1  # a codec that saves less is not worth its time
_HOPELESS = 0.98  # if a sample does not shrink below this share, do not try the rest
_SAMPLES = 32
_SLICE = 1 << 16  # bytes of each leaf
_LARGE = 2 * _SAMPLES * _SLICE
_FEW = 4  # blocks; so few are all tried
_JOINED = 1 << 20  # bytes of a block that is written as one piece
_CHECKED_AT_ONCE = 8 << 20  # bytes
_DECODED_AT_ONCE = 1 << 18  # bytes
_READ_AT_ONCE = 1 << 20  # bytes
_SLOW, _SLOW_PER_BYTE = 50e-6, 1e-9  # seconds; reads from the page cache are faster
Batch = tuple[Keys, Rows]
Columns = list[np.ndarray[Any, np.dtype[np.uint8]]]


@dataclasses.dataclass(frozen=True)
class Encoded:
    """The bytes of a segment.

    Attributes
    ----------
    layout : Layout
    head : bytes
        Header and index.
    data : sequence of Piece
        The bytes of the rows, in file order.
    index : mapping of str to ndarray
        The tensors of `Layout.index`, with their shapes, by name.
    """

    layout: Layout
    head: bytes
    data: Sequence[Piece]
    index: dict[str, np.ndarray[Any, Any]]

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return len(self.head) + self.layout.row_data_bytes


def encode(batches: Sequence[Batch], codec: Codec, *, library: str = "") -> Encoded:
    """The bytes of a segment with these rows: at least one, all in one namespace and on the CPU.

    Schemas may differ only in the shapes of rows; `UnserialisableError` if their common schema has no JSON
    form, or one that is too long. Rows stay uncompressed if the codec saves less than 10 %. `library` is the
    version of this library, for the header.
    """
    schemas = [rows.schema for _, rows in batches]
    schema = _common(schemas)
    schema_text(schema)  # raises if the schema could not be read again
    pieces = [[as_bytes(c).numpy() for c in rows.in_logical_order().columns] for _, rows in batches]
    counts = [len(keys) for keys, _ in batches]
    layout = Layout(batches[0][0].namespace, schema, "none", sum(counts), library=library)
    pairs = list(zip(pieces, counts, strict=True))
    index: dict[str, np.ndarray[Any, Any]] = {"keys": np.concatenate([keys.data for keys, _ in batches])}
    index["checksums"] = np.concatenate([row_checksums(columns, range(count)) for columns, count in pairs])
    sizes = [sum(column.shape[1] for column in columns) for columns in pieces]
    is_ragged = layout.extents > 0
    if is_ragged:
        index["shapes"] = _shapes(schema, schemas, counts)
    per_block = 1 if is_ragged else max(1, BLOCK_BYTES // max(1, schema.row_bytes))
    blocks = _compressed(pieces, per_block, codec, schema) if max(sizes) <= MOST_PART else None
    data: Sequence[Piece]
    ends: Array | None = None
    if blocks is not None:
        data = [piece for block in blocks for piece in block]
        ends = np.cumsum([0, *(sum(map(len, block)) for block in blocks)], dtype=np.int64)
        layout = dataclasses.replace(layout, codec=codec.name)
    else:
        # All leaves of a row lie together, so that one call reads it.
        tables = [c[0] if len(c) == 1 else np.concatenate(c, axis=1) if c else np.empty(0) for c in pieces]
        data = [table.reshape(-1).view(np.uint8) for table in tables]
        if is_ragged:
            ends = np.cumsum([0, *np.repeat(sizes, counts)], dtype=np.int64)
    if ends is not None:
        index["offsets"] = ends
        layout = dataclasses.replace(layout, rows_per_block=per_block, payload_bytes=int(ends[-1]))
    head = layout.header([np.ascontiguousarray(index[name]).tobytes() for name in layout.index])
    return Encoded(layout, head, data, index)


def write(fs: FileSystem, folder: str, name: str, encoded: Encoded) -> None:
    """Write a segment's file, which appears whole or not at all."""

    def fill(file: Descriptor) -> None:
        end = 0
        pieces = [encoded.head, *encoded.data]
        for _, some in groupby(pieces, lambda piece: id(piece) if isinstance(piece, Plane) else 0):
            end = fs.write_all(file, [*map(buffer, some)], end)

    stem = os.path.join(folder, "")
    write_whole(fs, os.path.join(folder, name), fill, stem=stem, suffix=SEGMENT + TEMPORARY)


def row_checksums(
    columns: Sequence[Bytes], rows: Sequence[int] | range
) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """xxh3-64 of some rows, leaf after leaf; columns are contiguous uint8 ``(n, bytes)``."""
    views = [(column.reshape(-1).data, column.shape[1]) for column in columns if column.shape[1]]
    if len(views) == 1:
        view, size = views[0]
        digests = [xxh3_64_intdigest(view[row * size : row * size + size]) for row in rows]
    else:
        digests = []
        for row in rows:
            state = xxh3_64()
            for view, size in views:
                state.update(view[row * size : row * size + size])
            digests.append(state.intdigest())
    return np.array(digests, np.uint64)


def _common(schemas: Sequence[Schema]) -> Schema:
    """The schema of all rows, with -1 for extents that differ."""
    first, shapes = schemas[0], []
    for i, leaf in enumerate(first.leaves):
        others = np.array([schema.leaves[i].shape for schema in schemas], np.int64)
        same = (others == others[0]).all(axis=0)
        shapes.append(tuple(n if s else -1 for n, s in zip(leaf.shape, same.tolist(), strict=True)))
    return first.with_shapes(shapes)


def _shapes(schema: Schema, schemas: Sequence[Schema], counts: Sequence[int]) -> np.ndarray[Any, Any]:
    rows = []
    for other in schemas:
        pairs = zip(schema.leaves, other.leaves, strict=True)
        rows.append([n for mine, leaf in pairs for m, n in zip(mine.shape, leaf.shape, strict=True) if m < 0])
    return np.repeat(np.array(rows, np.int64), counts, axis=0)


def _blocks(pieces: Sequence[Sequence[Bytes2D]], per_block: int) -> Iterator[list[Bytes]]:
    """The rows of each block, leaf by leaf."""
    left: list[list[Bytes2D]] = []  # rows of an unfinished block
    filled = 0
    for columns in pieces:
        count, start = len(columns[0]), 0
        while start < count:
            take = min(per_block - filled, count - start)
            left.append([column[start : start + take] for column in columns])
            filled, start = filled + take, start + take
            if filled == per_block:
                yield _joined(left)
                left, filled = [], 0
    if left:
        yield _joined(left)


def _joined(parts: Sequence[Sequence[Bytes2D]]) -> list[Bytes]:
    if len(parts) == 1:
        return [column.reshape(-1) for column in parts[0]]
    return [np.concatenate(columns).reshape(-1) for columns in zip(*parts, strict=True)]


def _compressed(
    pieces: Sequence[Sequence[Bytes2D]], per_block: int, codec: Codec, schema: Schema
) -> list[Sequence[Piece]] | None:
    """The compressed blocks; None if compression, judged by an evenly spread sample first, does not pay."""
    lanes = [lane(leaf.stored) for leaf in schema.leaves]
    before = sum(column.nbytes for columns in pieces for column in columns)
    if codec.name == "none" or not before:
        return None
    sample = _sample(pieces, per_block)
    plan = codec.plan(sample, lanes)
    size = sum(len(part) for parts in sample for part in parts)
    if sum(len(codec.encode(parts, lanes, plan)) for parts in sample) > _HOPELESS * size:
        return None
    done: list[Sequence[Piece]] = []
    size = 0
    for block in _blocks(pieces, per_block):
        some = codec.pieces(block, lanes, plan)
        more = sum(map(len, some))
        done.append(some if more > _JOINED else [b"".join(map(buffer, some))])
        size += more
        if size > before * (1 - _LEAST_SAVED):
            return None
    return done


def _sample(pieces: Sequence[Sequence[Bytes2D]], per_block: int) -> list[list[Bytes]]:
    """Some of the blocks, or all if there are few; of large rows, slices."""
    count = sum(len(columns[0]) for columns in pieces)
    if per_block == 1 and sum(column.nbytes for columns in pieces for column in columns) > _LARGE:
        return _slices(pieces, count)
    if count <= per_block * _FEW:
        return list(_blocks(pieces, per_block))
    step = max(1, count // _SAMPLES)
    found = []
    for columns in pieces[:: max(1, len(pieces) // _SAMPLES)]:
        for start in range(0, len(columns[0]), step):
            found.append([column[start : start + per_block].reshape(-1) for column in columns])
    return found


def _slices(pieces: Sequence[Sequence[Bytes2D]], count: int) -> list[list[Bytes]]:
    """Slices of some of the rows, evenly spread."""
    rows = [[column[row] for column in columns] for columns in pieces for row in range(len(columns[0]))]
    each = max(1, _SAMPLES // count)
    found = []
    for columns in rows[:: max(1, count // _SAMPLES)]:
        for i in range(each):
            starts = [len(column) * i // each // 8 * 8 for column in columns]  # whole elements
            pairs = zip(columns, starts, strict=True)
            found.append([column[start : start + _SLICE] for column, start in pairs])
    return found


class Filling:
    """Columns that rows are read into, and blocks of these rows that are not decoded yet.

    Blocks are decoded together, whichever segments they are from, as each decoding has a fixed cost; but only
    a few at a time, so that they stay in the CPU cache.

    Parameters
    ----------
    columns : list of ndarray of uint8, shape (k, bytes)
        One for each leaf; `bytes` is the leaf's size in one row.
    waited : callable
        Called after each read, with whether it was so slow that it has probably waited for the disk.

    Attributes
    ----------
    undecoded : list of int
        The targets whose blocks could not be decoded.
    """

    def __init__(self, columns: Columns, waited: Callable[[bool], object] = bool) -> None:
        self.columns = columns
        self.views = [(column.reshape(-1).data, column.shape[1]) for column in columns if column.shape[1]]
        self.row_bytes = sum(size for _, size in self.views)
        self.undecoded: list[int] = []
        self._waited = waited
        self._kind = "", 0  # the codec's name, and rows of a block
        self._codec: Codec | None = None
        self._lanes: Sequence[Lane] = ()
        self._data: list[memoryview] = []
        self._places: list[tuple[int, int]] = []  # row among all rows of the blocks, and target

    def read(
        self, fs: FileSystem, file: Descriptor, buffers: Sequence[memoryview], start: int, end: int
    ) -> None:
        """Fill buffers from a range of a file."""
        begun = time.perf_counter()
        fs.read_all(file, buffers, start)
        self._waited(time.perf_counter() - begun > _SLOW + (end - start) * _SLOW_PER_BYTE)

    def add(
        self, codec: Codec, lanes: Sequence[Lane], count: int, data: memoryview, places: list[tuple[int, int]]
    ) -> None:
        """Take a block of `count` rows; `places` has the numbers of some, and where to put each of them."""
        if (codec.name, count) != self._kind:
            self.decode()
            self._kind, self._codec, self._lanes = (codec.name, count), codec, lanes
        first = count * len(self._data)
        self._data.append(data)
        self._places += [(first + row, target) for row, target in places]
        if (first + count) * self.row_bytes >= _DECODED_AT_ONCE:
            self.decode()

    def decode(self) -> None:
        """Decode the blocks that were taken, into the columns."""
        data, places, count = self._data, self._places, self._kind[1]
        if not data:
            return
        self._data, self._places = [], []
        if len(places) == count == 1:  # a large row is decoded where it has to be
            target = places[0][1]
            if not self._decode(data, [column[target : target + 1] for column in self.columns]):
                self.undecoded.append(target)
            return
        outs = [np.empty((len(data), count * column.shape[1]), np.uint8) for column in self.columns]
        rows, targets = np.array(places).T
        if not self._decode(data, outs):
            for i, one in enumerate(data):
                if not self._decode([one], [out[i : i + 1] for out in outs]):
                    self.undecoded += targets[rows // count == i].tolist()
        for column, out in zip(self.columns, outs, strict=True):
            if column.shape[1]:
                column[targets] = out.reshape(-1, column.shape[1])[rows]

    def _decode(self, data: list[memoryview], outs: Columns) -> bool:
        assert self._codec is not None
        try:
            self._codec.decode_all(data, outs, self._lanes)
        except DamagedError:
            return False
        return True


class Segment:
    """The index of a segment with n rows, which are read from the file on request.

    Attributes
    ----------
    path : str
    layout : Layout
    nbytes : int
        Bytes of the file.
    keys : ndarray of uint8, shape (n, 16), or None
        The key of each row; None once the segment's owner has them in its index, or a run has them.
    checksums : ndarray of uint64, shape (n,), or None
        xxh3-64 of each row; None if the segment was opened without its index.
    """

    def __init__(
        self,
        fs: FileSystem,
        descriptors: Descriptors,
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
        self.keys: Array | None = index.get("keys")
        self.checksums: Array | None = index.get("checksums")
        self._shapes = index.get("shapes")
        self._offsets = index.get("offsets")
        if self._offsets is not None and layout.payload_bytes < 1 << 32:
            self._offsets = self._offsets.astype(np.uint32)
        self._codec = codecs.codec(layout.codec)
        self._lanes = [lane(leaf.stored) for leaf in layout.schema.leaves]

    def __len__(self) -> int:
        return self.layout.count

    @property
    def index_bytes(self) -> int:
        """Bytes of memory that the index takes, without the keys."""
        arrays = (self.checksums, self._shapes, self._offsets)
        return sum(array.nbytes for array in arrays if array is not None)

    @classmethod
    def open(
        cls, fs: FileSystem, descriptors: Descriptors, path: str, *, limit: int, structured: bool = True
    ) -> Segment:
        """Read and check the index of a segment. A row may have up to `limit` bytes.

        Without `structured`, the rows can only be checked, but the classes of their structure need not exist;
        see `schema_from_json`. Raises `OSError`, the errors of `torchcache2.files.layout.parse`, and
        `OptionError` if the codec is not installed.
        """
        head, size = read_head(fs, path)
        layout, index = parse_head(head, size, limit, structured=structured)
        return cls(fs, descriptors, path, layout, len(head), index)

    @classmethod
    def of_run(
        cls, fs: FileSystem, descriptors: Descriptors, path: str, head: int, digest: int, *, limit: int
    ) -> Segment:
        """A segment whose rows a run has found: reads only its header.

        `DamagedError` unless the xxh3-64 of its first `head` bytes is `digest`, as when the run was made:
        these include the checksum of its index. For ragged rows, reads the index, too.
        """
        file = descriptors.get(path)
        size = fs.size(file)
        first = fs.read_bytes(file, 0, min(head, size))
        if xxh3_64_intdigest(first) != digest:
            raise DamagedError("not the segment that the run was made of")
        layout = parse(first[8:], size, limit)
        if layout.extents:
            return cls.open(fs, descriptors, path, limit=limit)
        return cls(fs, descriptors, path, layout, head + layout.index_bytes, {})

    @classmethod
    def written(cls, fs: FileSystem, descriptors: Descriptors, path: str, encoded: Encoded) -> Segment:
        """A segment that was just written."""
        return cls(fs, descriptors, path, encoded.layout, len(encoded.head), dict(encoded.index))

    def schemas(self, rows: Array) -> Iterator[tuple[Schema, Array]]:
        """The schemas of some rows, shape ``(m,)``, and for each the positions in `rows` that have it."""
        if self._shapes is None:
            yield self.layout.schema, np.arange(len(rows))
            return
        shapes = self._shapes[rows]
        if (shapes == shapes[:1]).all():  # far cheaper than `np.unique`
            if len(rows):
                yield self._schema_of(shapes[0].tolist()), np.arange(len(rows))
            return
        distinct, inverse = np.unique(shapes, axis=0, return_inverse=True)
        for i, extents in enumerate(distinct.tolist()):
            yield self._schema_of(extents), np.flatnonzero(inverse.reshape(-1) == i)

    def is_away(self) -> bool:
        """Whether rows may have to be fetched over a network."""
        try:
            return self.fs.is_remote and self.fs.is_away(self._descriptors.get(self.path))
        except OSError:  # reading will meet the same error
            return False

    def read_ahead(self, rows: Array) -> None:
        """Ask the system to read rows ahead; `rows` are numbers of rows, shape ``(m,)``."""
        file = self._descriptors.get(self.path)
        blocks = np.unique(rows // max(1, self.layout.rows_per_block))
        starts, ends = self._ranges(blocks)
        for _, _, start, end in _runs(starts.tolist(), ends.tolist()):
            self.fs.will_need(file, start, end - start)

    def read(self, rows: Array, columns: Columns, targets: Array) -> bool:
        """Read rows like `fill`, in any order; False if one is damaged. Needs the index."""
        assert self.checksums is not None
        if len(rows) == 0:
            return True
        order, filling = np.argsort(rows, kind="stable"), Filling(columns)
        try:
            self.fill(filling, rows[order], targets[order])
        except DamagedError:
            return False
        filling.decode()
        return not filling.undecoded and bool(
            (row_checksums(columns, targets.tolist()) == self.checksums[rows]).all()
        )

    def fill(self, filling: Filling, rows: Array, targets: Array) -> None:
        """Read rows of one schema, without comparing their checksums.

        Parameters
        ----------
        filling : Filling
            What to read them into; complete once its `decode` is called.
        rows : ndarray of int64, shape (m,)
            Numbers of the rows in the segment, ascending.
        targets : ndarray of int64, shape (m,)
            Position in the columns for each row.
        """
        file = self._descriptors.get(self.path)
        if self.layout.codec == "none":
            self._read_plain(file, filling, rows, targets.tolist())
        else:
            self._read_blocks(file, filling, rows, targets.tolist())

    def check(self) -> int:
        """Read all rows; returns how many are damaged."""
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

    def _read_plain(self, file: Descriptor, filling: Filling, rows: Array, targets: list[int]) -> None:
        """Read rows directly into the columns, neighbours by one call."""
        views, size = filling.views, filling.row_bytes
        if self.layout.rows_per_block:
            starts, ends = self._ranges(rows)
            if ((ends - starts) != size).any():
                raise DamagedError("a row of another size than its schema's")
            firsts = starts.tolist()
        else:
            firsts = [self._start + size * row for row in rows.tolist()]  # numpy is slower for a few
        if not views:
            return
        buffers = [view[place * size : place * size + size] for place in targets for view, size in views]
        for first, last, start, end in _runs(firsts, [start + size for start in firsts]):
            some = buffers[first * len(views) : last * len(views)]
            filling.read(self.fs, file, some, start, end)

    def _read_blocks(self, file: Descriptor, filling: Filling, rows: Array, targets: list[int]) -> None:
        """Read the blocks of rows, for `filling` to decode."""
        per_block = self.layout.rows_per_block
        places = defaultdict[int, list[tuple[int, int]]](list)  # by block: row in it, and target
        for row, target in zip(rows.tolist(), targets, strict=True):
            places[row // per_block].append((row % per_block, target))
        blocks = list(places)
        last_block = self.layout.blocks - 1
        starts, ends = (bounds.tolist() for bounds in self._ranges(np.array(blocks)))
        for first, last, start, end in _runs(starts, ends):
            run = memoryview(bytearray(end - start))
            filling.read(self.fs, file, [run], start, end)
            for block, begin, stop in zip(
                blocks[first:last], starts[first:last], ends[first:last], strict=True
            ):
                count = per_block if block < last_block else len(self) - last_block * per_block
                data = run[begin - start : stop - start]
                filling.add(self._codec, self._lanes, count, data, places[block])

    def _ranges(self, blocks: Array) -> tuple[Array, Array]:
        """Where blocks, or rows without blocks, begin and end in the file."""
        if not self.layout.rows_per_block:
            size = self.layout.schema.row_bytes
            starts = self._start + blocks * size
            return starts, starts + size
        if self._offsets is None:
            return self._read_ranges(blocks)
        return self._start + self._offsets[blocks].astype(np.int64), self._start + self._offsets[
            blocks + 1
        ].astype(np.int64)

    def _read_ranges(self, blocks: Array) -> tuple[Array, Array]:
        """Like `_ranges`, from the file. Not checked here: the rows' checksums reveal wrong ranges."""
        file, index = self._descriptors.get(self.path), self._start - self.layout.index_bytes
        first = index + 24 * len(self)  # keys and checksums are before the offsets
        pairs = [self.fs.read_bytes(file, first + 8 * block, 16) for block in blocks.tolist()]
        found = np.frombuffer(b"".join(pairs), "<i8").reshape(-1, 2)
        most = self.layout.payload_bytes
        if not ((found[:, 0] >= 0) & (found[:, 0] <= found[:, 1]) & (found[:, 1] <= most)).all():
            raise DamagedError("offsets that do not grow")
        return self._start + found[:, 0], self._start + found[:, 1]

    def _schema_of(self, extents: list[int]) -> Schema:
        rest = iter(extents)
        shapes = []
        for leaf in self.layout.schema.leaves:
            shapes.append(tuple(next(rest) if n < 0 else n for n in leaf.shape))
        return self.layout.schema.with_shapes(shapes)


def _runs(starts: list[int], ends: list[int]) -> Iterator[tuple[int, int, int, int]]:
    """Join adjacent ranges; yields the first range, the one after the last, and start and end in bytes.

    Ranges are joined up to `_READ_AT_ONCE` bytes; a longer one stays alone.
    """
    first, begin, end = 0, -1, -1
    for place, (start, upto) in enumerate(zip(starts, ends, strict=True)):
        if start != end or upto - begin > _READ_AT_ONCE:
            if place:
                yield first, place, begin, end
            first, begin = place, start
        end = upto
    if starts:
        yield first, len(starts), begin, end


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
