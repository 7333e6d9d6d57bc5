"""`MirrorLock`: of the processes that share a local folder, one mirrors it.

It is `flock` on a file of the folder, which the system releases when a process ends, however it ends. A
forked child inherits the open file, and would keep the lock of a parent that has ended: so it closes the file
at once. While the holder uploads, or what it downloads grows, it touches the file from time to time, and
others see that they can wait.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref

from torchcache2.files.directory import MIRROR, CacheDirectory
from torchcache2.files.filesystem import Descriptor


class MirrorLock:
    """The lock of one folder; it belongs to the process that has made it, and to one thread there."""

    def __init__(self, directory: CacheDirectory) -> None:
        self._fs = directory.fs
        self._path = os.path.join(directory.path, MIRROR)
        self._file: Descriptor | None = None
        self._holds = False
        opening = self._opening = threading.Lock()  # nobody forks while a file is open that is not noted yet
        own = weakref.ref(self)

        def let_go() -> None:
            opening.release()
            lock = own()
            if lock is not None:
                lock._close()

        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=opening.acquire, after_in_parent=opening.release, after_in_child=let_go
            )

    def take(self) -> bool | None:
        """Whether this process is the one that mirrors from now on; None if nothing can be locked there."""
        try:
            if self._file is not None and not self._fs.same(self._file, self._path):
                self.release()  # somebody has deleted it: others would lock another file
            if not self._holds:
                file = self._open()
                # Where there are no locks, every process mirrors: they write the same bytes.
                self._holds = self._fs.lock(file, exclusive=True) is not False
        except OSError:
            self.release()
            return None
        return self._holds

    def beat(self) -> None:
        """Show others that what the bucket or the folder lacks is on its way."""
        with contextlib.suppress(OSError):
            self._fs.touch(self._path)

    def last_beat(self) -> int:
        """A number that changes with each beat of whoever mirrors."""
        try:
            return self._fs.changed(self._path)
        except OSError:
            return 0

    def release(self) -> None:
        """Let another process mirror."""
        if self._file is not None:
            self._fs.unlock(self._file)
        self._close()

    def _open(self) -> Descriptor:
        file = self._file
        if file is None:
            # This does not wait for the lock: the garbage collector may call it in a thread that is about to
            # fork and so has the lock itself, which would wait for ever.
            if not self._opening.acquire(blocking=False):
                raise BlockingIOError("the process is forking")
            try:
                try:
                    file = self._fs.create(self._path)
                except FileExistsError:
                    file = self._fs.open(self._path)
                self._file = file
            finally:
                self._opening.release()
        return file

    def _close(self) -> None:
        """Close the file, although a thread that a forked child does not have may refer to it."""
        file, self._file, self._holds = self._file, None, False
        if file is not None:
            file.close()
