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
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_64_intdigest

from torchcache2.core.keys import Array, Flags, Ordinals, Positions, Words
from torchcache2.core.memory import Runtime, SpareMemory, as_bytes
from torchcache2.core.rows import Rows
from torchcache2.tiers.base import Make
from torchcache2.tiers.shared.board import Board
from torchcache2.tiers.shared.chunks import Chunks
from torchcache2.tiers.shared.index import SharedIndex
from torchcache2.tiers.shared.region import PAGE, Region
from torchcache2.tiers.shared.space import Space
from torchcache2.tiers.shared.tickets import Ticket

Lock = Callable[[], AbstractContextManager[None]]


class SharedTable:
    """One namespace, as one process sees it.

    Attributes
    ----------
    file : int
        Its number on the board.
    corrupt : int
        Rows that differed from their checksums.
    space : Space
        Its memory.
    since : float or None
        When this process kept its first rows (`time.monotonic`); infinite once compared with other ranks.
    """

    def __init__(self, region: Region, board: Board, file: int, lock: Lock) -> None:
        self.region, self.board, self.file = region, board, file
        self.lock = lock
        self.corrupt = 0
        self.since: float | None = None
        self.space = Space(region, board, file, lock)
        self._index = SharedIndex(self.space)
        self._chunks = Chunks(self.space)
        self._checked = np.zeros(0, bool)  # rows that this process has read, or written

    @classmethod
    def create(
        cls, namespace: bytes, board: Board, member: int, lock: Lock, are_replicas: bool = False
    ) -> SharedTable | None:
        """A new one; under the lock. None if there is no room for it."""
        size = PAGE + SharedIndex.least_bytes()
        if size > board.free_for(are_replicas):
            return None
        region = Region.create(Space.size(board.budget))
        region.reserve(0, PAGE)
        space = Space(region, board, -1, lock)
        SharedIndex.make(space)
        Chunks.make(space)
        # Only now do others see it: until here it would vanish with this process.
        file = board.add_file(namespace, region, member, size, are_replicas)
        return None if file is None else cls(region, board, file, lock)

    @property
    def is_live(self) -> bool:
        """Whether no process has dropped it."""
        return self.board.is_live(self.file, self.region.inode)

    def get(
        self, words: Words, runtime: Runtime | None, spare: SpareMemory | None
    ) -> list[tuple[Positions, Rows]]:
        """The rows of those keys that are here, one part for each schema. Takes no lock."""
        ordinals, locations = self._index.find(words)
        if len(words) == 1 and runtime is None:
            return self._one(words, ordinals, locations)
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
            if self._seen().take(of).all():
                parts.append((positions[these], self._chunks.gather(schema, at, runtime, spare)))
                continue
            fresh = np.flatnonzero(~self._seen()[of])
            self._chunks.populate(at[fresh])
            rows = self._chunks.gather(schema, at, runtime, spare)
            good = self._check(rows, words[these], of, at, fresh)
            if len(good) < len(rows):
                these, rows = these[good], rows.take(torch.from_numpy(good))
            if len(these):
                parts.append((positions[these], rows))
        return parts

    def _one(self, words: Words, ordinals: Ordinals, locations: Positions) -> list[tuple[Positions, Rows]]:
        """Like `get`, for one key, already looked up."""
        location = locations.item(0)
        schema = self._chunks.schema_of(location) if location > 0 else None
        if schema is None:
            return []
        first = np.zeros(1, np.int64)
        if self._seen().item(ordinals.item(0)):
            return [(first, self._chunks.one(schema, location))]
        self._chunks.populate(locations)
        rows = self._chunks.one(schema, location)
        return [(first, rows)] if len(self._check(rows, words, ordinals, locations, first)) else []

    def get_one(self, low: int, high: int, make: Make) -> Any:
        """The value of a row that this process has read or written before; otherwise None. Takes no lock."""
        ordinal, location = self._index.find_one(low, high)
        if location <= 0 or ordinal >= len(self._checked) or not self._checked.item(ordinal):
            return None
        row = self._chunks.row(location)
        return None if row is None else make(*row)

    def discard(self) -> None:
        """Give the memory of a dropped file back, even if other processes have it open; under the lock."""
        self.space.discard(self._chunks.end)

    def has(self, words: Words) -> Flags:
        """Whether each key has a row. Takes no lock."""
        return self._index.find(words)[1] > 0

    def put(self, words: Words, rows: Rows) -> tuple[int, bool]:
        """Keep rows, on the host, under distinct keys that may be here already.

        Returns how many were kept, and whether there was room for all. `UnserialisableError` if other
        processes could not read such rows.
        """
        number = self._chunks.number_of(rows.schema)
        if number is None:
            return 0, False
        schema = self._chunks.schema(number) or rows.schema
        ordinals, locations = self._enter(words)
        absent = np.flatnonzero((ordinals >= 0) & (locations <= 0))
        fits = bool((ordinals >= 0).all())
        if len(absent) == 0:
            return 0, fits
        places = self._chunks.take(number, schema, len(absent))
        kept = sum(map(len, places))
        fits &= kept == len(absent)
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

    def _enter(self, words: Words) -> tuple[Ordinals, Positions]:
        while True:
            has_room = self._index.prepare(len(words))
            with self.lock():
                ordinals, locations = self._index.enter(words)
            if not has_room or (ordinals >= 0).all():
                return ordinals, locations

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
        while True:
            has_room = self._index.prepare(len(words))
            with self.lock():
                ordinals, locations = self._index.enter(words)
                if has_room and ordinals.min(initial=0) < 0:
                    continue  # others have taken the room meanwhile
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


def _checksums(rows: Rows, words: Words, positions: Sequence[int]) -> Array:
    """xxh3-64 of the rows at some positions, column after column, with the key as the seed."""
    sums: list[int] = words[positions, 0].tolist()
    for column in rows.columns:
        data = as_bytes(column).numpy()
        sums = list(map(xxh3_64_intdigest, map(data.__getitem__, positions), sums))
    return np.array(sums, np.uint64)
