"""`Pieces`: ranges that were fetched from a bucket, many at once, until they are read."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from torchcache2.tiers.bucket.objects import Objects

PIECE = 8 << 20  # bytes of one request; several at once are faster than a long one
Range = tuple[str, int, int]  # of an object: its name, and where it begins and ends


class Pieces:
    """Fetched ranges, or the errors, by name. Those to be fetched are noted first; for one thread."""

    def __init__(self) -> None:
        self.wanted: list[Range] = []
        self._found: dict[str, list[tuple[int, int, bytes | Exception]]] = {}

    def at(self, name: str, start: int) -> memoryview | Exception | None:
        """Fetched bytes from `start` on, or the error; None if they were not fetched."""
        found = self._found.get(name, ())
        place = bisect.bisect_right(found, start, key=lambda piece: piece[0]) - 1
        if place < 0 or start >= found[place][1]:
            return None
        first, _, data = found[place]
        return data if isinstance(data, Exception) else memoryview(data)[start - first :]

    def fetch(self, objects: Objects, ranges: Sequence[Range]) -> list[tuple[Range, bytes | Exception]]:
        """Fetch ranges at once, long ones in parts; also returns these."""
        parts = cut(ranges, PIECE)
        found = list(zip(parts, objects.fetch(parts), strict=True))
        for (name, start, end), data in found:
            self._found.setdefault(name, []).append((start, end, data))
        for name in {name for name, _, _ in parts}:
            self._found[name].sort(key=lambda piece: piece[0])
        return found


def cut(ranges: Sequence[Range], size: int) -> list[Range]:
    """Ranges in parts of up to `size` bytes."""
    return [(name, at, min(at + size, end)) for name, start, end in ranges for at in range(start, end, size)]


def merged(ranges: Sequence[Range], gap: int) -> list[Range]:
    """Ranges in order, neighbours up to `gap` bytes apart as one."""
    found: list[Range] = []
    for name, start, end in sorted(ranges):
        if found and found[-1][0] == name and start - found[-1][2] <= gap:
            found[-1] = name, found[-1][1], max(end, found[-1][2])
        else:
            found.append((name, start, end))
    return found
