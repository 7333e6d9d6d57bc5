"""`Chunks`: where rows lie in a namespace's region, and what they look like.

Rows of one schema lie in chunks, column by column. A column begins at a multiple of its row bytes, counted
from the beginning of the region: so the region is one array of rows for each width, and one `gather` takes
rows from all chunks. The first chunk of a schema has room for just the rows that were put, the next ones
double up to 64 MB: a row of a rare shape is a chunk of one.

A location is the number of a chunk and of a row in it. Rows are given out under the lock, and never twice.
What is written about a chunk or a schema is written before its number is known to anybody.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import torch

from torchcache2.core.arrays import Array, Positions
from torchcache2.core.gather import gather, write
from torchcache2.core.rows import Rows
from torchcache2.core.schema import Schema
from torchcache2.core.transfer import Runtime
from torchcache2.files.errors import DamagedError, UnknownClassError, UnserialisableError
from torchcache2.files.schemajson import schema_from_json, schema_to_json
from torchcache2.tiers.shared.region import PAGE, pages
from torchcache2.tiers.shared.space import Space

__all__ = ["Chunks"]

_CHUNKS, _SCHEMAS, _TEXT_END, _DATA_END = 2, 3, 4, 5  # words of the head
_TEXT, _LENGTH, _CURRENT, _TOTAL = range(4)  # of a schema: current is chunk << 32 | rows that were given out
_ROW = (1 << 32) - 1
_SLAB = 64 << 20  # bytes that a chunk has at most, if it has more rows than are needed now
_POPULATED = 256 << 10  # bytes; pages of smaller chunks come when they are read


class Chunks:
    """The rows of one namespace."""

    def __init__(self, space: Space) -> None:
        self._space, self._head = space, space.head
        self._known: list[Schema | None] = []  # by number; None: its classes are unknown here
        self._numbers: dict[tuple[Schema, tuple[bool, ...]], int] = {}
        self._populated: dict[int, int] = {}  # rows of a chunk whose pages are mapped
        self._schemas = self._schema_rows()
        self._see_chunks()

    @staticmethod
    def make(space: Space) -> None:
        """Begin without chunks."""
        space.head[_CHUNKS] = space.head[_SCHEMAS] = 1  # a location is never 0
        space.head[_DATA_END] = space.data

    # Schemas

    def number_of(self, schema: Schema) -> int | None:
        """The number of a schema, after which others know it too; None if there is no room for it.

        Not under the lock. `UnserialisableError` if others cannot know it.
        """
        name = schema, schema.layout
        if name not in self._numbers:
            self._numbers[name] = 0
            text = json.dumps(schema_to_json(schema)).encode()
            is_taught = False
            while not is_taught:
                needed = int(self._head[_TEXT_END]) + len(text) + PAGE
                has_room = self._space.grow("schemas", 32 * (int(self._head[_SCHEMAS]) + 64))
                if not has_room or not self._space.grow("texts", needed):
                    del self._numbers[name]
                    return None
                with self._space.lock():
                    self._learn()
                    is_taught = self._numbers[name] > 0 or self._teach(text)
                    self._learn()
        if self._numbers[name] == 0:
            raise UnserialisableError("the schema of the output has no text from which it can be made again")
        return self._numbers[name]

    def _teach(self, text: bytes) -> bool:
        number, start = int(self._head[_SCHEMAS]), int(self._head[_TEXT_END])
        end = start + len(text)
        if number >= len(self._schemas) or end > self._space.length("texts"):
            return False  # others have taken the room meanwhile
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

    def take(self, number: int, count: int) -> Positions:
        """Locations for up to `count` rows of a schema, of those that are there; under the lock."""
        self._schemas = self._schema_rows()
        current = int(self._schemas[number, _CURRENT])
        if current == 0:
            return np.empty(0, np.int64)
        self._see_chunks()
        left = self._left(current)
        count = min(count, left)
        self._schemas[number, _CURRENT] = current + count
        return np.arange(current, current + count)

    def add(self, number: int, schema: Schema, count: int) -> Positions:
        """Locations for up to `count` rows of a schema in a new chunk. Not under the lock."""
        needed = 8 * (int(self._head[_CHUNKS]) + 64)
        if not (self._space.grow("offsets", needed) and self._space.grow("kinds", needed)):
            return np.empty(0, np.int64)
        with self._space.lock():
            total = int(self._schemas[number, _TOTAL])
            rows = max(count, min(total, _SLAB // max(1, schema.row_bytes)))
            ranges, size = self._ranges(schema, rows)
            if size > self._space.board.free:
                rows, high = 0, min(count, _ROW) + 1
                while high - rows > 1:  # `rows` fit, and `high` do not
                    middle = (rows + high) // 2
                    fits = self._ranges(schema, middle)[1] <= self._space.board.free
                    rows, high = (middle, high) if fits else (rows, middle)
                ranges, size = self._ranges(schema, rows)
            if rows == 0 or not self._space.board.charge(self._space.file, size):
                return np.empty(0, np.int64)
            offset, end = int(self._head[_DATA_END]), max([self._space.data, *[end for _, end in ranges]])
            if end > self._space.region.size:
                self._space.board.charge(self._space.file, -size)
                return np.empty(0, np.int64)
            self._head[_DATA_END] = max(offset, end)
        reserved = all(self._space.reserve(start, end - start) for start, end in ranges)
        with self._space.lock():
            if not reserved:
                self._space.board.charge(self._space.file, -size)
                return np.empty(0, np.int64)
            return self._list(number, offset, rows, min(count, rows))

    def _list(self, number: int, offset: int, rows: int, taken: int) -> Positions:
        """Write down a new chunk, of which some rows are taken at once; under the lock."""
        self._see_chunks()
        chunk = int(self._head[_CHUNKS])
        if chunk >= len(self._kinds):
            return np.empty(0, np.int64)  # many others were faster: the bytes are lost
        self._offsets[chunk], self._kinds[chunk] = offset, number << 32 | rows
        self._head[_CHUNKS] = chunk + 1
        self._schemas[number, _TOTAL] += rows
        current = int(self._schemas[number, _CURRENT])
        if current == 0 or rows - taken > self._left(current):
            self._schemas[number, _CURRENT] = chunk << 32 | taken
        return np.arange(taken) + (chunk << 32)

    def _ranges(self, schema: Schema, rows: int) -> tuple[list[tuple[int, int]], int]:
        """Where the columns of a chunk that begins now lie, and the bytes of pages that they add."""
        end = int(self._head[_DATA_END])
        ranges, size, paged = [], 0, pages(end)
        for leaf in schema.leaves:
            if leaf.row_bytes:
                start = -(-end // leaf.row_bytes) * leaf.row_bytes
                end = start + rows * leaf.row_bytes
                ranges.append((start, end))
                size += max(0, pages(end) - max(paged, start // PAGE * PAGE))
                paged = max(paged, pages(end))
        return ranges, size

    def write(self, schema: Schema, locations: Positions, rows: Rows) -> None:
        """Copy rows to where `take` or `add` has made room for them, one after the other."""
        places = self._places(schema, locations[:1])
        for leaf, place, values in zip(schema.leaves, places, rows.columns, strict=True):
            if leaf.row_bytes:
                write(self._space.region.rows(leaf.row_bytes), int(place[0]), values)

    def gather(self, schema: Schema, locations: Positions, runtime: Runtime | None) -> Rows:
        """A copy of rows of one schema, as one batch."""
        columns = []
        for leaf, places in zip(schema.leaves, self._places(schema, locations), strict=True):
            if leaf.row_bytes:
                data = self._space.region.rows(leaf.row_bytes)
                picked = gather(data, torch.from_numpy(places), runtime=runtime).view(-1)
            else:
                picked = torch.empty(0, dtype=torch.uint8, device="cpu")
            columns.append(picked.view(leaf.stored).view(len(locations), *leaf.stored_shape))
        return Rows(schema, columns, len(locations))

    def populate(self, schema: Schema, locations: Positions) -> None:
        """Map the pages of rows that are read for the first time, and of those that came with them."""
        for chunk in np.unique(locations >> 32).tolist():
            number, rows = divmod(int(self._kinds[chunk]), _ROW + 1)
            first = self._populated.get(chunk, 0)
            if rows * schema.row_bytes < _POPULATED or first == rows:
                continue
            current = int(self._schemas[number, _CURRENT])
            end = current & _ROW if current >> 32 == chunk else rows
            if end > first:
                places = self._places(schema, np.array([chunk << 32 | first]))
                for leaf, (place,) in zip(schema.leaves, places, strict=True):
                    start = int(place) * leaf.row_bytes
                    self._space.region.populate(start, start + (end - first) * leaf.row_bytes)
                self._populated[chunk] = end

    def _of_chunks(self, locations: Positions) -> tuple[Positions, Positions]:
        chunks = locations >> 32
        if chunks.max(initial=0) >= len(self._kinds):
            self._see_chunks()
        return self._offsets.take(chunks), self._kinds.take(chunks)

    def _places(self, schema: Schema, locations: Positions) -> Iterator[Positions]:
        """Which rows of the region these are, for each column."""
        end, kinds = self._of_chunks(locations)
        capacities, rows, first, width = kinds & _ROW, locations & _ROW, end, 0
        for leaf in schema.leaves:
            if leaf.row_bytes:
                if width:
                    end = (first + capacities) * width
                width = leaf.row_bytes
                first = -(-end // width)
            yield first + rows

    def _left(self, current: int) -> int:
        """How many rows of a chunk were not given out."""
        return (int(self._kinds[current >> 32]) & _ROW) - (current & _ROW)

    def _see_chunks(self) -> None:
        """See what other processes have made since."""
        self._offsets: Positions = self._space.array("offsets", "<i8")
        kinds: Positions = self._space.array("kinds", "<i8")  # schema << 32 | rows; this range grows last
        self._kinds = kinds

    def _schema_rows(self) -> Array:
        return self._space.array("schemas", "<i8").reshape(-1, 4)
