"""A file system that does what Linux does on NFSv4, beneath any other that a test makes fail.

As `flock(2)` says, a lock is one of byte ranges, so that an exclusive one needs a file that is open for
writing. A file that another machine has deleted is stale to those who have it open here. Attributes and
listings are some seconds old, but for what this machine has changed itself. Unlike on NFS, there are no hard
links either.
"""

import contextlib
import errno
import fcntl
import os
import threading
import time
from unittest import mock

from torchcache2.files.filesystem import Descriptor, FileSystem


class _Handle(Descriptor):
    """An open file whose number no system call gets that NFS would refuse."""

    __slots__ = ("_machine", "_number", "asks")

    def __init__(self, number, machine):
        self._machine, self._number, self.asks = machine, number, None
        self._close = os.close

    @property
    def number(self):
        if (
            self.asks == fcntl.LOCK_EX
            and fcntl.fcntl(self._number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        ):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        status = os.fstat(self._number)
        if status.st_nlink == 0 and (status.st_dev, status.st_ino) not in self._machine.deleted:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return self._number

    def close(self):
        close, self._close = self._close, _nothing
        with contextlib.suppress(OSError):
            close(self._number)


class Machine:
    """What one machine remembers: the files that it has deleted, and for `age` seconds what it has seen."""

    def __init__(self, age=0.0):
        self.age = age
        self.deleted = set()
        self.seen = {}
        self.lock = threading.RLock()

    def looked(self, what, path, look):
        """What was last seen, or else what is there, as a result or an error."""
        with self.lock:
            until, result, error = self.seen.get((what, path), (0.0, None, None))
            if time.monotonic() >= until:
                result = error = None
                try:
                    result = look()
                except FileNotFoundError as raised:
                    error = raised.errno
                self.seen[what, path] = time.monotonic() + self.age, result, error
        if error is not None:
            raise FileNotFoundError(error, os.strerror(error), path)
        return result

    def changes(self, *paths):
        """Forget what was seen of some paths, and of the folders that they are in."""
        with self.lock:
            gone = {os.path.abspath(path) for path in paths} | {
                os.path.dirname(os.path.abspath(path)) for path in paths
            }
            self.seen = {key: seen for key, seen in self.seen.items() if os.path.abspath(key[1]) not in gone}

    def deletes(self, path):
        """Remember that a file was deleted here: whoever has it open here can still read it."""
        self.changes(path)
        with contextlib.suppress(OSError):
            status = os.lstat(path)
            self.deleted.add((status.st_dev, status.st_ino))


def _nothing(number):
    pass


def _refused(old, new):
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), new)


HERE = Machine(3.0)


class Nfs(FileSystem):
    """A folder on NFS, as all processes of one machine see it."""

    machine = HERE

    def _handle(self, file):
        file._close = _nothing
        return _Handle(file.number, self.machine)

    def open(self, path):
        try:
            return self._handle(super().open(path))
        except FileNotFoundError:
            self.machine.changes(path)  # opening asks the server
            raise

    def edit(self, path):
        return self._handle(super().edit(path))

    def create(self, path):
        self.machine.changes(path)
        file = self._handle(super().create(path))
        status = os.fstat(file.number)
        self.machine.deleted.discard((status.st_dev, status.st_ino))  # a new file may have an old number
        self.machine.changes(path)
        return file

    def lock(self, file, *, exclusive):
        file.asks = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        try:
            return super().lock(file, exclusive=exclusive)
        finally:
            file.asks = None

    def write(self, file, buffers, offset):
        count = super().write(file, buffers, offset)
        self.machine.changes(os.readlink(f"/proc/self/fd/{file.number}"))
        return count

    def rename(self, old, new):
        self.machine.deletes(new)
        super().rename(old, new)
        self.machine.changes(old, new)

    def link(self, old, new):
        self.machine.changes(old, new)
        try:
            with self.machine.lock, mock.patch("os.link", _refused):
                super().link(old, new)
        finally:
            self.machine.changes(old, new)

    def remove(self, path):
        self.machine.deletes(path)
        try:
            super().remove(path)
        finally:
            self.machine.changes(path)

    def make_folder(self, path):
        super().make_folder(path)
        with self.machine.lock:
            self.machine.seen.clear()  # the folders above it, too

    def remove_folder(self, path):
        super().remove_folder(path)
        self.machine.changes(path)

    def touch(self, path):
        super().touch(path)
        self.machine.changes(path)

    def exists(self, path):
        return self.machine.looked("exists", path, lambda: super(Nfs, self).exists(path))

    def is_file(self, path):
        return self.machine.looked("is_file", path, lambda: super(Nfs, self).is_file(path))

    def changed(self, path):
        return self.machine.looked("folder", path, lambda: self._folder(path))[0]

    def listing(self, path):
        return list(self.machine.looked("folder", path, lambda: self._folder(path))[1])

    def _folder(self, path):
        """The time first, as a change after it then shows later."""
        changed = super().changed(path)
        return changed, super().listing(path) if os.path.isdir(path) else []
