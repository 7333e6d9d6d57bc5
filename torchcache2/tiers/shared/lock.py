"""`NodeLock`: one process of a job at a time.

It is `flock` on a file, which the system releases when a process is killed. A process that waits for it gives
up in the end, because the holder may have been stopped. A forked child inherits the open file, and with it
the lock of its parent, which would outlive a parent that is killed: so the child opens the file anew at once.
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
    """Another process has held the lock for longer than anybody should, or there are no locks."""


class NodeLock:
    """``with lock(): …``; `LockTimeoutError` if it cannot be had. One thread of a process at a time.

    Parameters
    ----------
    file : Descriptor
        What is locked, a file that this process has opened itself.

    Attributes
    ----------
    patience : float
        Seconds after which trying ends, if there was no progress.
    progress : callable
        A number that changes while the holder does something that takes long.
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
            self._fs.unlock(self._file)  # which does nothing if it was not acquired

    def _acquire(self) -> None:
        if os.getpid() != self._pid:  # it was forked in a way that Python does not know of
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
        with contextlib.suppress(OSError):  # then locking fails, and the parent is not disturbed
            self._file = Descriptor(os.open(f"/proc/self/fd/{inherited.number}", os.O_RDWR | os.O_CLOEXEC))
