"""`Pieces`: how many rows are asked for at once, so that a server never makes a huge reply."""

from __future__ import annotations

from collections.abc import Sequence

_REPLY = 8 << 20  # bytes of a reply
_UNSEEN, _SEEN = 32 << 10, 1 << 10  # what a row takes at least, before one of them was seen and later
_PREFIX = 45  # bytes of a name that all rows of a namespace share


class Pieces:
    """The sizes of rows that were seen, by namespace.

    The first piece is one row. A guess that was too large is corrected by and by.
    """

    def __init__(self) -> None:
        self._guess: dict[bytes, float] = {}
        self._seen: set[bytes] = set()

    def count(self, name: bytes) -> int:
        """How many rows like that of `name` may be asked for at once."""
        return max(1, int(_REPLY / self._guess.get(name[:_PREFIX], _REPLY)))

    def saw(self, name: bytes, values: Sequence[bytes | None]) -> None:
        """Learn from the values of names like `name`; None is a value that was not there."""
        prefix = name[:_PREFIX]
        largest = max(map(len, filter(None, values)), default=0)
        if largest:
            self._seen.add(prefix)
        least = _SEEN if prefix in self._seen else _UNSEEN
        self._guess[prefix] = max(largest, least, self._guess.get(prefix, _REPLY) / 4)

    def will_see(self, name: bytes, value: bytes) -> None:
        """Learn from a value that is sent under a name."""
        prefix = name[:_PREFIX]
        if len(value) > self._guess.get(prefix, 0):
            self._guess[prefix] = max(len(value), _SEEN)
            self._seen.add(prefix)
