"""`Budget`: the bytes and rows in the files of a job, and the bytes left.

Replicas (copies of rows that other ranks own) have files of their own. When other rows need room, all these
files are dropped at once, and later replicas leave a quarter of that room free. As they take a quarter less
each time, this happens a bounded number of times. A memory that other rows fill has no replicas.
"""

from __future__ import annotations

import numpy as np

from torchcache2.core.keys import Array

BUDGET, FULL, PRESSURE, RESERVE = 4, 6, 7, 11  # words of the head
STATE, INODE, BYTES, ROWS, FLAGS, NAMESPACE, _, RANKS = range(8)  # of a file
LIVE, DEAD = 1, 2  # states
UNCLAIMED, REPLICAS = 1, 2  # flags

_SMALL, _SUFFICIENT = 30_000, 200_000  # bytes: a budget from the first on has the room of the second
_LEFT_FREE = 4  # dropped replicas reserve 1/4 of their bytes for other rows


class Budget:
    """The part of a `Board` that counts bytes and rows of its files.

    Parameters
    ----------
    head, files : ndarray of int64
        The board's head, and its table of files.
    size : int
        Bytes of the board.
    """

    def __init__(self, head: Array, files: Array, size: int) -> None:
        self._head, self._files, self._size = head, files, size

    @property
    def budget(self) -> int:
        """Bytes that the files and this board together never exceed; see `uncounted`."""
        return int(self._head[BUDGET])

    @property
    def uncounted(self) -> int:
        """Bytes that a small budget does not count: the board alone would fill it."""
        budget = self.budget
        return max(0, _SUFFICIENT - budget) if budget >= _SMALL else 0

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        size = int(self._files[self._files[:, STATE] != 0, BYTES].sum())
        return max(0, size - max(0, self.uncounted - self._size))

    @property
    def rows(self) -> int:
        """Rows in all files."""
        return int(self._files[self._files[:, STATE] == LIVE, ROWS].sum())

    def rows_of(self, file: int) -> int:
        """Rows in a file."""
        return int(self._files[file, ROWS])

    @property
    def free(self) -> int:
        """Bytes that are left."""
        return self.budget - max(0, self._size - self.uncounted) - self.bytes

    def free_for(self, replicas: bool) -> int:
        """Bytes that are left for replicas, or for other rows; -1 if replicas find no room at all."""
        if not replicas:
            return self.free
        return -1 if self.is_full else self.free - int(self._head[RESERVE])

    def charge(self, file: int, size: int) -> bool:
        """Add bytes, or subtract them, for a file; False if so many are not free."""
        if size > 0 and size > self.free_for(self.are_replicas(file)):
            return False
        self._files[file, BYTES] += size
        return True

    def count_rows(self, file: int, count: int) -> None:
        """Add rows, or subtract them, for a file."""
        self._files[file, ROWS] += count

    @property
    def is_full(self) -> bool:
        """Whether rows found no room, and none was made since."""
        return bool(self._head[FULL])

    @property
    def pressure(self) -> int:
        """A number that grows when a process needs room: each process then frees what it does not use."""
        return int(self._head[PRESSURE])

    def press(self) -> None:
        """Ask all processes for room."""
        self._head[PRESSURE] += 1

    def fill(self) -> None:
        """Record that rows found no room."""
        self._head[FULL] = 1

    def is_unclaimed(self, file: int) -> bool:
        """Whether a file's keys must not be claimed, because some of its rows cannot be kept."""
        return bool(self._files[file, FLAGS] & UNCLAIMED)

    def leave_unclaimed(self, file: int) -> None:
        """Record that some rows of a file cannot be kept."""
        self._files[file, FLAGS] |= UNCLAIMED

    def are_replicas(self, file: int) -> bool:
        """Whether a file's rows are replicas."""
        return bool(self._files[file, FLAGS] & REPLICAS)

    def drop_replicas(self) -> list[int]:
        """Forget all replicas; under the lock. Returns their files."""
        are_there = (self._files[:, STATE] == LIVE) & (self._files[:, FLAGS] & REPLICAS != 0)
        files: list[int] = np.flatnonzero(are_there).tolist()
        if files:
            self._head[RESERVE] = self._files[files, BYTES].sum() // _LEFT_FREE
            self._files[files, STATE] = DEAD
        return files

    def count_bytes(self, file: int, size: int) -> None:
        """Record how many bytes a dropped file still has; under the lock."""
        self._files[file, BYTES] = size
