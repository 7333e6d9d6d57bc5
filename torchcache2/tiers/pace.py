"""`Pace`: how many rows are written together, how long they wait for that, and how many may wait.

A job that computes slowly for hours would leave thousands of segments if each were written after some
seconds. So rows wait longer the longer the rows of their namespace have waited before, by a fixed share of
that time. The number of segments then grows with the logarithm of the time, and a process that is killed
loses a small share of its rows.
"""

from __future__ import annotations

import math

from torchcache2.tiers.unwritten import Pending

_SHARE = 0.02  # rows wait for this share of the time that rows of their namespace have waited before
_LONGEST_DELAY = 600.0  # seconds
_FIRST = 4e5, 0.1  # bytes and the seconds that writing them takes, before that was measured


class Pace:
    """That of one writer, which holds its lock when it calls this.

    A segment is large enough from `target` bytes, or `rows` rows, on, and `limit` bytes may wait; both are
    less where writing that many would take more than `most_seconds`. A segment is written after `delay`
    seconds, however small it is; later ones wait longer, up to `longest_delay`.

    Attributes
    ----------
    target, limit : int
        Bytes.
    waited : dict of bytes to float
        Seconds that rows of each namespace have waited until they were written because of their age.
    """

    def __init__(
        self,
        *,
        target: int,
        limit: int,
        delay: float,
        most_seconds: float | None = None,
        rows: float = math.inf,
        longest_delay: float = _LONGEST_DELAY,
    ) -> None:
        self.target = self._target = target
        self.limit = self._limit = limit
        self.waited: dict[bytes, float] = {}
        self._delay, self._longest_delay = delay, longest_delay
        self._rows = rows
        self._most_seconds = most_seconds
        self._written, self._took = _FIRST  # bytes of the last segments, and seconds
        self._adjust()

    def is_enough(self, pending: Pending) -> bool:
        """Whether a segment is large enough to be written now."""
        return pending.nbytes >= self.target or pending.count >= self._rows

    def delay_of(self, namespace: bytes) -> float:
        """Seconds that rows of a namespace may wait."""
        return max(self._delay, min(self._longest_delay, _SHARE * self.waited.get(namespace, 0.0)))

    def was_old(self, namespace: bytes) -> None:
        """Count a segment that is written because of its age."""
        self.waited[namespace] = self.waited.get(namespace, 0.0) + self.delay_of(namespace)

    def measured(self, size: int, seconds: float) -> None:
        """Count a segment that was written; half of the weight is that of the last one."""
        self._written = self._written / 2 + size
        self._took = self._took / 2 + seconds
        self._adjust()

    def _adjust(self) -> None:
        """Let so many bytes wait as are written in time."""
        if self._most_seconds is not None:
            self.limit = min(self._limit, int(self._most_seconds * self._written / max(self._took, 1e-9)))
            self.target = max(1, min(self._target, self.limit // 4))
