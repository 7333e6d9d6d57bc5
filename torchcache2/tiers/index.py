"""`KeyIndex`: a vectorised open-addressing table from 16-byte keys to dense entry numbers.

Entry numbers are 0, 1, 2, … in the order of insertion, so that parallel arrays can hold whatever belongs
to an entry. The keys themselves lie in such an array, which the owner provides and grows. A slot of
the table proper is 8 bytes: 30 bits of the key, so that a probe seldom looks at a wrong key, and the
entry number. A free slot is 0, as fresh memory is. At most five eighths of the slots are in use: nearly every
key is in the first 16 slots that it may be in. Every operation works on whole batches.

`KeyTable` is the probing alone, over memory that somebody else provides and grows, such as memory that
processes share. Not thread-safe: the owner holds a lock.
"""

from __future__ import annotations

import numpy as np

from torchcache2.core.arrays import Entries, Words

__all__ = ["KeyIndex", "KeyTable"]

_FREE, _REMOVED = 0, -1
_WINDOW = np.arange(16)[:, None]  # slots that are looked at together: two cache lines
_TAG = np.uint64(0x7FFFFFFE_00000000)  # the bits of a slot that come from the key; below is the entry
_USED = np.uint64(1 << 32)  # this bit tells a slot in use from a free one, whatever its tag and entry
_LEAST = 32


class KeyTable:
    """Open addressing with linear probing; keys are digests, so their low bits are the hash.

    Attributes
    ----------
    slots : ndarray of int64
        A power of two of them, at least 16, some of which are free.
    keys : ndarray of uint64, shape (capacity, 2)
        Key of each entry; a slot's entry that lies behind them is none.
    """

    def __init__(self, slots: Entries, keys: Words) -> None:
        self.slots = slots
        self.keys = keys

    def find(self, words: Words) -> Entries:
        """Entry of each key ``(n, 2)``, or -1."""
        if len(self.keys) == 0 or len(words) == 0:
            return np.full(len(words), -1)
        slots, tags = self._home(words)
        window = self.slots.take((slots + _WINDOW) & (len(self.slots) - 1)).view(np.uint64)
        # Where a tag agrees, its bits go out and the entry number is left, which is smaller than all else.
        window ^= tags.view(np.uint64)
        least = np.minimum.reduce(window, axis=0)
        entries: Entries = least.view(np.int64)
        same = self.keys.take(entries, axis=0, mode="clip") == words
        # Without a sign: where all slots are free or removed, the number is negative, and clipped to 0.
        if not same.all() or least.max() >= len(self.keys):
            rest = (~same.all(axis=1) | (least >= len(self.keys))).nonzero()[0]
            entries[rest] = self.probe(words.take(rest, axis=0))[0]
        return entries

    def probe(self, words: Words) -> tuple[Entries, Entries]:
        """Entry and slot of each key; -1 where there is none."""
        entries = np.full(len(words), -1)
        places = np.full(len(words), -1)
        slots, tags = self._home(words)
        mask = len(self.slots) - 1
        waiting = np.arange(len(words))
        while len(waiting):
            window = self.slots.take((slots + _WINDOW) & mask)
            # Tags agree by chance once in billions of probes: the whole key decides.
            columns, rows = ((window ^ tags) >> 32 == 0).nonzero()
            candidates = window[columns, rows] & 0xFFFFFFFF
            sought = waiting.take(rows)
            same = (self.keys.take(candidates, axis=0, mode="clip") == words.take(sought, axis=0)).all(axis=1)
            same &= candidates < len(self.keys)
            if not same.all():
                rows, columns, candidates = rows[same], columns[same], candidates[same]
                sought = sought[same]
            entries[sought] = candidates
            places[sought] = (slots.take(rows) + columns) & mask
            if len(rows) == len(waiting):
                break
            undecided = (window != _FREE).all(axis=0)
            undecided[rows] = False
            rest = undecided.nonzero()[0]
            waiting, slots, tags = waiting[rest], (slots[rest] + len(_WINDOW)) & mask, tags[rest]
        return entries, places

    def place(self, entries: Entries) -> int:
        """Write entries that are not in the table into free or removed slots; how many were removed ones."""
        mask = len(self.slots) - 1
        slots, tags = self._home(self.keys[entries])
        values = tags | entries
        reused = 0
        while len(values):
            before = self.slots[slots]
            free = before <= 0
            self.slots[slots[free]] = values[free]
            # Of several entries that wrote to one slot, one stays; the others move on.
            placed = self.slots[slots] == values
            reused += int(np.count_nonzero(before[placed] == _REMOVED))
            values, slots = values[~placed], (slots[~placed] + 1) & mask
        return reused

    def _home(self, words: Words) -> tuple[Entries, Entries]:
        """First slot of each key, and what its own slot has beside the entry."""
        slots = (words[:, 0] & np.uint64(len(self.slots) - 1)).view(np.int64)
        return slots, (words[:, 1] & _TAG | _USED).view(np.int64)


class KeyIndex(KeyTable):
    """A table in private memory, which grows, and whose keys can be removed.

    Attributes
    ----------
    keys : ndarray of uint64, shape (capacity, 2)
        Key of each entry; the first `len(self)` are in use. The owner may replace it by a longer array
        that starts with the same keys.
    """

    def __init__(self, keys: Words) -> None:
        super().__init__(np.zeros(_LEAST, np.int64), keys)
        self._count = 0
        self._removed = 0

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Bytes of the table proper, without the keys."""
        return self.slots.nbytes

    @property
    def room(self) -> int:
        """Keys that can be added before the table grows."""
        return len(self.slots) * 5 // 8 - self._count

    def growth(self, count: int) -> int:
        """Bytes of the new table if `count` more keys need one; the old one goes afterwards."""
        return self._slots_for(count) * self.slots.itemsize if count > self.room else 0

    def reserve(self, count: int) -> None:
        """Make the table large enough for `count` more keys."""
        if count > self.room:
            self.slots = np.zeros(self._slots_for(count), np.int64)
        elif self._count + self._removed + count > len(self.slots) * 3 // 4:
            self.slots.fill(_FREE)  # every probe goes on past removed slots
        else:
            return
        self._removed = 0
        self.place(np.arange(self._count))

    def add(self, words: Words) -> None:
        """Append keys that are distinct and not in the table.

        Their entries are the next ones; `keys` has room for them.
        """
        count = len(words)
        self.reserve(count)
        first = self._count
        self.keys[first : first + count] = words
        self._count += count
        self._removed -= self.place(np.arange(first, first + count))

    def remove(self, entries: Entries) -> tuple[Entries, Entries]:
        """Remove distinct entries, and move the last ones into their places.

        Returns
        -------
        source, target : ndarray of int64
            Entries that moved, and where to: the owner moves its parallel arrays likewise.
        """
        left = self._count - len(entries)
        target = entries[entries < left]
        moves = np.ones(len(entries), bool)
        moves[entries[entries >= left] - left] = False
        source = np.flatnonzero(moves) + left
        gone = self.probe(self.keys[entries])[1]
        moved = self.probe(self.keys[source])[1]
        self.slots[gone] = _REMOVED
        self.slots[moved] += target - source
        self.keys[target] = self.keys[source]
        self._count = left
        self._removed += len(entries)
        return source, target

    def _slots_for(self, count: int) -> int:
        slots = _LEAST
        while self._count + count > slots * 5 // 8:
            slots *= 2
        return slots
