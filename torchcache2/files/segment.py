"""Segments: `encode` makes the bytes of one, `write` a file of them, and `Segment` reads its rows.

Each row is checked when it is read.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from xxhash import xxh3_64, xxh3_64_intdigest

from torchcache2.core.errors import DamagedError
from torchcache2.core.keys import Array, Bytes, Bytes2D, Keys
from torchcache2.core.memory import as_bytes, empty_bytes, moved
from torchcache2.core.rows import Rows, Schema
from torchcache2.core.sizes import check_room
from torchcache2.files import codec as codecs
from torchcache2.files.codec import MOST_PART, Codec, Piece, Plane, buffer, lane
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
_PRIME = 7919  # spreads the rows of a sample
_SAMPLES = 32
_SLICE = 1 << 16  # bytes of each leaf
_LARGE = 2 * _SAMPLES * _SLICE
_FEW = 4  # blocks; so few are all tried
_WHOLE = 1 << 20  # bytes of a block that is written as one piece
_CHECKED_AT_ONCE = 8 << 20  # bytes
_DECODED_AT_ONCE = 1 << 18  # bytes
_READ_AT_ONCE = 1 << 20  # bytes
_JOINED = 64  # ranges that are read by one call
_TIMED = 4  # reads
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
    """The compressed blocks; None if compression, judged by a sample first, does not pay."""
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
        done.append(some if more > _WHOLE else [b"".join(map(buffer, some))])
        size += more
        if size > before * (1 - _LEAST_SAVED):
            return None
    return done


def _sample(pieces: Sequence[Sequence[Bytes2D]], per_block: int) -> list[list[Bytes]]:
    """Some blocks, or all if there are few; of blocks with large leaves, slices of these, evenly spread."""
    rows = sum(len(columns[0]) for columns in pieces)
    size = sum(column.shape[1] for column in pieces[0]) * per_block
    if rows <= per_block * _FEW and rows // per_block * size <= _LARGE:
        return list(_blocks(pieces, per_block))
    step = per_block if size > _SLICE else 1
    places = [(columns, row) for columns in pieces for row in range(0, len(columns[0]), step)]
    apart = max(1, len(places) // _SAMPLES)
    # Not at even steps: every seventh row may be like no other, and then the sample would have these alone.
    firsts = range(0, len(places) - apart + 1, apart)
    places = [places[first + number * _PRIME % apart] for number, first in enumerate(firsts)]
    each = max(1, _SAMPLES // len(places)) if size > _SLICE else 1
    found = []
    for number, (columns, row) in enumerate(places * each):
        parts = [column[row : row + per_block].reshape(-1) for column in columns]
        starts = [max(0, len(part) - _SLICE) * number // (len(places) * each) // 8 * 8 for part in parts]
        found.append([part[at : at + _SLICE] for part, at in zip(parts, starts, strict=True)])
    return found


class Job(NamedTuple):
    """Rows to read from a segment.

    Attributes
    ----------
    segment : Segment
    rows : ndarray of int64, shape (m,)
        Their numbers in the segment, ascending.
    targets : ndarray of int64, shape (m,)
        Position in the columns for each row.
    checksums : ndarray of uint64, shape (m,)
    """

    segment: Segment
    rows: Array
    targets: Array
    checksums: Array


def read_rows(
    jobs: Sequence[Job], columns: Columns, waited: Callable[[bool], object] = bool
) -> tuple[dict[int, Exception], list[int]]:
    """Read rows of one schema into columns; returns an error for each failed job, and targets of bad rows.

    All rows are read in one loop, whichever segments they are from. After a `DamagedError`, other rows of the
    job may be good.

    Parameters
    ----------
    jobs : sequence of Job
        At least one, each with rows.
    columns : list of ndarray of uint8, shape (k, bytes)
        One for each leaf; `bytes` is the leaf's size in one row.
    waited : callable
        Called after some reads each, with whether they were so slow that they have probably waited for the
        disk.
    """
    reads = _Reads(jobs, columns, waited)
    plain, packed = [], []
    for number, (segment, rows, targets, checksums) in enumerate(jobs):
        per_block = segment.layout.rows_per_block
        try:
            if segment.layout.codec == "none":
                starts, ends = segment.ranges(rows)
                if ((ends - starts) != reads.row_bytes).any():
                    raise DamagedError("a row of another size than its schema's")
                plain.append((np.full(len(rows), number), starts, ends, targets, checksums))
            else:
                blocks, places = np.unique(rows // per_block, return_inverse=True)
                spans = (np.full(len(blocks), number), *segment.ranges(blocks))
                counts = np.minimum(per_block, len(segment) - blocks * per_block)
                packed.append((*spans, counts, places, rows % per_block, targets, checksums))
        except (OSError, DamagedError) as error:
            reads.fail(number, error)
    if plain:
        reads.plain(*map(np.concatenate, zip(*plain, strict=True)))
    if packed:
        reads.packed(packed)
    return reads.errors, reads.bad


class _Reads:
    """The state of `read_rows`."""

    def __init__(self, jobs: Sequence[Job], columns: Columns, waited: Callable[[bool], object]) -> None:
        self.errors: dict[int, Exception] = {}
        self.bad: list[int] = []
        self.row_bytes = sum(column.shape[1] for column in columns)
        self._jobs, self._columns, self._waited = jobs, columns, waited
        self._fs, self._gone = jobs[0].segment.fs, set[int]()

    def fail(self, number: int, error: Exception, targets: Iterable[int] | None = None) -> None:
        """Note an error, and bad rows; None: all of a job."""
        self.errors.setdefault(number, error.with_traceback(None))  # its frames would keep the file open
        if targets is None:
            self._gone.add(number)
            targets = self._jobs[number].targets.tolist()
        self.bad += targets

    def plain(self, owners: Array, starts: Array, ends: Array, targets: Array, checksums: Array) -> None:
        """Read rows as they are; if they have several leaves, by way of a table that stays in the cache."""
        size, sums = self.row_bytes, checksums.tolist()
        filled = [column for column in self._columns if column.shape[1]]
        is_direct = len(filled) == 1
        step = len(owners) if is_direct else max(1, _DECODED_AT_ONCE // max(1, size))
        for first in range(0, len(owners), step):
            some = slice(first, first + step)
            rows = targets[some].tolist()
            table = filled[0] if is_direct else np.empty((len(rows), size), np.uint8)
            view = table.reshape(-1).data
            views = [view[i * size : i * size + size] for i in (rows if is_direct else range(len(rows)))]
            for i in self._read(owners[some], starts[some], ends[some], views, sums[some]):
                self.fail(int(owners[first + i]), DamagedError("a row differs from its checksum"), [rows[i]])
            at = 0
            for column in () if is_direct else filled:
                column[targets[some]] = table[:, at : at + column.shape[1]]
                at += column.shape[1]

    def packed(self, jobs: Sequence[tuple[Array, ...]]) -> None:
        """Read and decode blocks, some at once, as a decoding has a fixed cost: few, to stay in the cache."""
        firsts = np.cumsum([0, *(len(job[0]) for job in jobs[:-1])])
        owners, starts, ends, counts = map(np.concatenate, list(zip(*jobs, strict=True))[:4])
        places = np.concatenate([first + job[4] for first, job in zip(firsts, jobs, strict=True)])
        rows, targets, checksums = map(np.concatenate, list(zip(*jobs, strict=True))[5:])
        codecs_of = {number: job.segment.codec for number, job in enumerate(self._jobs)}
        kinds = [
            (codecs_of[n].name, count) for n, count in zip(owners.tolist(), counts.tolist(), strict=True)
        ]
        first = 0
        for (_, count), group in groupby(kinds):
            last = first + sum(1 for _ in group)
            step = max(1, _DECODED_AT_ONCE // max(1, count * self.row_bytes))
            for begin in range(first, last, step):
                end = min(last, begin + step)
                some = slice(*np.searchsorted(places, [begin, end]))
                spans = owners[begin:end], starts[begin:end], ends[begin:end]
                self._decode(spans, count, places[some] - begin, rows[some], targets[some], checksums[some])
            first = last

    def _decode(
        self,
        spans: tuple[Array, Array, Array],
        count: int,
        places: Array,
        rows: Array,
        targets: Array,
        sums: Array,
    ) -> None:
        """Read blocks of `count` rows; `places` and `rows` say which block and row of it goes to a target."""
        owners, starts, ends = spans
        cuts = np.cumsum([0, *(ends - starts)]).tolist()
        data = memoryview(bytearray(cuts[-1]))
        views = [data[a:b] for a, b in pairwise(cuts)]
        self._read(owners, starts, ends, views)
        segment = self._jobs[int(owners[0])].segment
        is_direct = len(views) == count == len(targets) == 1  # a large row is decoded where it has to be
        outs = (
            [column[targets[0] : targets[0] + 1] for column in self._columns]
            if is_direct
            else [np.empty((len(views), count * column.shape[1]), np.uint8) for column in self._columns]
        )
        try:
            segment.codec.decode_all(views, outs, segment.lanes)
        except DamagedError:
            for i, view in enumerate(views):
                try:
                    segment.codec.decode_all([view], [out[i : i + 1] for out in outs], segment.lanes)
                except DamagedError as error:
                    self.fail(int(owners[i]), error, targets[places == i].tolist())
        for column, out in zip(self._columns, outs, strict=True):
            if column.shape[1] and not is_direct:
                column[targets] = out.reshape(-1, column.shape[1])[places * count + rows]
        is_bad = row_checksums(self._columns, targets.tolist()) != sums
        for number, target in zip(owners[places[is_bad]].tolist(), targets[is_bad].tolist(), strict=True):
            self.fail(number, DamagedError("a row differs from its checksum"), [target])

    def _read(
        self,
        owners: Array,
        starts: Array,
        ends: Array,
        views: list[memoryview],
        sums: list[int] | None = None,
    ) -> list[int]:
        """Fill views from ranges of files, neighbours by one call; compare them with checksums, if given.

        Returns which of them are bad.
        """
        bad = []
        is_first = (starts[1:] != ends[:-1]) | (owners[1:] != owners[:-1])
        is_first[_JOINED - 1 :: _JOINED] = True
        cuts = [0, *(is_first.nonzero()[0] + 1).tolist(), len(views)]
        numbers, offsets, stops = owners.tolist(), starts.tolist(), ends.tolist()
        gone, read = self._gone, self._fs.read
        begun, reads, nbytes, opened = time.perf_counter(), 0, 0, -1
        for first, last in pairwise(cuts):
            number, offset = numbers[first], offsets[first]
            if number in gone:
                continue
            size, some = stops[last - 1] - offset, views[first:last]
            try:
                if number != opened:  # one at a time, as a process may open few
                    file, opened = self._jobs[number].segment.file(), number
                if read(file, some, offset) != size:
                    self._fs.read_all(file, some, offset)
            except DamagedError:  # the file is too short for some of them
                for one in (slice(i, i + 1) for i in range(first, last) if last - first > 1):
                    alone = self._read(owners[one], starts[one], ends[one], views[one], sums and sums[one])
                    bad += [one.start] * len(alone)
                bad += [first] * (last - first == 1)
                continue
            except OSError as error:
                self.fail(number, error)
                continue
            if sums is not None:
                bad += [i for i in range(first, last) if xxh3_64_intdigest(views[i]) != sums[i]]
            reads, nbytes = reads + 1, nbytes + size
            if reads == _TIMED or nbytes > _READ_AT_ONCE:
                now = time.perf_counter()
                self._waited(now - begun > reads * _SLOW + nbytes * _SLOW_PER_BYTE)
                begun, reads, nbytes = now, 0, 0
        return bad


class Segment:
    """The index of a segment with n rows, which are read from the file on request.

    Attributes
    ----------
    path : str
    layout : Layout
    nbytes : int
        Bytes of the file.
    keys : ndarray of uint8, shape (n, 16), or None
        The key of each row; None once the segment's owner has them in its index, or an index file has them.
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
        self.codec = codecs.codec(layout.codec)
        self.lanes = [lane(leaf.stored) for leaf in layout.schema.leaves]

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
    def in_index_file(
        cls, fs: FileSystem, descriptors: Descriptors, path: str, head: int, digest: int, *, limit: int
    ) -> Segment:
        """A segment whose rows an index file has found: reads only its header.

        `DamagedError` unless the xxh3-64 of its first `head` bytes is `digest`, as in that file:
        these include the checksum of its index. For ragged rows, reads the index, too.
        """
        file = descriptors.get(path)
        size = fs.size(file)
        first = fs.read_bytes(file, 0, min(head, size))
        if xxh3_64_intdigest(first) != digest:
            raise DamagedError("not the segment that the index file was made of")
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

    def file(self) -> Descriptor:
        """The file, open."""
        return self._descriptors.get(self.path)

    def is_away(self) -> bool:
        """Whether rows may have to be fetched over a network."""
        try:
            return self.fs.is_remote and self.fs.is_away(self.file())
        except OSError:  # reading will meet the same error
            return False

    def read_ahead(self, rows: Array) -> None:
        """Ask the system to read rows ahead; `rows` are numbers of rows, shape ``(m,)``."""
        if len(rows) == 0:
            return
        file = self.file()
        starts, ends = self.ranges(np.unique(rows // max(1, self.layout.rows_per_block)))
        first = np.flatnonzero(np.append(True, starts[1:] != ends[:-1]))  # neighbours are asked for together
        last = np.append(first[1:], len(starts)) - 1
        for start, end in zip(starts[first].tolist(), ends[last].tolist(), strict=True):
            for at in range(start, end, _READ_AT_ONCE):  # the system ignores the rest of a long range
                self.fs.will_need(file, at, min(_READ_AT_ONCE, end - at))

    def read(self, rows: Array, columns: Columns, targets: Array) -> bool:
        """Read rows of one schema into columns, in any order; False if one is damaged. Needs the index."""
        assert self.checksums is not None
        if len(rows) == 0:
            return True
        order = np.argsort(rows, kind="stable")
        job = Job(self, rows[order], targets[order], self.checksums[rows[order]])
        for error in read_rows([job], columns)[0].values():
            if not isinstance(error, DamagedError):
                raise error
            return False
        return True

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

    def ranges(self, blocks: Array) -> tuple[Array, Array]:
        """Where blocks, or rows without blocks, begin and end in the file."""
        if not self.layout.rows_per_block:
            size = self.layout.schema.row_bytes
            starts = self._start + blocks * size
            return starts, starts + size
        if self._offsets is None:
            return self._read_ranges(blocks)
        bounds = self._start + self._offsets[np.stack([blocks, blocks + 1])].astype(np.int64)
        return bounds[0], bounds[1]

    def _read_ranges(self, blocks: Array) -> tuple[Array, Array]:
        """Like `ranges`, from the file. Not checked here: the rows' checksums reveal wrong ranges."""
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
