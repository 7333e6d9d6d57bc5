"""`Space`: the ranges of one namespace's region, whose memory counts against the budget.

The region reserves all the address space that could ever be needed, so ranges never move; they get memory as
they grow. The first page, the head, holds numbers. To grow a range, a process counts its bytes under the
lock, reserves them without it, since that may take long, and then updates the head. A process killed in
between leaves only bytes that are counted and not used.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager

from torchcache2.core.keys import Array, Bytes
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
    "about": 0.0,
}
_DATA = 4.0  # aligning rows to their size at most doubles the data
_LEAST = 1 << 20
_DISCARDED = 256 << 20  # bytes at once
_WORDS = 512  # of the head; the last ones are the sizes of ranges
_PLACES = {name: _WORDS - 1 - i for i, name in enumerate(_SHARES)}  # the word with each range's length


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
        """Make a range at least `size` bytes long; False if there is no memory. Not under the lock."""
        if self.length(name) >= size:  # no range gets shorter
            return True
        if not self.may_be(name, pages(size)):
            return False
        with self.lock():
            before = self.length(name)
            more = pages(size) - before
            if more <= 0:
                return True
            if not self.board.charge(self.file, more):
                return False
        reserved = self.reserve(self._starts[name] + before, more)
        with self.lock():
            now = self.length(name)
            if reserved:
                self.set_length(name, max(now, before + more))
            # Another process may have grown the range meanwhile, and counted these bytes too.
            twice = max(0, min(now, before + more) - before) if reserved else more
            self.board.charge(self.file, -twice)
        return reserved

    def discard(self, end: int) -> None:
        """Give back the memory of keys and rows, which end at byte `end`, after the file was dropped.

        Under the lock. Another process may still read there (zeros) or write (uncounted memory), so readers
        check afterwards that the file was not dropped.
        """
        kept = PAGE + sum(map(self.length, ["offsets", "kinds", "schemas", "texts"]))
        for first, last in [(PAGE, self._starts["offsets"]), (self.data, pages(end))]:
            for start in range(first, last, _DISCARDED):
                self.region.discard(start, min(_DISCARDED, last - start))
                self.board.go_on()
        self.board.count_bytes(self.file, kept)

    def tell(self, text: bytes) -> None:
        """Store a text about the namespace, unless it has one. It does not count against the budget."""
        with self.lock():
            if len(text) <= _LEAST and self.told()[:1] == b"\0":
                os.pwrite(self.region.descriptor, text, self._starts["about"])

    def told(self) -> bytes:
        """The text about the namespace, followed by zeros; reading it allocates no memory."""
        return os.pread(self.region.descriptor, _LEAST, self._starts["about"])

    def may_be(self, name: str, size: int) -> bool:
        """Whether a range has address space for so many bytes."""
        return size <= _length(name, self.board.budget)

    def reserve(self, offset: int, size: int) -> bool:
        """Give a range memory; False if the system has none."""
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
