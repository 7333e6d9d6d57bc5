"""`Places`: the segment and row of each key, and the other segments that have a row of it.

If several processes compute the same item at the same time, each of them seals a row of it. A key is found in
the first of these segments that was seen. The others are noted, at 24 bytes a key: one of them is used when
the first segment is gone.

Not thread-safe: the tier holds a lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping

import numpy as np

from torchcache2.core.keys import Array, Ordinals, Words
from torchcache2.tiers.index import KeyIndex

_GROWTH = 1.0625
_CHECKED_AT_ONCE = 1 << 18  # copies that one call of `restore` looks at, in some 20 ms


class Places:
    """Key → segment and row."""

    def __init__(self) -> None:
        self._index = KeyIndex(np.empty((0, 2), np.uint64))
        self._locations = np.empty(0, np.int64)
        self._copies: deque[tuple[Words, Array]] = deque()
        self._unchecked = 0  # so many of the first copies were not looked at since the last removal
        self._gone: set[int] = set()  # removed segments that copies may still name

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        copies = sum(words.nbytes + locations.nbytes for words, locations in self._copies)
        return self._index.nbytes + self._index.keys.nbytes + self._locations.nbytes + copies

    def find(self, words: Words) -> Ordinals:
        """Ordinal of each key, ``(n, 2)``; -1 of keys that are not here."""
        return self._index.find(words)

    def where(self, ordinals: Ordinals) -> tuple[Array, Array]:
        """The number of the segment, and of the row in it, for each ordinal."""
        locations = self._locations[ordinals]
        return locations >> 32, locations & 0xFFFFFFFF

    def add(self, keys: Array, number: int, first: int) -> None:
        """Note the keys, uint8 ``(n, 16)``, of row `first` of a segment and of those after it.

        A key that another segment has already is still found in that one.
        """
        words: Words = keys.view("<u8")
        locations = number << 32 | np.arange(first, first + len(words))
        if _has_equal(words):  # a file of this library never has a key twice
            distinct = np.unique(words, axis=0, return_index=True)[1]
            words, locations = words[distinct], locations[distinct]
        absent = self._index.find(words) < 0
        if not absent.all():
            self._copies.append((words[~absent], locations[~absent]))
            words, locations = words[absent], locations[absent]
        self._append(words, locations)

    def add_all(self, keys: Mapping[int, Array]) -> None:
        """Note the keys of all rows of some segments, given by the number of the segment.

        Adding many keys at once takes far less time than adding a few again and again.
        """
        words: Words = np.concatenate(list(keys.values())).view("<u8")
        if _has_equal(words) or (self._index.find(words) >= 0).any():
            for number, some in keys.items():
                self.add(some, number, 0)
        else:
            locations = [number << 32 | np.arange(len(some)) for number, some in keys.items()]
            self._append(words, np.concatenate(locations))

    def remove(self, numbers: Collection[int]) -> int:
        """Forget segments; returns how many keys were found in them.

        Keys that other segments have too are found again after `restore`.
        """
        count = len(self._index)
        ordinals = np.flatnonzero(np.isin(self._locations[:count] >> 32, list(numbers)))
        moved, target = self._index.remove(ordinals)
        self._locations[target] = self._locations[moved]
        if self._copies:
            self._gone.update(numbers)
            self._unchecked = len(self._copies)
        return len(ordinals)

    def restore(self) -> bool:
        """Find keys of removed segments in other segments that have them; True if there were any.

        Each call looks at a limited number of keys, so that it takes little time. The next call goes on.
        """
        if not self._unchecked:
            return False
        some, count = [], 0
        while self._unchecked and count < _CHECKED_AT_ONCE:
            some.append(self._copies.popleft())
            self._unchecked -= 1
            count += len(some[-1][0])
        words = np.concatenate([one for one, _ in some])
        locations = np.concatenate([one for _, one in some])
        here = ~np.isin(locations >> 32, list(self._gone))
        words, locations = words[here], locations[here]
        absent = np.flatnonzero(self._index.find(words) < 0)
        chosen = absent[np.unique(words[absent, 0], return_index=True)[1]]  # several segments may have a key
        self._append(words[chosen], locations[chosen])
        rest = np.ones(len(words), bool)
        rest[chosen] = False
        if rest.any():
            self._copies.append((words[rest], locations[rest]))
        if not self._unchecked:
            self._gone.clear()
        return len(chosen) > 0

    def _append(self, words: Words, locations: Array) -> None:
        """Add distinct keys that are not here yet."""
        count = len(self._index)
        if count + len(words) > len(self._locations):
            size = max(count + len(words), int(len(self._locations) * _GROWTH))
            self._locations = np.concatenate([self._locations[:count], np.empty(size - count, np.int64)])
            table = np.empty((size, 2), np.uint64)
            table[:count] = self._index.keys[:count]
            self._index.keys = table
        self._index.add(words)
        self._locations[count : count + len(words)] = locations


def _has_equal(words: Words) -> bool:
    """Whether some keys may be equal."""
    low = np.sort(words[:, 0])
    return bool((low[1:] == low[:-1]).any())
