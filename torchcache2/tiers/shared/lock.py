"""`NodeLock`: one process of a job at a time.

It is `flock` on a file, which the system releases when a process is killed. It is never waited for without
an end: its holder may have been stopped. A forked child inherits the open file, and with it the lock of its
parent, which would outlive a parent that is killed: so the child opens the file anew at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import weakref
from collections.abc import Iterator

__all__ = ["LockTimeoutError", "NodeLock"]

_FIRST_PAUSE, _LONGEST_PAUSE = 50e-6, 2e-3  # seconds


class LockTimeoutError(Exception):
    """Another process has held the lock for longer than anybody should."""


class NodeLock:
    """``with lock(): …``; `LockTimeoutError` if it cannot be had. One thread of a process at a time.

    Parameters
    ----------
    descriptor : int
        An open file, which belongs to the lock from now on.

    Attributes
    ----------
    patience : float
        Seconds after which trying ends.
    """

    def __init__(self, descriptor: int) -> None:
        self.patience = 10.0
        self._descriptor, self._pid = descriptor, os.getpid()
        own = weakref.ref(self)

        def reopen() -> None:
            lock = own()
            if lock is not None:
                lock._reopen()

        os.register_at_fork(after_in_child=reopen)

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Hold the lock; not again by who holds it already."""
        try:
            self._acquire()
            yield
        finally:
            with contextlib.suppress(OSError, ValueError):
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # does nothing if it was not acquired

    def close(self) -> None:
        """Let go of the file."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            self.close()

    def _acquire(self) -> None:
        if os.getpid() != self._pid:  # it was forked in a way that Python does not know of
            self._reopen()
        deadline, pause = time.monotonic() + self.patience, _FIRST_PAUSE
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise LockTimeoutError(
                        f"another process has held its lock for {self.patience:g} s"
                    ) from None
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            else:
                return

    def _reopen(self) -> None:
        inherited, self._descriptor, self._pid = self._descriptor, -1, os.getpid()
        if inherited >= 0:
            with contextlib.suppress(OSError):  # without a file, acquiring is a fault
                self._descriptor = os.open(f"/proc/self/fd/{inherited}", os.O_RDWR | os.O_CLOEXEC)
            os.close(inherited)
