"""`SharedIndex`: keys and where their rows are, in memory that several processes map.

Each key has an ordinal, and each ordinal a location: 0 for nothing, negative for a claim, positive for a row.
Ordinals are only added, and never change their key. A writer, under the lock, writes the key first and its
slot last. So a reader without the lock finds a key's ordinal or, while the key is being added, maybe nothing.
A killed writer leaves an ordinal that no slot names: it stays unused.

A table that is too small is replaced: a process fills the new one under the lock, and then one number of the
head points to it. Readers may still use the old one. Once freed, it reads as zeros, which are free slots:
they find nothing there, and look in the new table.
"""

from __future__ import annotations

import numpy as np

from torchcache2.core.keys import Array, Ordinals, Positions, Words
from torchcache2.tiers.index import KeyTable
from torchcache2.tiers.shared.region import PAGE, pages
from torchcache2.tiers.shared.space import Space

_TABLE, _TAKEN = 0, 1  # words of the head: slots of the table, and ordinals in use
_RANGES = {"keys": 16, "locations": 8, "sums": 8}  # bytes per ordinal
_PART = 1 << 20  # slots that are placed at once
_LEAST = PAGE // 8  # ordinals and slots at first; both fill whole pages


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
        self._head = space.head
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

    def refresh(self) -> None:
        """See changes of other processes."""
        seen = int(self._head.item(_TABLE)), self._space.length("sums")
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
        self.refresh()
        ordinal = self._table.find_one(low, high)
        return ordinal, self.locations.item(ordinal) if ordinal >= 0 else 0

    def prepare(self, count: int) -> bool:
        """Make room for `count` more keys; False if the budget has none. Not under the lock."""
        self.refresh()
        needed = len(self) + count
        if needed > len(self.locations):
            ordinals = max(needed, len(self.locations) * 33 // 32)
            ordinals = -(-ordinals // _LEAST) * _LEAST
            if not all(self._space.grow(name, width * ordinals) for name, width in _RANGES.items()):
                return False
        slots = len(self._table.slots)
        if needed > slots * 9 // 16:
            while needed > slots * 9 // 16:
                slots *= 2
            # A table of n slots begins at slot n of the range, so that tables of all sizes have room.
            return self._space.may_be("slots", 16 * slots) and self._replace(slots)
        return True

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
        first = len(self)
        room = min(len(self.locations), len(self._table.slots) * 9 // 16) - first
        absent = absent[: max(0, room)]
        if len(absent):
            added = np.arange(first, first + len(absent))
            self._head[_TAKEN] = first + len(absent)  # first, so that these are never given out again
            self._table.keys[added] = words[absent]
            self.locations[added] = location
            self._table.place(added)
            ordinals[absent], locations[absent] = added, location
        return ordinals, locations

    def _replace(self, slots: int) -> bool:
        """Replace the table by one of `slots` slots."""
        space, size = self._space, 8 * slots
        with space.lock():
            if not space.board.charge(space.file, size):
                return False
        start = space.start("slots") + size
        reserved = space.reserve(start, size)
        with space.lock():
            self.refresh()
            old = self._table.slots
            if not reserved or slots <= len(old):
                if reserved and slots < len(old):  # others have made an even larger table
                    space.region.discard(start, size)
                space.board.charge(space.file, -size)
                return reserved
            new = KeyTable(space.region.array("<i8", start, slots), self._table.keys)
            new.slots.fill(0)  # a killed process may have left data there
            for part in np.split(old, range(_PART, len(old), _PART)):
                new.place(part[part > 0] & 0xFFFFFFFF)
                space.board.go_on()
            self._head[_TABLE] = slots
            space.region.discard(space.start("slots") + old.nbytes, pages(old.nbytes))
            space.board.charge(space.file, -old.nbytes)
            self.refresh()
        return True
