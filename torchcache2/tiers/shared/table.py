"""`SharedTable`: the rows of one namespace, in memory that the processes of a job map.

**Why readers need no lock.** A reader finds a row in three steps. The writer finishes each before it makes
the next one visible:

1. The slot of a key names its ordinal. An ordinal's key is written before its slot, and never changed.
2. An ordinal's location names a row. A row's bytes are written before its location. Between the two lie
   system calls for the lock, which order them on machines that otherwise may not (x86 keeps the order of
   writes).
3. A location names a chunk, whose description is written before any of its rows is given out.

None of this ever changes or moves: the writer takes ordinals, chunks and rows once, under the lock, before it
writes to them, so no process reuses what a killed one has begun. Reads of 64-bit numbers are atomic. So a
reader sees a whole row, or none, which is a miss.

Checksums verify this argument: beside each location lies a checksum of the row's bytes and its key, written
before the location. A process compares it when it first reads a row; if it differs, the row is removed, and
is a miss.

`SharedIndex` has the ordinals. A writer writes an ordinal's key first and its slot last. So a reader finds a
key's ordinal or, while the key is being added, maybe nothing. A killed writer leaves an ordinal that no slot
names: it stays unused. A table of slots that is too small is replaced: a process fills the new one under the
lock, and then one number of the head points to it. Readers may still use the old one. Once freed, it reads as
zeros, which are free slots: they find nothing there, and look in the new table.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_64_intdigest

from torchcache2.core.keys import Array, Flags, Ordinals, Positions, Words
from torchcache2.core.memory import Runtime, SpareMemory, as_bytes, numbers
from torchcache2.core.rows import Rows, Schema
from torchcache2.tiers.base import Make
from torchcache2.tiers.index import KeyTable
from torchcache2.tiers.shared.board import Board, Ticket
from torchcache2.tiers.shared.chunks import PLACES, Chunks, Space
from torchcache2.tiers.shared.region import PAGE, Region, pages

_TABLE, _TAKEN, _SUMS = 0, 1, PLACES["sums"]  # words of the head: slots, ordinals in use, bytes of sums
_RANGES = {"keys": 16, "locations": 8, "sums": 8}  # bytes per ordinal
_LEAST = PAGE // 8  # ordinals and slots at first; both fill whole pages
_PART = 1 << 18  # slots that are placed at once, as each takes much more memory meanwhile
Lock = Callable[[], AbstractContextManager[None]]


class SharedIndex:
    """Ordinals of one namespace.

    Attributes
    ----------
    locations : ndarray of int64, shape (capacity,)
        Of each ordinal.
    sums : ndarray of uint64, shape (capacity,)
        The checksum of each ordinal's row.
    """

    def __init__(self, space: Space) -> None:
        self._space = space
        self._head, self._words = space.head, space.head.data  # reading one of the latter is faster
        self._seen = (-1, -1)
        self.refresh()

    @staticmethod
    def least_bytes() -> int:
        """Bytes that `make` needs."""
        return (sum(_RANGES.values()) + 8) * _LEAST

    @staticmethod
    def make(space: Space) -> None:
        """Begin a new index; the caller has counted its bytes."""
        for name, width in _RANGES.items():
            space.region.reserve(space.start(name), width * _LEAST)
            space.set_length(name, width * _LEAST)
        space.region.reserve(space.start("slots") + 8 * _LEAST, 8 * _LEAST)
        space.head[_TABLE] = _LEAST

    def keys(self, ordinals: Ordinals) -> Words:
        """The keys of some ordinals."""
        keys: Words = self._table.keys[ordinals]
        return keys

    def refresh(self) -> None:
        """See changes of other processes."""
        seen = self._words[_TABLE], self._words[_SUMS]
        if seen == self._seen:
            return
        count = seen[0]
        slots = self._space.region.array("<i8", self._space.start("slots") + 8 * count, count)
        ordinals = seen[1] // 8  # the range that grows last
        keys: Words = self._space.array("keys", "<u8")[: 2 * ordinals].reshape(-1, 2)
        self.locations: Positions = self._space.array("locations", "<i8")[:ordinals]
        self.sums: Array = self._space.array("sums", "<u8")[:ordinals]
        self._table = KeyTable(slots, keys)
        self._seen = seen

    def __len__(self) -> int:
        return int(self._head[_TAKEN])

    def find(self, words: Words) -> tuple[Ordinals, Positions]:
        """Ordinal of each key, or -1, and its location, or 0. Needs no lock."""
        self.refresh()
        ordinals = self._table.find(words)
        if ordinals.min(initial=0) < 0 and self._head[_TABLE] != self._seen[0]:
            return self.find(words)  # another process has just replaced this table
        locations = self.locations.take(ordinals, mode="clip")
        locations[ordinals < 0] = 0
        return ordinals, locations

    def find_one(self, low: int, high: int) -> tuple[int, int]:
        """Like `find`, for one key; may miss a key if another process has just replaced the table."""
        if (self._words[_TABLE], self._words[_SUMS]) != self._seen:
            self.refresh()
        ordinal = self._table.find_one(low, high)
        return ordinal, self.locations.item(ordinal) if ordinal >= 0 else 0

    def enter(self, words: Words, location: int = 0) -> tuple[Ordinals, Positions]:
        """Find distinct keys, and add the missing ones; under the lock.

        Returns
        -------
        ordinals : ndarray of int64
            Of each key; -1 where there was no room.
        locations : ndarray of int64
            As found; `location` where a key was added.
        """
        ordinals, locations = self.find(words)
        absent = np.flatnonzero(ordinals < 0)
        if len(absent):
            first = len(self)
            absent = absent[: max(0, self._room_for(first + len(absent)) - first)]
            added = np.arange(first, first + len(absent))
            self._head[_TAKEN] = first + len(absent)  # first, so that these are never given out again
            self._table.keys[added] = words[absent]
            self.locations[added] = location
            self._table.place(added)
            ordinals[absent], locations[absent] = added, location
        return ordinals, locations

    def _room_for(self, needed: int) -> int:
        """Make room for `needed` keys in all, as far as the budget allows; returns for how many there is."""
        if needed > len(self.locations):
            ordinals = max(needed, len(self.locations) * 33 // 32)
            ordinals = -(-ordinals // _LEAST) * _LEAST
            _ = all(self._space.grow(name, width * ordinals) for name, width in _RANGES.items())
            self.refresh()
        needed = min(needed, len(self.locations))
        slots = len(self._table.slots)
        while needed > slots * 5 // 8:
            slots *= 2
        if slots > len(self._table.slots):
            self._replace(slots)
        return min(needed, len(self._table.slots) * 5 // 8)

    def _replace(self, slots: int) -> None:
        """Replace the table by one of `slots` slots, if there is memory for it."""
        space, old = self._space, self._table.slots
        # A table of n slots begins at slot n of the range, so that tables of all sizes have room.
        start = space.start("slots") + 8 * slots
        if not space.may_be("slots", 16 * slots) or not space.reserve(start, 8 * slots):
            return
        new = KeyTable(space.region.array("<i8", start, slots), self._table.keys)
        new.slots.fill(0)  # a killed process may have left data there
        for part in np.split(old, range(_PART, len(old), _PART)):
            new.place(part[part > 0] & 0xFFFFFFFF)
        self._head[_TABLE] = slots
        space.region.discard(space.start("slots") + old.nbytes, pages(old.nbytes))
        space.board.charge(space.file, -old.nbytes)
        self.refresh()


class SharedTable:
    """One namespace, as one process sees it.

    Attributes
    ----------
    file : int
        Its number on the board.
    corrupt : int
        Rows that differed from their checksums.
    """

    def __init__(self, region: Region, board: Board, file: int, lock: Lock) -> None:
        self.region, self.board, self.file = region, board, file
        self.lock = lock
        self.corrupt = 0
        self._inodes = board.inodes(file)
        space = Space(region, board, file, lock)
        self._index, self._chunks = SharedIndex(space), Chunks(space)
        self._checked = np.zeros(0, bool)  # rows that this process has read, or written
        self._drained: tuple[int, Ordinals] = 0, np.empty(0, np.int64)  # until where; those still empty

    @classmethod
    def create(cls, namespace: bytes, board: Board, member: int, lock: Lock) -> SharedTable | None:
        """A new one; under the lock. None if there is no room for it."""
        size = PAGE + SharedIndex.least_bytes()
        if size > board.free:
            return None
        region = Region.create(Space.size(board.budget))
        region.reserve(0, PAGE)
        space = Space(region, board, -1, lock)
        SharedIndex.make(space)
        Chunks.make(space)
        # Only now do others see it: until here it would vanish with this process.
        file = board.add_file(namespace, region, member, size)
        return None if file is None else cls(region, board, file, lock)

    @property
    def is_live(self) -> bool:
        """Whether no process has dropped it."""
        return bool(self._inodes[0] == self.region.inode != self._inodes[1])

    @property
    def is_dropped(self) -> bool:
        """Whether a process has dropped it; False once all have closed it."""
        return bool(self._inodes[1] == self.region.inode)

    def get(
        self, words: Words, runtime: Runtime | None, spare: SpareMemory | None
    ) -> list[tuple[Positions, Rows]]:
        """The rows of those keys that are here, one part for each schema. Takes no lock."""
        if len(words) == 1 and runtime is None:
            row = self.get_one(words.item(0), words.item(1), _as_batch)
            if row is not None:
                return [(np.zeros(1, np.int64), row)]
        ordinals, locations = self._index.find(words)
        positions = np.flatnonzero(locations > 0)
        if len(positions) == 0:
            return []
        if len(positions) < len(words):
            ordinals, locations, words = ordinals[positions], locations[positions], words[positions]
        numbers = self._chunks.schemas_of(locations)
        if (numbers == numbers[0]).all():
            groups = [(int(numbers[0]), np.arange(len(positions)))]
        else:
            order = np.argsort(numbers, kind="stable")
            starts = np.flatnonzero(np.diff(numbers[order])) + 1
            groups = [(int(numbers[these[0]]), these) for these in np.split(order, starts)]
        parts = []
        for number, these in groups:
            schema = self._chunks.schema(number)
            if schema is None:  # its classes are unknown here
                continue
            of, at = (ordinals, locations) if len(groups) == 1 else (ordinals[these], locations[these])
            rows, seen = self._chunks.gather(schema, at, runtime, spare), self._seen().take(of)
            if not seen.all():
                good = self._check(rows, words[these], of, at, np.flatnonzero(~seen))
                if len(good) < len(rows):
                    these, rows = these[good], rows.take(torch.from_numpy(good))
            if len(these):
                parts.append((positions[these], rows))
        return parts

    def get_one(self, low: int, high: int, make: Make) -> Any:
        """The value of one key's row; None if it is not here, or differs from its checksum. Takes no lock."""
        ordinal, location = self._index.find_one(low, high)
        row = self._chunks.row(location) if location > 0 else None
        if row is None:
            return None
        if ordinal >= len(self._checked) or not self._checked.item(ordinal):
            checksum = functools.reduce(lambda seed, leaf: xxh3_64_intdigest(leaf, seed), row[1], low)
            if checksum != self._index.sums.item(ordinal):
                return None  # `get` removes the row
            self._seen()[ordinal] = True
        return make(*row)

    def has(self, words: Words) -> Flags:
        """Whether each key has a row. Takes no lock."""
        return self._index.find(words)[1] > 0

    def drain(self, copy: Callable[[Words], None]) -> None:
        """Call a function with the keys of the rows that have appeared since it last did not fail."""
        end, waiting = self._drained
        self._index.refresh()
        now = min(len(self._index), len(self._index.locations))
        waiting = np.concatenate([waiting, np.arange(end, now)])
        there = self._index.locations[waiting] > 0
        if there.any():
            copy(self._index.keys(waiting[there]))
        self._drained = now, waiting[~there]

    def put(self, words: Words, rows: Rows) -> tuple[int, bool]:
        """Keep rows, on the host, under distinct keys that may be here already.

        Returns how many were kept, and whether there was room for all. `UnserialisableError` if other
        processes could not read such rows.
        """
        number = self._chunks.number_of(rows.schema)
        if number is None:
            return 0, False
        schema = self._chunks.schema(number) or rows.schema
        with self.lock():
            ordinals, locations = self._index.enter(words)
            absent = np.flatnonzero((ordinals >= 0) & (locations <= 0))
            places = self._chunks.take(number, schema, len(absent)) if len(absent) else []
        kept = sum(map(len, places))
        fits = kept == len(absent) and bool((ordinals >= 0).all())
        absent = absent[:kept]
        if kept < len(words):
            rows = rows.take(torch.from_numpy(absent))
        first = 0
        for place in places:
            piece = Rows(schema, [column[first : first + len(place)] for column in rows.columns], len(place))
            if not self._chunks.write(schema, place, piece):
                return 0, False
            first += len(place)
        if kept == 0:
            return 0, fits
        sums = _checksums(rows, words[absent], range(kept))
        return self._publish(ordinals[absent], np.concatenate(places), sums), fits

    def _publish(self, ordinals: Ordinals, places: Positions, sums: Array) -> int:
        """Make written rows visible to all, except those that other processes have published first."""
        with self.lock():
            self._index.refresh()
            mine = self._index.locations[ordinals] <= 0
            if not mine.all():
                ordinals, places, sums = ordinals[mine], places[mine], sums[mine]
            self._index.sums[ordinals] = sums
            self._index.locations[ordinals] = places
            self.board.count_rows(self.file, len(ordinals))
        self._seen()[ordinals] = True
        return len(ordinals)

    def _seen(self) -> Flags:
        """Whether this process has written or verified the row of each ordinal."""
        if len(self._checked) < len(self._index.sums):
            self._checked = np.pad(self._checked, (0, len(self._index.sums) - len(self._checked)))
        return self._checked

    def _check(
        self, rows: Rows, words: Words, ordinals: Ordinals, locations: Positions, fresh: Positions
    ) -> Positions:
        """Which rows match their checksums; removes the others from the table."""
        same = _checksums(rows, words, fresh.tolist()) == self._index.sums[ordinals[fresh]]
        self._seen()[ordinals[fresh[same]]] = True
        if same.all():
            return np.arange(len(rows))
        wrong = fresh[~same]
        self.corrupt += len(wrong)
        with self.lock():
            still = self._index.locations[ordinals[wrong]] == locations[wrong]
            self._index.locations[ordinals[wrong[still]]] = 0
            self.board.count_rows(self.file, -int(np.count_nonzero(still)))
        good = np.ones(len(rows), bool)
        good[wrong] = False
        return np.flatnonzero(good)

    # Claims

    def claim(
        self, words: Words, take_ticket: Callable[[int], Ticket | None], passed: frozenset[int]
    ) -> tuple[Ticket | None, Ordinals, Positions]:
        """Claim those of some distinct keys that have neither a row nor another claim.

        Parameters
        ----------
        words : ndarray of uint64, shape (n, 2)
            The keys.
        take_ticket : callable
            Gives a ticket for a claim of this file's keys, or None.
        passed : frozenset of int
            Held claims to ignore: those of dead or stuck processes.

        Returns
        -------
        ticket : Ticket or None
            The ticket of the claim; None if nothing could be claimed.
        ordinals, locations : ndarray of int64
            Of each key; an ordinal is -1 where there was no room for one.
        """
        if not self.is_live:
            return None, np.full(len(words), -1), np.zeros(len(words), np.int64)
        with self.lock():
            ordinals, locations = self._index.enter(words)
            held = self.board.tickets.held(locations)
            if passed:
                held &= ~np.isin(locations, list(passed))
            open_ = np.flatnonzero((ordinals >= 0) & (locations <= 0) & ~held)
            ticket = take_ticket(self.file) if len(open_) else None
            if ticket is not None:
                self._index.locations[ordinals[open_]] = locations[open_] = ticket.word
            elif len(open_):
                ordinals[open_] = -1
            return ticket, ordinals, locations

    @property
    def locations(self) -> Positions:
        """The location of each ordinal that exists now; later changes show in the array."""
        return self._index.locations

    def is_readable(self, locations: Positions) -> Array:
        """Which locations are rows of a schema that this process knows."""
        is_row: Array = locations > 0
        numbers = self._chunks.schemas_of(locations[is_row])
        unknown = [number for number in set(numbers.tolist()) if self._chunks.schema(number) is None]
        if unknown:
            is_row[np.flatnonzero(is_row)[np.isin(numbers, unknown)]] = False
        return is_row


def _as_batch(schema: Schema, leaves: Sequence[memoryview]) -> Rows:
    """A copy of one row, as a batch of one."""
    copies = [
        numbers(np.array(data)[None], leaf.stored) for leaf, data in zip(schema.leaves, leaves, strict=True)
    ]
    pairs = zip(schema.leaves, copies, strict=True)
    return Rows(schema, [column.view(1, *leaf.stored_shape) for leaf, column in pairs], 1)


def _checksums(rows: Rows, words: Words, positions: Sequence[int]) -> Array:
    """xxh3-64 of the rows at some positions, column after column, with the key as the seed."""
    sums: list[int] = words[positions, 0].tolist()
    for column in rows.columns:
        data = as_bytes(column).numpy()
        sums = list(map(xxh3_64_intdigest, map(data.__getitem__, positions), sums))
    return np.array(sums, np.uint64)
