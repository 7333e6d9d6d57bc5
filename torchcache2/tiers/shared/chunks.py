"""`Space`: the memory of one namespace. `Chunks`: where in it rows lie, and their schemas.

The region reserves all the address space that could ever be needed, so ranges never move; they get memory as
they grow, under the lock. The first page, the head, holds numbers. A process killed while a range grows
leaves only bytes that are counted and not used.

Rows of one schema lie in chunks, column by column. A column begins at a multiple of its row bytes, counted
from the beginning of the region: so the region is one array of rows for each width, and one `gather` takes
rows from all chunks. A chunk has room for the rows that were put, and for a quarter of those before, up to 64
MB. Where this would be fewer than `_MANY` rows, as for a rare shape, each row is single: it takes just its
bytes, and is copied after those of the chunks.

A location is a chunk's number and a row's number in it, or the schema and the place of a single row. Rows are
given out under the lock, and never twice. The description of a chunk or schema is written before its number
becomes visible. A process reserves the memory of its rows, without the lock, before it writes.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from torchcache2.core.errors import DamagedError, UnknownClassError, UnserialisableError
from torchcache2.core.keys import Array, Bytes, Bytes2D, Positions
from torchcache2.core.memory import Runtime, SpareMemory, gather, write
from torchcache2.core.rows import Rows, Schema
from torchcache2.files.schema import schema_from_json, schema_to_json
from torchcache2.tiers.shared.board import Board
from torchcache2.tiers.shared.region import PAGE, Region, pages

# Address space of each range per byte of budget: an ordinal takes 40 bytes, a chunk or schema more.
_SHARES = {
    "keys": 0.5,
    "locations": 0.25,
    "sums": 0.25,
    "slots": 2.0,
    "offsets": 0.25,
    "kinds": 0.25,
    "schemas": 0.5,
    "texts": 1.0,
}
_DATA = 4.0  # aligning rows to their size at most doubles the data
_LEAST = 1 << 20
_WORDS = 512  # of the head; the last ones are the sizes of ranges
PLACES = {name: _WORDS - 1 - i for i, name in enumerate(_SHARES)}  # the word with each range's length
_CHUNKS, _SCHEMAS, _TEXT_END, _DATA_END = 2, 3, 4, 5  # words of the head
_TEXT, _LENGTH, _CURRENT, _TOTAL = range(4)  # of a schema: current is chunk << 32 | rows given out
_ROW = (1 << 32) - 1
_SLAB = 64 << 20  # most bytes of a chunk, unless more are needed now
_Numbers = TypeVar("_Numbers", int, Positions)
_MOST_SPANS = 4096  # chunks
_POPULATED = 256 << 10  # bytes; fewer are not populated
_MANY = 16  # least rows of a chunk
_UNIT = 8  # bytes that the columns of single rows are aligned to
_SINGLE, _NUMBER_AT, _PLACE = 1 << 62, 40, (1 << 40) - 1  # a single's location: schema, units from data
_MOST_SCHEMAS = 1 << 22


class Space:
    """One namespace's memory.

    Attributes
    ----------
    bytes : ndarray of uint8
        The whole region.
    head : ndarray of int64
        The numbers of the first page. The last ones are the lengths of the ranges, in bytes.
    """

    def __init__(
        self, region: Region, board: Board, file: int, lock: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.region, self.board, self.file, self.lock = region, board, file, lock
        self.bytes: Bytes = region.array("u1", 0, region.size)
        self.head = region.array("<i8", 0, _WORDS)
        self._starts, end = _starts(board.budget)
        self.data = end

    @staticmethod
    def size(budget: int) -> int:
        """Bytes of address space of a region."""
        return _starts(budget)[1] + int(_DATA * budget) + 64 * _LEAST

    def start(self, name: str) -> int:
        """Where a range begins."""
        return self._starts[name]

    def length(self, name: str) -> int:
        """Bytes of a range that have memory."""
        return int(self.head.item(PLACES[name]))

    def set_length(self, name: str, size: int) -> None:
        """Set the length of a range in the head."""
        self.head[PLACES[name]] = size

    def array(self, name: str, dtype: str) -> Array:
        """The part of a range that has memory."""
        return self.region.array(dtype, self._starts[name], self.length(name) // 8)

    def grow(self, name: str, size: int) -> bool:
        """Make a range at least `size` bytes long; False if there is no memory. Under the lock."""
        before = self.length(name)
        if pages(size) <= before:  # no range gets shorter
            return True
        if not self.may_be(name, size) or not self.reserve(self._starts[name] + before, pages(size) - before):
            return False
        self.set_length(name, pages(size))
        return True

    def may_be(self, name: str, size: int) -> bool:
        """Whether a range has address space for so many bytes."""
        return size <= _length(name, self.board.budget)

    def reserve(self, offset: int, size: int) -> bool:
        """Count bytes, and give them memory; False if budget or system have none. Under the lock."""
        if not self.board.charge(self.file, size):
            return False
        if not self.give_memory(offset, size):
            self.board.charge(self.file, -size)
            return False
        return True

    def give_memory(self, offset: int, size: int) -> bool:
        """Give counted bytes their memory; False if the system has none."""
        try:
            self.region.reserve(offset, size)
        except OSError:
            return False
        return True


def _length(name: str, budget: int) -> int:
    return pages(int(_SHARES[name] * budget)) + _LEAST


def _starts(budget: int) -> tuple[dict[str, int], int]:
    starts, end = {}, PAGE
    for name in _SHARES:
        starts[name] = end
        end += _length(name, budget)
    return starts, end


class Chunks:
    """The rows of one namespace."""

    def __init__(self, space: Space) -> None:
        self._space, self._head = space, space.head
        self._known: list[Schema | None] = []  # by number; None: its classes are unknown here
        self._numbers: dict[tuple[Schema, tuple[bool, ...]], int] = {}
        self._families: dict[Schema, int] = {}  # a schema that differs in its shapes only
        self._data = space.bytes.data
        self._spans: dict[int, tuple[Schema, list[tuple[int, int]]]] = {}  # by chunk; see `row`
        self._schemas = self._schema_rows()
        self._see_chunks()

    @staticmethod
    def make(space: Space) -> None:
        """Begin without chunks."""
        space.head[_CHUNKS] = space.head[_SCHEMAS] = 1  # a location is never 0
        space.head[_DATA_END] = space.data

    # Schemas

    def number_of(self, schema: Schema) -> int | None:
        """The number of a schema, shared with all processes; None if there is no room for it.

        Not under the lock. `UnserialisableError` if other processes could not read it.
        """
        name = schema, schema.layout
        if name not in self._numbers:
            text: list[Any] | dict[str, Any] = schema_to_json(schema)
            with self._space.lock():
                self._learn()
                if name not in self._numbers:
                    like = self._families.get(schema.family)
                    if like is not None:
                        text = [like, *[leaf.shape for leaf in schema.leaves]]
                    if not self._teach(json.dumps(text).encode()):
                        return None
                    self._learn()
        if self._numbers.setdefault(name, 0) == 0:  # its text does not read back as this schema
            raise UnserialisableError("the schema of the output cannot be written as text")
        return self._numbers[name]

    def _teach(self, text: bytes) -> bool:
        """Write a schema down; False if there is no room for it."""
        number, start = int(self._head[_SCHEMAS]), int(self._head[_TEXT_END])
        end = start + len(text)
        if number >= _MOST_SCHEMAS or not self._space.grow("schemas", 32 * (number + 1)):
            return False
        if not self._space.grow("texts", end):
            return False
        self._schemas = self._schema_rows()
        self._head[_TEXT_END] = end
        self._texts(start, len(text))[:] = np.frombuffer(text, np.uint8)
        self._schemas[number] = start, len(text), 0, 0
        self._head[_SCHEMAS] = number + 1
        return True

    def _learn(self) -> None:
        """See which schemas there are."""
        self._schemas = self._schema_rows()
        for number in range(len(self._known), int(self._head[_SCHEMAS])):
            schema = self._read(number) if number else None
            self._known.append(schema)
            if schema is not None:
                self._numbers[schema, schema.layout] = number
                self._families.setdefault(schema.family, number)

    def _read(self, number: int) -> Schema | None:
        start, length = self._schemas[number, :_CURRENT].tolist()
        try:
            text = json.loads(self._texts(start, length).tobytes())
            if isinstance(text, dict):
                return schema_from_json(text)
            like = self.schema(text[0])  # only its shapes differ
            return None if like is None else like.with_shapes(map(tuple, text[1:]))
        except (DamagedError, UnknownClassError, ValueError):
            return None

    def _texts(self, start: int, length: int) -> Array:
        return self._space.region.array("u1", self._space.start("texts") + start, length)

    def schema(self, number: int) -> Schema | None:
        """The schema of a number; None if its classes are unknown in this process, up to now."""
        if number >= len(self._known):
            self._learn()
        if self._known[number] is None:
            self._known[number] = self._read(number)
        return self._known[number]

    def schemas_of(self, locations: Positions) -> Positions:
        """The number of the schema of each row."""
        chunks = locations >> 32
        is_known = chunks.max(initial=0) < len(self._kinds)
        kinds = self._kinds.take(chunks) if is_known else self._of_rows(locations)[1]
        numbers: Positions = kinds >> 32
        return numbers

    # Rows

    def take(self, number: int, schema: Schema, count: int) -> list[Positions]:
        """Locations for rows of a schema, as many as there is room for; under the lock.

        The rows of each array lie one after the other.
        """
        self._schemas = self._schema_rows()
        self._see_chunks()
        current = int(self._schemas[number, _CURRENT])
        left = (int(self._kinds[current >> 32]) & _ROW) - (current & _ROW) if current else 0
        first = min(count, left)
        places = [np.arange(current, current + first)]
        self._schemas[number, _CURRENT] = current + first
        count -= first
        rows = max(count, min(int(self._schemas[number, _TOTAL]) // 4, _SLAB // max(1, schema.row_bytes)))
        if rows < _MANY:
            singles = iter(lambda: self._add_single(number, schema), None)
            places += [np.array([single]) for _, single in zip(range(count), singles, strict=False)]
        elif count:
            places.append(self._add_chunk(number, schema, count, rows))
        return [place for place in places if len(place)]

    def _add_single(self, number: int, schema: Schema) -> int | None:
        """The location of a new single row; under the lock. None if there is no room."""
        begin = self._add(schema, 1)
        if begin is None:
            return None
        self._schemas[number, _TOTAL] += 1
        return _SINGLE | number << _NUMBER_AT | (begin - self._space.data) // _UNIT

    def _add_chunk(self, number: int, schema: Schema, count: int, rows: int) -> Positions:
        """Locations in a new chunk, whose rest is for later rows; under the lock."""
        chunk = int(self._head[_CHUNKS])
        if not all(self._space.grow(name, 8 * (chunk + 1)) for name in ("offsets", "kinds")):
            return np.empty(0, np.int64)
        self._see_chunks()
        if self._extent(schema, rows)[2] > self._space.board.free:
            free = self._space.board.free
            rows = bisect.bisect(range(1, count + 1), free, key=lambda some: self._extent(schema, some)[2])
        begin = self._add(schema, rows) if rows else None
        if begin is None:
            return np.empty(0, np.int64)
        self._offsets[chunk], self._kinds[chunk] = begin, number << 32 | rows
        self._head[_CHUNKS] = chunk + 1
        taken = min(count, rows)
        self._schemas[number, _TOTAL] += rows
        self._schemas[number, _CURRENT] = chunk << 32 | taken
        return np.arange(taken) + (chunk << 32)

    def _add(self, schema: Schema, rows: int) -> int | None:
        """Where room for rows begins that nobody else gets; under the lock. None if there is none."""
        begin, end, size = self._extent(schema, rows)
        most = min(self._space.region.size, self._space.data + _PLACE * _UNIT)
        if end > most or not self._space.board.charge(self._space.file, size):
            return None
        self._head[_DATA_END] = end
        return begin

    def _extent(self, schema: Schema, rows: int) -> tuple[int, int, int]:
        """Where new rows would begin and end, and the bytes of pages that they would add."""
        before = int(self._head[_DATA_END])
        widths = [leaf.row_bytes for leaf in schema.leaves if leaf.row_bytes]
        begin = end = int(_aligned(before, rows, widths[0] if widths else 1))
        for width, start in zip(widths, _begins(widths, begin, rows), strict=True):
            end = int(start) + rows * width
        return begin, end, pages(end) - pages(before)

    def write(self, schema: Schema, locations: Positions, rows: Rows) -> bool:
        """Copy rows to consecutive locations from `take`; False if there is no memory."""
        places = self._places(schema, locations[:1])
        for leaf, place, values in zip(schema.leaves, places, rows.columns, strict=True):
            width, start = leaf.row_bytes, int(place[0])
            if width:
                # Reserve memory only for rows that are written.
                size = len(rows) * width
                if not self._space.give_memory(start, size):
                    return False
                if size >= _POPULATED:
                    self._space.region.populate(start, start + size)
                write(self._space.region.rows(1)[start : start + size].view(-1, width), 0, values)
        return True

    def gather(
        self, schema: Schema, locations: Positions, runtime: Runtime | None, spare: SpareMemory | None
    ) -> Rows:
        """A copy of rows of one schema, as one batch."""
        columns = []
        for leaf, places in zip(schema.leaves, self._places(schema, locations), strict=True):
            width = leaf.row_bytes
            if width:
                picked = self._copied(width, places, runtime, spare)
            else:
                picked = torch.empty(0, dtype=torch.uint8, device="cpu")
            columns.append(picked.view(-1).view(leaf.stored).view(len(locations), *leaf.stored_shape))
        return Rows(schema, columns, len(locations))

    def _copied(
        self, width: int, places: Positions, runtime: Runtime | None, spare: SpareMemory | None
    ) -> Tensor:
        """Rows of `width` bytes that begin at some bytes of the region."""
        numbers, rest = np.divmod(places, width)
        odd = rest.nonzero()[0]
        if len(odd):
            ends = len(self._space.bytes) - width + 1
            at_each_byte: Bytes2D = np.ndarray((ends, width), "u1", self._data, 0, (1, 1))
            copies = at_each_byte[places[odd]]
            if len(odd) == len(places):
                return torch.from_numpy(copies)
            numbers[odd] = numbers[rest.argmin()]  # any row that is here
        data = self._space.region.rows(width)
        picked = gather(data, torch.from_numpy(numbers), runtime=runtime, spare=spare)
        if len(odd):
            picked.numpy()[odd] = copies
        return picked

    def row(self, location: int) -> tuple[Schema, list[memoryview]] | None:
        """The bytes of a row where they lie, for each leaf; None if its schema is unknown."""
        found, row = self._spans.get(location >> 32), location & _ROW
        if found is None:
            (begin,), (kind,), (row,) = self._of_rows(np.array([location]))
            schema = self.schema(int(kind) >> 32)
            if schema is None:
                return None
            sizes = [leaf.row_bytes for leaf in schema.leaves]
            begins = map(int, _begins(sizes, int(begin), int(kind) & _ROW))
            found, row = (schema, list(zip(begins, sizes, strict=True))), int(row)
            if location < _SINGLE:
                if len(self._spans) >= _MOST_SPANS:
                    self._spans.clear()
                self._spans[location >> 32] = found
        data = self._data
        return found[0], [data[first + row * size : first + (row + 1) * size] for first, size in found[1]]

    def _of_rows(self, locations: Positions) -> tuple[Positions, Positions, Positions]:
        """Of each row: where its chunk begins, the chunk's schema << 32 | rows, and its number there."""
        chunks, rows = locations >> 32, locations & _ROW
        if chunks.max(initial=0) < len(self._kinds):
            return self._offsets.take(chunks), self._kinds.take(chunks), rows
        self._see_chunks()
        begins = self._space.data + (locations & _PLACE) * _UNIT
        kinds = (locations ^ _SINGLE) >> _NUMBER_AT << 32 | 1
        others = locations < _SINGLE
        rows[~others] = 0
        chunks = chunks[others]
        begins[others], kinds[others] = self._offsets.take(chunks), self._kinds.take(chunks)
        return begins, kinds, rows

    def _places(self, schema: Schema, locations: Positions) -> Iterator[Positions]:
        """The first byte of the rows at these locations, for each column."""
        begins, kinds, rows = self._of_rows(locations)
        widths = [leaf.row_bytes for leaf in schema.leaves]
        for width, begin in zip(widths, _begins(widths, begins, kinds & _ROW), strict=True):
            yield begin + rows * width

    def _see_chunks(self) -> None:
        """See what other processes have made since."""
        self._offsets: Positions = self._space.array("offsets", "<i8")
        kinds: Positions = self._space.array("kinds", "<i8")  # schema << 32 | rows; this range grows last
        self._kinds = kinds

    def _schema_rows(self) -> Array:
        return self._space.array("schemas", "<i8").reshape(-1, 4)


def _begins(widths: list[int], begin: _Numbers, rows: _Numbers) -> Iterator[_Numbers]:
    """The first byte of each column, for chunks that begin there and have so many rows, or single rows."""
    end: _Numbers | None = None
    for width in widths:
        if width:
            begin = begin if end is None else _aligned(end, rows, width)
            end = begin + rows * width
        yield begin


def _aligned(end: _Numbers, rows: _Numbers, width: int) -> _Numbers:
    """Where a column that comes after this byte begins."""
    unit: Any = np.where(rows == 1, _UNIT, width)
    aligned: _Numbers = -(-end // unit) * unit
    return aligned
