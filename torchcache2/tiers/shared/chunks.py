"""`Space`: the memory of one namespace. `Chunks`: where in it rows lie, and their schemas.

The region reserves all the address space that could ever be needed, so ranges never move; they get memory as
they grow, under the lock. The first page, the head, holds numbers. A process killed while a range grows
leaves only bytes that are counted and not used.

Rows of one schema lie in chunks, column by column. In a chunk of `_MANY` rows or more, a column begins at a
multiple of its row bytes, counted from the beginning of the region: so the region is one array of rows for
each width, and one `gather` takes rows from all of these chunks. The first chunk of a schema has room for
just the rows that were put, a later one for a quarter of those before, up to 64 MB: a row of a rare shape is
a chunk of one. Such small chunks are not aligned, which would cost half a row each; their rows are copied
after those of the others.

A location is a chunk's number and a row's number in it. Rows are given out under the lock, and never twice.
The description of a chunk or schema is written before its number becomes visible. A process reserves the
memory of its rows, without the lock, before it writes.
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
_PLACES = {name: _WORDS - 1 - i for i, name in enumerate(_SHARES)}  # the word with each range's length
_CHUNKS, _SCHEMAS, _TEXT_END, _DATA_END = 2, 3, 4, 5  # words of the head
_TEXT, _LENGTH, _CURRENT, _TOTAL = range(4)  # of a schema: current is chunk << 32 | rows given out
_ROW = (1 << 32) - 1
_SLAB = 64 << 20  # most bytes of a chunk, unless more are needed now
_Numbers = TypeVar("_Numbers", int, Positions)
_Spans = tuple[Schema, list[tuple[int, int]]]
_MOST_SPANS = 4096  # chunks
_POPULATED = 256 << 10  # bytes; smaller chunks are not populated
_MANY = 16  # rows of a chunk that is aligned to them
_UNIT = 16  # bytes that the columns of smaller chunks are aligned to, for their numbers


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
        return int(self.head.item(_PLACES[name]))

    def set_length(self, name: str, size: int) -> None:
        """Set the length of a range in the head."""
        self.head[_PLACES[name]] = size

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
        self._populated: dict[int, int] = {}  # rows of a chunk whose pages are mapped
        self._data = space.bytes.data
        self._spans: dict[int, _Spans] = {}  # by chunk
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
            text = json.dumps(schema_to_json(schema)).encode()
            with self._space.lock():
                self._learn()
                if name not in self._numbers and not self._teach(text):
                    return None
                self._learn()
        if self._numbers.setdefault(name, 0) == 0:  # its text does not read back as this schema
            raise UnserialisableError("the schema of the output cannot be written as text")
        return self._numbers[name]

    def _teach(self, text: bytes) -> bool:
        """Write a schema down; False if there is no room for it."""
        number, start = int(self._head[_SCHEMAS]), int(self._head[_TEXT_END])
        end = start + len(text)
        if not self._space.grow("schemas", 32 * (number + 1)) or not self._space.grow("texts", end):
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

    def _read(self, number: int) -> Schema | None:
        start, length = self._schemas[number, :_CURRENT].tolist()
        try:
            return schema_from_json(json.loads(self._texts(start, length).tobytes()))
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
        numbers: Positions = self._of_chunks(locations)[1] >> 32
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
        if first < count:
            places.append(self._add(number, schema, count - first))
        return [place for place in places if len(place)]

    def _add(self, number: int, schema: Schema, count: int) -> Positions:
        """Locations in a new chunk, whose rest is for later rows; under the lock."""
        board, chunk = self._space.board, int(self._head[_CHUNKS])
        if not all(self._space.grow(name, 8 * (chunk + 1)) for name in ("offsets", "kinds")):
            return np.empty(0, np.int64)
        self._see_chunks()
        rows = max(count, min(int(self._schemas[number, _TOTAL]) // 4, _SLAB // max(1, schema.row_bytes)))
        if self._extent(schema, rows)[2] > board.free:
            smaller = range(1, count + 1)
            rows = bisect.bisect(smaller, board.free, key=lambda some: self._extent(schema, some)[2])
        begin, end, size = self._extent(schema, rows)
        is_possible = rows > 0 and end <= self._space.region.size
        if not is_possible or not board.charge(self._space.file, size):
            return np.empty(0, np.int64)
        self._offsets[chunk], self._kinds[chunk] = begin, number << 32 | rows
        self._head[_DATA_END] = end
        self._head[_CHUNKS] = chunk + 1
        taken = min(count, rows)
        self._schemas[number, _TOTAL] += rows
        self._schemas[number, _CURRENT] = chunk << 32 | taken
        return np.arange(taken) + (chunk << 32)

    def _extent(self, schema: Schema, rows: int) -> tuple[int, int, int]:
        """Where a new chunk would begin and end, and the bytes of pages that it would add."""
        end = int(self._head[_DATA_END])
        widths = [leaf.row_bytes for leaf in schema.leaves if leaf.row_bytes]
        begin = int(_aligned(end, rows, widths[0])) if widths else end
        size, paged = 0, pages(end)
        for width, start in zip(widths, _begins(widths, begin, rows), strict=True):
            end = int(start) + rows * width
            size += max(0, pages(end) - max(paged, int(start) // PAGE * PAGE))
            paged = max(paged, pages(end))
        return begin, end, size

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
                    self._space.region.populate(start, start + size, writes=True)
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
        spans = self._spans_of(location >> 32)
        if spans is None:
            return None
        row, data = location & _ROW, self._data
        return spans[0], [data[first + row * size : first + (row + 1) * size] for first, size in spans[1]]

    def _spans_of(self, chunk: int) -> _Spans | None:
        """The schema of a chunk, and where each leaf's rows begin and how long they are, in bytes."""
        found = self._spans.get(chunk)
        if found is None:
            if chunk >= len(self._kinds):
                self._see_chunks()
            schema = self.schema(self._kinds.item(chunk) >> 32)
            if schema is None:
                return None
            sizes = [leaf.row_bytes for leaf in schema.leaves]
            begins = _begins(sizes, self._offsets.item(chunk), self._kinds.item(chunk) & _ROW)
            if len(self._spans) >= _MOST_SPANS:
                self._spans.clear()
            found = schema, [(int(begin), size) for begin, size in zip(begins, sizes, strict=True)]
            self._spans[chunk] = found
        return found

    def populate(self, locations: Positions) -> None:
        """Map the pages of the chunks of these rows, as far as rows were given out since the last time."""
        for chunk in set((locations >> 32).tolist()):
            spans = self._spans_of(chunk)
            if spans is None:
                continue
            number, rows = divmod(int(self._kinds[chunk]), _ROW + 1)
            first = self._populated.get(chunk, 0)
            if rows * spans[0].row_bytes < _POPULATED or first == rows:
                continue
            current = int(self._schemas[number, _CURRENT])
            end = current & _ROW if current >> 32 == chunk else rows
            if end > first:
                for start, size in spans[1]:
                    self._space.region.populate(start + first * size, start + end * size)
                self._populated[chunk] = end

    def _of_chunks(self, locations: Positions) -> tuple[Positions, Positions]:
        chunks = locations >> 32
        if chunks.max(initial=0) >= len(self._kinds):
            self._see_chunks()
        return self._offsets.take(chunks), self._kinds.take(chunks)

    def _places(self, schema: Schema, locations: Positions) -> Iterator[Positions]:
        """The first byte of the rows at these locations, for each column."""
        begins, kinds = self._of_chunks(locations)
        rows, widths = locations & _ROW, [leaf.row_bytes for leaf in schema.leaves]
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
    """The first byte of each column, for chunks that begin there and have so many rows."""
    end: _Numbers | None = None
    for width in widths:
        if width:
            begin = begin if end is None else _aligned(end, rows, width)
            end = begin + rows * width
        yield begin


def _aligned(end: _Numbers, rows: _Numbers, width: int) -> _Numbers:
    """Where a column that comes after this byte begins."""
    unit: Any = np.where(rows < _MANY, _UNIT, width)
    aligned: _Numbers = -(-end // unit) * unit
    return aligned
