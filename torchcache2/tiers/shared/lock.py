"""`NodeLock`: one process of a job at a time.

It is a `flock` on a file, which the system releases when a process is killed. Waiting ends after a while,
because the holder may be stopped. A forked child inherits the open file, and with it the parent's lock, which
would then outlive a killed parent: so the child opens the file anew at once.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable, Iterator

from torchcache2.files.filesystem import Descriptor, FileSystem

_NONE = (1 << 31) - 1  # a number that no open file has
_FIRST_PAUSE, _LONGEST_PAUSE = 50e-6, 2e-3  # seconds


class LockTimeoutError(Exception):
    """Another process has held the lock for too long, or the system has no locks."""


class NodeLock:
    """``with lock(): …``; `LockTimeoutError` after a long wait. One thread of a process at a time.

    Parameters
    ----------
    file : Descriptor
        The file to lock, opened by this process itself.

    Attributes
    ----------
    patience : float
        Seconds to wait without progress of the holder.
    progress : callable
        Returns a number that the holder increments during long work.
    """

    def __init__(self, file: Descriptor) -> None:
        self.patience = 10.0
        self.progress: Callable[[], int] = int
        self._file, self._pid, self._fs = file, os.getpid(), FileSystem()
        own = weakref.ref(self)

        def reopen() -> None:
            lock = own()
            if lock is not None:
                lock._reopen()

        os.register_at_fork(after_in_child=reopen)

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Hold the lock; a holder must not ask for it again."""
        try:
            self._acquire()
            yield
        finally:
            self._fs.unlock(self._file)  # does nothing if not acquired

    def _acquire(self) -> None:
        if os.getpid() != self._pid:  # forked without Python's fork hooks
            self._reopen()
        deadline, pause, seen = time.monotonic() + self.patience, _FIRST_PAUSE, self.progress()
        while not self._fs.lock(self._file, exclusive=True):
            if time.monotonic() > deadline:
                if self.progress() == seen:
                    raise LockTimeoutError(f"the lock of the ranks was not free for {self.patience:g} s")
                deadline, seen = time.monotonic() + self.patience, self.progress()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _reopen(self) -> None:
        inherited, self._file, self._pid = self._file, Descriptor(_NONE), os.getpid()
        with contextlib.suppress(OSError):  # then locking fails, but the parent's lock stays untouched
            self._file = Descriptor(os.open(f"/proc/self/fd/{inherited.number}", os.O_RDWR | os.O_CLOEXEC))
