"""Locks that work in forked processes.

A process may fork while another thread of it holds a lock: a `DataLoader` with workers forks at each epoch.
The child has the lock, but not the thread that would release it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["ProcessLock", "holds"]


def holds(lock: Any) -> bool:
    """Whether this thread holds a lock."""
    try:
        threading.Condition(lock).notify()  # it raises if not
    except RuntimeError:
        return False
    return True


class ProcessLock:
    """A lock for each process, used as ``with lock(): …``.

    An interrupt cannot leave it locked, since the lock itself is what ``with`` enters.

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
        # `setdefault` is atomic, so that all threads of a child get the same lock.
        return self._locks.get(pid) or self._locks.setdefault(pid, self._make())

    def if_free(self, function: Callable[[], object]) -> None:
        """Call a function under the lock, or do nothing if somebody holds it: this never waits.

        It is for work that the garbage collector may start in a thread that holds the lock, and that the
        holder does otherwise.
        """
        lock = self()
        # After an ordinary call of `acquire`, an interrupt could come before `try`, and the lock would stay
        # locked. No interrupt comes between `map` and the body of the loop.
        for is_free in map(lock.acquire, (False,)):
            if is_free:
                try:
                    function()
                finally:
                    lock.release()

    def was_torn(self) -> bool:
        """Whether the parent held its lock when it forked: what the lock protects may then be half changed.

        True at most once in a child. To be called with the lock held.
        """
        pid = os.getpid()
        if len(self._locks) == 1:
            return False
        others = [lock for owner, lock in self._locks.items() if owner != pid]
        self._locks = {pid: self._locks[pid]}
        return not all(lock.acquire(blocking=False) for lock in others)

    def __reduce__(self) -> tuple[Any, ...]:
        return ProcessLock, (self._make,)
