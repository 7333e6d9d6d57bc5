"""Locks that a forked process has anew.

A process may fork while one of its other threads holds a lock, as a `DataLoader` with workers does at
each epoch. The child has that lock, and not the thread that would release it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["ProcessLock"]


class ProcessLock:
    """A lock, another one in each process; ``with lock(): …``, so that no interrupt comes before its release.

    Parameters
    ----------
    make : callable
        `threading.Lock` or `threading.RLock`.
    """

    def __init__(self, make: Callable[[], Any] = threading.Lock) -> None:
        self._make = make
        self._locks = {os.getpid(): make()}

    def __call__(self) -> Any:
        """The lock of this process."""
        pid = os.getpid()
        # `setdefault` is atomic: all threads of a child get the same one.
        return self._locks.get(pid) or self._locks.setdefault(pid, self._make())

    def was_torn(self) -> bool:
        """Once in a child, with its lock held: whether the parent held its own when it forked.

        What the lock protects may then be half changed.
        """
        pid = os.getpid()
        if len(self._locks) == 1:
            return False
        others = [lock for owner, lock in self._locks.items() if owner != pid]
        self._locks = {pid: self._locks[pid]}
        return not all(lock.acquire(blocking=False) for lock in others)

    def __reduce__(self) -> tuple[Any, ...]:
        return ProcessLock, (self._make,)
