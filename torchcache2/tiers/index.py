"""`KeyIndex`: a vectorised open-addressing table from 16-byte keys to ordinals.

Ordinals are 0, 1, 2, … in the order of insertion: positions in the owner's arrays, which hold each key's
data. One of them holds the keys; the owner grows it. A slot of the table is 8 bytes: the ordinal, and 30 bits
of the key, so that a search rarely compares a wrong key. A free slot is 0, like fresh memory. At most five
eighths of the slots are in use, so nearly every key is within 16 slots of its home slot. Every operation
works on whole batches.

`KeyLocations` has a location for each key. `KeyTable` only searches; its owner provides the memory, which
processes may share. Not thread-safe: the owner holds a lock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from torchcache2.core.keys import Array, Ordinals, Words

_FREE, _REMOVED = 0, -1
_WINDOW = np.arange(16)[:, None]  # slots compared at once: two cache lines
_TAG = np.uint64(0x7FFFFFFE_00000000)  # the bits of a slot that come from the key; below is the ordinal
_USED = np.uint64(1 << 32)  # this bit tells a slot in use from a free one, whatever its tag and ordinal
_TAG_INT, _USED_INT = int(_TAG), int(_USED)
_LEAST = 16
_NOWHERE = -1
_GROWTH = 1.0625
_AT_ONCE = 8192  # keys whose windows stay in the processor's cache
_FEW = 8  # keys; looking up so few one by one takes at most half as long


class KeyTable:
    """Open addressing with linear probing; keys are digests, so their low bits are the hash.

    Attributes
    ----------
    slots : ndarray of int64
        A power of two, at least 16; some must be free.
    keys : ndarray of uint64, shape (capacity, 2)
        Key of each ordinal; an ordinal beyond the end of this array is invalid.
    """

    def __init__(self, slots: Ordinals, keys: Words) -> None:
        self.slots = slots
        self.keys = keys

    def find(self, words: Words) -> Ordinals:
        """Ordinal of each key, ``(n, 2)``; -1 of keys that are not here."""
        if 0 < len(words) <= _FEW:
            return np.array([self.find_one(*word) for word in words.tolist()])
        if len(self.keys) == 0 or len(words) == 0:
            return np.full(len(words), -1)
        if len(words) > _AT_ONCE:
            pieces = [words[i : i + _AT_ONCE] for i in range(0, len(words), _AT_ONCE)]
            return np.concatenate([self.find(piece) for piece in pieces])
        slots, tags = self._home(words)
        window = self.slots.take((slots + _WINDOW) & (len(self.slots) - 1)).view(np.uint64)
        # XOR with the key's tag leaves just the ordinal if the slot has the same tag, and a larger number
        # otherwise: if the key is here, the least number is its ordinal.
        window ^= tags.view(np.uint64)
        least = np.minimum.reduce(window, axis=0)
        ordinals: Ordinals = least.view(np.int64)
        same = self.keys.take(ordinals, axis=0, mode="clip") == words
        # If no slot has the key's tag, this is not an ordinal: `take` clips it and reads another key, and the
        # comparison fails.
        if not same.all() or least.max() >= len(self.keys):
            rest = (~same.all(axis=1) | (least >= len(self.keys))).nonzero()[0]
            # Linear probing: no matching tag before the first free slot means absent.
            has_free = (window.take(rest, axis=1) == tags.take(rest).view(np.uint64)).any(axis=0)
            is_absent = has_free & (least.take(rest) >= _USED)
            ordinals[rest] = -1
            if not is_absent.all():
                rest = rest[~is_absent]
                ordinals[rest] = self.probe(words.take(rest, axis=0))[0]
        return ordinals

    def find_one(self, low: int, high: int) -> int:
        """Like `find`, for one key; plain ints are faster than arrays here."""
        slots, keys, mask = self.slots, self.keys, len(self.slots) - 1
        place, tag = low, high & _TAG_INT | _USED_INT
        while (slot := slots.item(place & mask)) != _FREE:
            ordinal = slot & 0xFFFFFFFF
            is_alike = slot - ordinal == tag and ordinal < len(keys)
            if is_alike and keys.item(ordinal, 0) == low and keys.item(ordinal, 1) == high:
                return ordinal
            place += 1
        return -1

    def probe(self, words: Words) -> tuple[Ordinals, Ordinals]:
        """Ordinal and slot of each key; -1 where there is none."""
        ordinals = np.full(len(words), -1)
        places = np.full(len(words), -1)
        slots, tags = self._home(words)
        mask = len(self.slots) - 1
        waiting = np.arange(len(words))
        while len(waiting):
            window = self.slots.take((slots + _WINDOW) & mask)
            # Tags coincide once in a billion comparisons, so compare whole keys.
            columns, rows = ((window ^ tags) >> 32 == 0).nonzero()
            candidates = window[columns, rows] & 0xFFFFFFFF
            sought = waiting.take(rows)
            same = (self.keys.take(candidates, axis=0, mode="clip") == words.take(sought, axis=0)).all(axis=1)
            same &= candidates < len(self.keys)
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

    def place(self, ordinals: Ordinals) -> int:
        """Write new ordinals into free or removed slots; returns how many reused a removed slot."""
        mask = len(self.slots) - 1
        slots, tags = self._home(self.keys[ordinals])
        values = tags | ordinals
        if len(values) == 1:
            slot = slots.item(0)
            while (taken := self.slots.item(slot)) > 0:
                slot = slot + 1 & mask
            self.slots[slot] = values[0]
            return int(taken == _REMOVED)
        reused = 0
        while len(values):
            before = self.slots[slots]
            free = before <= 0
            self.slots[slots[free]] = values[free]
            # If several ordinals hit one slot, one stays and the others try the next slot.
            placed = self.slots[slots] == values
            reused += int(np.count_nonzero(before[placed] == _REMOVED))
            values, slots = values[~placed], (slots[~placed] + 1) & mask
        return reused

    def _home(self, words: Words) -> tuple[Ordinals, Ordinals]:
        """The home slot of each key, and its tag: the bits of its slot besides the ordinal."""
        slots = (words[:, 0] & np.uint64(len(self.slots) - 1)).view(np.int64)
        return slots, (words[:, 1] & _TAG | _USED).view(np.int64)


class KeyIndex(KeyTable):
    """A table in private memory that grows and supports removal.

    Attributes
    ----------
    keys : ndarray of uint64, shape (capacity, 2)
        The keys by ordinal; the first `len(self)` are in use. The owner may replace it by a longer array
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
        """Bytes of the larger table that `count` more keys need, beside the old one; 0 if they fit."""
        return self._slots_for(count) * self.slots.itemsize if count > self.room else 0

    def reserve(self, count: int) -> None:
        """Make the table large enough for `count` more keys."""
        if count > self.room:
            self.slots = np.zeros(self._slots_for(count), np.int64)
        elif self._count + self._removed + count > len(self.slots) * 3 // 4:
            self.slots.fill(_FREE)  # removed slots slow every search down
        else:
            return
        self._removed = 0
        self.place(np.arange(self._count))

    def add(self, words: Words) -> None:
        """Append keys that are distinct and not in the table.

        They get the next ordinals; `keys` has room for them.
        """
        count = len(words)
        self.reserve(count)
        first = self._count
        self.keys[first : first + count] = words
        self._count += count
        self._removed -= self.place(np.arange(first, first + count))

    def remove(self, ordinals: Ordinals) -> tuple[Ordinals, Ordinals]:
        """Remove the keys of distinct ordinals; the last keys move into their places.

        Returns
        -------
        source, target : ndarray of int64
            Ordinals of the moved keys, before and after: the owner must move its array elements the same way.
        """
        left = self._count - len(ordinals)
        target = ordinals[ordinals < left]
        moves = np.ones(len(ordinals), bool)
        moves[ordinals[ordinals >= left] - left] = False
        source = np.flatnonzero(moves) + left
        gone = self.probe(self.keys[ordinals])[1]
        moved = self.probe(self.keys[source])[1]
        self.slots[gone] = _REMOVED
        self.slots[moved] += target - source
        self.keys[target] = self.keys[source]
        self._count = left
        self._removed += len(ordinals)
        return source, target

    def _slots_for(self, count: int) -> int:
        slots = _LEAST
        while self._count + count > slots * 5 // 8:
            slots *= 2
        return slots


class KeyLocations:
    """Keys in memory, each with a location: the number of a segment << 32 | the number of a row in it."""

    def __init__(self) -> None:
        self._index = KeyIndex(np.empty((0, 2), np.uint64))
        self._locations = np.empty(0, np.int64)
        self.gone = 0  # keys of removed segments; adding them again reuses their places
        self.has_copies = False  # whether duplicate keys were left out

    def __len__(self) -> int:
        return len(self._index) - self.gone

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self._index.nbytes + self._index.keys.nbytes + self._locations.nbytes

    def find(self, words: Words) -> Array:
        """The location of each key, or -1."""
        ordinals = self._index.find(words)
        if not len(self._locations):
            return ordinals
        locations = self._locations.take(ordinals, mode="clip")
        locations[ordinals < 0] = _NOWHERE
        return locations

    def add(self, keys: Mapping[int, Array], first: int = 0) -> None:
        """Add the keys, uint8 ``(n, 16)``, of segments, by segment number, from row `first` on.

        Adding many keys at once is far faster than adding a few many times.
        """
        words: Words = np.concatenate(list(keys.values())).view("<u8")
        rows = [number << 32 | np.arange(first, first + len(some)) for number, some in keys.items()]
        locations = np.concatenate(rows)
        low = np.sort(words[:, 0]) if len(words) > 1 else words[:, 0]
        if (low[1:] == low[:-1]).any():  # some may be equal
            distinct = np.unique(words, axis=0, return_index=True)[1]
            self.has_copies |= len(distinct) < len(words)
            words, locations = words[distinct], locations[distinct]
        ordinals = self._index.find(words)
        if (ordinals >= 0).any():
            known = np.flatnonzero(ordinals >= 0)
            gone = known[self._locations[ordinals[known]] < 0]
            self._locations[ordinals[gone]] = locations[gone]
            self.gone -= len(gone)
            self.has_copies |= len(gone) < len(known)
            words, locations = words[ordinals < 0], locations[ordinals < 0]
        count = len(self._index)
        if count + len(words) > len(self._locations):
            size = max(count + len(words), int(len(self._locations) * _GROWTH))
            self._locations = np.concatenate([self._locations[:count], np.empty(size - count, np.int64)])
            table = np.empty((size, 2), np.uint64)
            table[:count] = self._index.keys[:count]
            self._index.keys = table
        self._index.add(words)
        self._locations[count : count + len(words)] = locations

    def remove(self, numbers: Collection[int]) -> int:
        """Forget segments; returns how many keys were in them."""
        locations = self._locations[: len(self._index)]
        ordinals = np.flatnonzero(np.isin(locations >> 32, list(numbers)))
        locations[ordinals] = _NOWHERE
        self.gone += len(ordinals)
        return len(ordinals)

    def lose(self, locations: Array) -> None:
        """Forget the keys of some rows, given by their locations."""
        ordinals = np.flatnonzero(np.isin(self._locations[: len(self._index)], locations))
        self._locations[ordinals] = _NOWHERE
        self.gone += len(ordinals)
