"""`KeyIndex`: a vectorised open-addressing table from 16-byte keys to ordinals.

Ordinals are 0, 1, 2, … in the order of insertion: they are positions in arrays of the owner, which have what
belongs to each key. The keys themselves lie in such an array, which the owner provides and grows. A slot of
the table proper is 8 bytes: the ordinal, and 31 bits of the key, so that a search seldom meets a wrong key.
At most five eighths of the slots are in use, so that nearly every key is in the first 16 slots that it may be
in. Every operation works on whole batches.

Not thread-safe: the owner holds a lock.
"""

from __future__ import annotations

import numpy as np

from torchcache2.core.arrays import Array, Ordinals, Words

__all__ = ["KeyIndex"]

_FREE, _REMOVED = -1, -2
_WINDOW = np.arange(16)[:, None]  # slots that are looked at together: two cache lines
_TAG = np.uint64(0x7FFFFFFF_00000000)  # these bits of a slot come from the key, the lower are the ordinal
_LEAST = 32


class KeyIndex:
    """Open addressing with linear probing; keys are digests, so their low bits are the hash.

    Attributes
    ----------
    keys : ndarray of uint64, shape (capacity, 2)
        The keys by ordinal; the first `len(self)` are in use. The owner may replace it by a longer array
        that starts with the same keys.
    """

    def __init__(self, keys: Words) -> None:
        self.keys = keys
        self._count = 0
        self._removed = 0
        self._slots = np.full(_LEAST, _FREE, np.int64)

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Bytes of the table proper, without the keys."""
        return self._slots.nbytes

    @property
    def room(self) -> int:
        """Keys that can be added before the table grows."""
        return len(self._slots) * 5 // 8 - self._count

    def growth(self, count: int) -> int:
        """Bytes of the new table if `count` more keys need one; the old one goes afterwards."""
        return self._slots_for(count) * self._slots.itemsize if count > self.room else 0

    def reserve(self, count: int) -> None:
        """Make the table large enough for `count` more keys."""
        if count > self.room:
            self._slots = np.full(self._slots_for(count), _FREE, np.int64)
        elif self._count + self._removed + count > len(self._slots) * 3 // 4:
            self._slots.fill(_FREE)  # removed slots make every search longer
        else:
            return
        self._removed = 0
        self._place(np.arange(self._count))

    def find(self, words: Words) -> Ordinals:
        """Ordinal of each key, ``(n, 2)``; -1 of keys that are not here."""
        if self._count == 0 or len(words) == 0:
            return np.full(len(words), -1)
        slots, tags = self._home(words)
        window = self._slots.take((slots + _WINDOW) & (len(self._slots) - 1)).view(np.uint64)
        # Combining a slot with the key's tag leaves the ordinal alone if the tag of the slot is the same. Any
        # other slot gives a larger number, so that the least one is the ordinal, if the key is here at all.
        window ^= tags.view(np.uint64)
        least = np.minimum.reduce(window, axis=0)
        ordinals: Ordinals = least.view(np.int64)
        same = self.keys.take(ordinals, axis=0, mode="clip") == words
        # If no slot has the tag of a key, this is no ordinal: `take` clips it and reads another key, and what
        # follows sees that it is not the one that is sought.
        if not same.all() or least.max() >= self._count:
            rest = (~same.all(axis=1) | (least >= self._count)).nonzero()[0]
            ordinals[rest] = self._search(words.take(rest, axis=0))[0]
        return ordinals

    def add(self, words: Words) -> None:
        """Append keys that are distinct and not in the table.

        They get the next ordinals; `keys` has room for them.
        """
        count = len(words)
        self.reserve(count)
        first = self._count
        self.keys[first : first + count] = words
        self._count += count
        self._place(np.arange(first, first + count))

    def remove(self, ordinals: Ordinals) -> tuple[Ordinals, Ordinals]:
        """Remove the keys of distinct ordinals; the last keys move into their places.

        Returns
        -------
        source, target : ndarray of int64
            Ordinals of the keys that moved, before and after: the owner moves the elements of its arrays
            likewise.
        """
        left = self._count - len(ordinals)
        target = ordinals[ordinals < left]
        moves = np.ones(len(ordinals), bool)
        moves[ordinals[ordinals >= left] - left] = False
        source = np.flatnonzero(moves) + left
        gone = self._search(self.keys[ordinals])[1]
        moved = self._search(self.keys[source])[1]
        self._slots[gone] = _REMOVED
        self._slots[moved] += target - source
        self.keys[target] = self.keys[source]
        self._count = left
        self._removed += len(ordinals)
        return source, target

    def _slots_for(self, count: int) -> int:
        slots = _LEAST
        while self._count + count > slots * 5 // 8:
            slots *= 2
        return slots

    def _home(self, words: Words) -> tuple[Array, Array]:
        """First slot of each key, and its tag: `_TAG` of its second word."""
        slots = (words[:, 0] & np.uint64(len(self._slots) - 1)).view(np.int64)
        return slots, (words[:, 1] & _TAG).view(np.int64)

    def _search(self, words: Words) -> tuple[Ordinals, Array]:
        """Ordinal and slot of each key; -1 where there is none."""
        ordinals = np.full(len(words), -1)
        places = np.full(len(words), -1)
        slots, tags = self._home(words)
        mask = len(self._slots) - 1
        waiting = np.arange(len(words))
        while len(waiting):
            window = self._slots.take((slots + _WINDOW) & mask)
            # Tags are the same by chance once in billions of comparisons, so the whole keys are compared.
            columns, rows = ((window ^ tags) >> 32 == 0).nonzero()
            candidates = window[columns, rows] & 0x7FFFFFFF
            sought = waiting.take(rows)
            same = (self.keys.take(candidates, axis=0) == words.take(sought, axis=0)).all(axis=1)
            if not same.all():
                rows, columns, candidates = rows[same], columns[same], candidates[same]
                sought = sought[same]
            ordinals[sought] = candidates
            places[sought] = (slots.take(rows) + columns) & mask
            if len(rows) == len(waiting):
                break
            undecided = (window != _FREE).all(axis=0)
            undecided[rows] = False
            rest = undecided.nonzero()[0]
            waiting, slots, tags = waiting[rest], (slots[rest] + len(_WINDOW)) & mask, tags[rest]
        return ordinals, places

    def _place(self, ordinals: Ordinals) -> None:
        """Write ordinals that are in no slot yet into free or removed slots."""
        mask = len(self._slots) - 1
        slots, tags = self._home(self.keys[ordinals])
        values = tags | ordinals
        while len(values):
            before = self._slots[slots]
            free = before < 0
            self._slots[slots[free]] = values[free]
            # Of several ordinals that were written to one slot, one stays; the others try the next slot.
            placed = self._slots[slots] == values
            self._removed -= int(np.count_nonzero(before[placed] == _REMOVED))
            values, slots = values[~placed], (slots[~placed] + 1) & mask
