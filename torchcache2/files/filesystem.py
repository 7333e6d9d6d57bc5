"""`FileSystem`: every call that the cache makes to the operating system about files.

It is passed as an argument, so that tests can make each call fail, and lose bytes that were not synced.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from torchcache2.files.descriptors import Descriptor, Descriptors
from torchcache2.files.errors import DamagedError

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]


_MOST_BUFFERS = 1024  # one call takes so many: IOV_MAX of Linux
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_TOO_MANY_OPEN = (errno.EMFILE, errno.ENFILE)
# Opening never waits: a pipe without a writer, or a terminal, would never answer.
_READING = (
    os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
)
T = TypeVar("T")


class StrangeFileError(OSError):
    """Something that is no regular file, nor a link to one, has the name of a file."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.EINVAL, "is not a regular file", path)


class FileInfo(NamedTuple):
    """What the system says of a name in a folder."""

    name: str
    is_folder: bool
    size: int
    mtime: float


def is_read_only(error: OSError) -> bool:
    """Whether an error says that nothing can be written here."""
    return error.errno in _READ_ONLY


class FileSystem:
    """The file system of the operating system. All methods raise `OSError` as it does."""

    def open(self, path: str) -> Descriptor:
        """Open a regular file for reading; never waits.

        `StrangeFileError` if it is a folder, a pipe, a device, or a link that leads to no file.
        """
        try:
            # This is asked first, as to open a device may have an effect.
            is_regular = stat.S_ISREG(os.stat(path).st_mode)
        except FileNotFoundError:
            if os.path.islink(path):
                raise StrangeFileError(path) from None
            raise
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise StrangeFileError(path) from None
            raise
        if is_regular:
            file = _opened(lambda: Descriptor(os.open(path, _READING)))
            if stat.S_ISREG(os.fstat(file.number).st_mode):
                return file
        raise StrangeFileError(path)

    def create(self, path: str) -> Descriptor:
        """Open a new file for writing, with the rights that the umask leaves; it must not exist."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
        return _opened(lambda: Descriptor(os.open(path, flags, 0o666)))

    def edit(self, path: str) -> Descriptor:
        """Open a file that exists for reading and writing."""
        return _opened(lambda: Descriptor(os.open(path, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))))

    def size(self, file: Descriptor) -> int:
        """Bytes of an open file."""
        return os.fstat(file.number).st_size

    def links(self, file: Descriptor) -> int:
        """Names of an open file; 0 if it has been deleted."""
        return os.fstat(file.number).st_nlink

    def same(self, file: Descriptor, path: str) -> bool:
        """Whether a path still names an open file."""
        try:
            return os.path.samestat(os.fstat(file.number), os.stat(path))
        except FileNotFoundError:
            return False

    def read(self, file: Descriptor, buffers: Sequence[Any], offset: int) -> int:
        """Read into writable buffers, one after another; may read less."""
        return os.preadv(file.number, buffers, offset)

    def write(self, file: Descriptor, buffers: Sequence[Any], offset: int) -> int:
        """Write buffers, one after another; may write less."""
        return os.pwritev(file.number, buffers, offset)

    def will_need(self, file: Descriptor, offset: int, size: int) -> None:
        """Have a range read ahead."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.number, offset, size, os.POSIX_FADV_WILLNEED)

    def sync(self, file: Descriptor) -> None:
        """Return when the file's bytes are on the disk."""
        os.fsync(file.number)

    def sync_folder(self, path: str) -> None:
        """Return when the names in a folder are on the disk."""
        file = _opened(lambda: Descriptor(os.open(path, _READING | getattr(os, "O_DIRECTORY", 0))))
        try:
            os.fsync(file.number)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # the file system cannot sync folders
                raise

    def lock(self, file: Descriptor, *, exclusive: bool) -> bool | None:
        """Lock an open file until it is closed, or the process ends in whatever way.

        False if another one has it locked; None if the file system has no locks.
        """
        if fcntl is None:
            return None
        try:
            fcntl.flock(file.number, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
                raise
            return None
        return True

    def unlock(self, file: Descriptor) -> None:
        """Let go of a lock at once, though a forked child may have the file open too."""
        if fcntl is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(file.number, fcntl.LOCK_UN)

    def rename(self, old: str, new: str) -> None:
        """Rename a file; a file that had the new name is replaced."""
        os.rename(old, new)

    def link(self, old: str, new: str) -> None:
        """Give a file one more name, which must be free."""
        try:
            os.link(old, new)
        except FileExistsError:
            raise
        except OSError:  # the file system has no hard links
            if os.path.lexists(new):
                raise FileExistsError(new) from None
            os.rename(old, new)

    def remove(self, path: str) -> None:
        """Delete a file."""
        os.unlink(path)

    def make_folder(self, path: str) -> None:
        """Make a folder and those above it; it may exist."""
        os.makedirs(path, exist_ok=True)

    def remove_folder(self, path: str) -> None:
        """Delete an empty folder."""
        os.rmdir(path)

    def exists(self, path: str) -> bool:
        """Whether there is anything of this name, even a link that leads nowhere."""
        return os.path.lexists(path)

    def is_file(self, path: str) -> bool:
        """Whether a path is a regular file itself, and not a link to one."""
        try:
            return stat.S_ISREG(os.lstat(path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def touch(self, path: str) -> None:
        """Set a file's time of modification to now."""
        os.utime(path)

    def changed(self, path: str) -> int:
        """When a name was last added to a folder or removed, in nanoseconds."""
        return os.stat(path).st_mtime_ns

    def listing(self, path: str) -> list[FileInfo]:
        """The files and folders in a folder, in order; symbolic links are left out."""
        found = []
        with _opened(lambda: os.scandir(path)) as names:
            for name in names:
                try:
                    status = name.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                kind = stat.S_IFMT(status.st_mode)
                if kind in (stat.S_IFREG, stat.S_IFDIR):
                    found.append(FileInfo(name.name, kind == stat.S_IFDIR, status.st_size, status.st_mtime))
        return sorted(found)

    def read_file(self, path: str, limit: int) -> bytes:
        """The bytes of a small file; `DamagedError` if it has more than `limit`."""
        file = self.open(path)
        size = self.size(file)
        if size > limit:
            raise DamagedError(f"{path} has {size} bytes, expected at most {limit}")
        return self.read_bytes(file, 0, size)

    def read_bytes(self, file: Descriptor, offset: int, size: int) -> bytes:
        """Read one range of a file; see `read_all`."""
        data = bytearray(size)
        self.read_all(file, [memoryview(data)], offset)
        return bytes(data)

    def read_all(self, file: Descriptor, buffers: Sequence[memoryview], offset: int) -> None:
        """Fill buffers from one range of a file; `DamagedError` if the file ends before."""
        for first in range(0, len(buffers), _MOST_BUFFERS):
            some = buffers[first : first + _MOST_BUFFERS]
            size = sum(len(buffer) for buffer in some)
            done = self.read(file, some, offset)
            while done < size:
                rest = _after(some, done)
                more = self.read(file, rest, offset + done)
                if more == 0:
                    raise DamagedError(f"nothing at byte {offset + done}")
                done += more
            offset += size

    def write_all(self, file: Descriptor, buffers: Sequence[memoryview], offset: int) -> int:
        """Write buffers to one range of a file; the offset behind it."""
        for first in range(0, len(buffers), _MOST_BUFFERS):
            some = [buffer for buffer in buffers[first : first + _MOST_BUFFERS] if len(buffer)]
            size = sum(len(buffer) for buffer in some)
            done = 0
            while done < size:
                more = self.write(file, _after(some, done), offset + done)
                if more == 0:
                    raise OSError(errno.EIO, "nothing was written")
                done += more
            offset += size
        return offset


def _opened(make: Callable[[], T]) -> T:
    """What `make` opens. If the process may open no more files, those that the cache can spare are closed."""
    try:
        return make()
    except OSError as error:
        if error.errno not in _TOO_MANY_OPEN or not Descriptors.spare():
            raise
    return make()


def _after(buffers: Sequence[memoryview], skip: int) -> list[memoryview]:
    rest = []
    for buffer in buffers:
        if skip >= len(buffer):
            skip -= len(buffer)
        else:
            rest.append(buffer[skip:])
            skip = 0
    return rest
