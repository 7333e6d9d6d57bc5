"""`FileSystem`: every system call of the cache about files.

It is passed as an argument, so that tests can make each call fail, and lose bytes that were not synced.
`Descriptors` are a tier's open files. `write_whole` writes a file that appears whole or not at all.

The cache opens at most a quarter of the files that a process may open: half of these for segments, half for
holds. A hold is an open and locked ``fingerprint.json``, which shows other processes that the namespace is in
use. If there are too many, the least recently used are closed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
import stat
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

from torchcache2.core.errors import DamagedError
from torchcache2.core.process import ProcessLock

try:
    import fcntl
    import resource
except ImportError:
    raise ImportError("torchcache2 runs on Linux and other POSIX systems, not on Windows") from None

_SHARE = 8  # of the process's limit: 1/8 for segments, 1/8 for holds
_LEAST, _MOST = 4, 512


class Descriptor:
    """An open file, closed with its last reference: reading threads keep it open."""

    __slots__ = ("_close", "number")

    def __init__(self, number: int) -> None:
        self._close: Callable[[int], None] = os.close
        self.number = number

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the file now, even if it is still referenced."""
        close, self._close = self._close, _nothing
        try:  # noqa: SIM105  # no global name, as the interpreter may be ending
            close(self.number)
        except OSError:
            pass


def _nothing(number: int) -> None:
    pass


def most_open() -> int:
    """How many segments, and how many holds, may be open now: a process's limit may change."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST if limit < 0 else max(_LEAST, min(_MOST, limit // _SHARE))


_Files = OrderedDict[tuple[object, str], Descriptor]  # by owner and path, the least recently used first


class Descriptors:
    """The open files of one tier, by path."""

    # Shared by all tiers, as the process has one limit; includes files inherited from a parent, as they are
    # open too. The garbage collector may change these at any time.
    _lock = ProcessLock(threading.RLock)
    _segments: ClassVar[_Files] = OrderedDict()
    _holds: ClassVar[_Files] = OrderedDict()

    def __init__(self, fs: FileSystem) -> None:
        self._fs = fs
        self._owner = object()
        self._forgotten = 0
        weakref.finalize(self, Descriptors._clear, self._owner).atexit = False

    @classmethod
    def spare(cls) -> bool:
        """Close all segments or, if none is open, all holds; returns whether there were any."""
        with cls._lock():
            files = cls._segments or cls._holds
            had_some = bool(files)
            files.clear()
        return had_some

    @classmethod
    def _clear(cls, owner: object) -> None:
        """Close the files of one owner."""
        with cls._lock():
            for files in (cls._segments, cls._holds):
                for key in [key for key in list(files) if key[0] is owner]:
                    files.pop(key, None)

    def _put(self, files: _Files, path: str, file: Descriptor) -> None:
        """Keep a file open; if too many are, close the least recently used ones."""
        most = most_open()
        with self._lock(), contextlib.suppress(KeyError):
            files[self._owner, path] = file
            for some in (self._segments, self._holds):
                while len(some) > most:
                    some.popitem(last=False)

    def get(self, path: str) -> Descriptor:
        """The file, open for reading, and just used; it stays open as long as it is referenced."""
        key = self._owner, path
        with self._lock():
            try:
                file = self._segments[key]
                self._segments.move_to_end(key)
                return file
            except KeyError:  # `suppress` would take longer than the rest
                pass
        before = self._forgotten
        file = self._fs.open(path)
        with self._lock():
            if self._forgotten == before:  # else the file may have been deleted since
                self._put(self._segments, path, file)
        return file

    def forget(self, path: str) -> None:
        """Close a file once no thread reads it any more."""
        with self._lock():
            self._forgotten += 1
            self._segments.pop((self._owner, path), None)

    def clear(self) -> None:
        """Close all."""
        with self._lock():
            self._forgotten += 1
            self._clear(self._owner)

    def may_hold(self) -> bool:
        """Whether a file can be held without closing another hold."""
        return len(self._holds) < most_open()

    def hold(self, path: str, file: Descriptor) -> None:
        """Keep a file open until `let_go`, or until too many are."""
        self._put(self._holds, path, file)

    def held(self, path: str) -> Descriptor | None:
        """The held file of this path, if any."""
        return self._holds.get((self._owner, path))

    def let_go(self, path: str) -> None:
        """No longer hold a file."""
        self._holds.pop((self._owner, path), None)


_MOST_BUFFERS = 1024  # per call: Linux's IOV_MAX
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_TOO_MANY_OPEN = (errno.EMFILE, errno.ENFILE)
# Non-blocking: opening a pipe without a writer, or a terminal, could wait forever.
_OPENING = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])


class StrangeFileError(OSError):
    """Something else than a regular file, or a link to one, has a file's name."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.EINVAL, "is not a regular file", path)


class FileInfo(NamedTuple):
    """The system's facts about a name in a folder."""

    name: str
    is_folder: bool
    size: int
    mtime: float


def is_read_only(error: OSError) -> bool:
    """Whether an error says that nothing can be written here."""
    return error.errno in _READ_ONLY


def _gone(method: Method) -> Method:
    """Have a method raise `FileNotFoundError` for a file that another machine has deleted from NFS."""

    @functools.wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        try:
            return method(*args, **options)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            raise FileNotFoundError(*error.args) from None

    return cast(Method, call)


class FileSystem:
    """The file system of the operating system. All methods raise `OSError` as it does.

    Attributes
    ----------
    is_remote : bool
        Whether files may have to be fetched; see `is_away`.
    """

    is_remote = False

    def is_away(self, file: Descriptor) -> bool:
        """Whether bytes of a file may have to be fetched over a network.

        If so, call `will_need` for all ranges of a batch before the first read.
        """
        return False

    def has_elsewhere(self, path: str) -> bool:
        """Whether a copy elsewhere can replace a file that is damaged or missing."""
        return False

    def fetch_again(self, path: str) -> bool:
        """Discard a damaged file, to fetch it again; False if there is no copy, or this happened before."""
        return False

    def open(self, path: str) -> Descriptor:
        """Open a regular file for reading; never waits.

        `StrangeFileError` if it is a folder, a pipe, a device, or a link that leads to no file.
        """
        return self._opened(path, os.O_RDONLY)

    def edit(self, path: str) -> Descriptor:
        """Open a regular file for reading and writing; see `open`."""
        return self._opened(path, os.O_RDWR)

    def _opened(self, path: str, mode: int) -> Descriptor:
        try:
            # Check first, as opening a device may have effects.
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
            file = _opened(lambda: Descriptor(os.open(path, _OPENING | mode)))
            if stat.S_ISREG(os.fstat(file.number).st_mode):
                return file
        raise StrangeFileError(path)

    def create(self, path: str) -> Descriptor:
        """Create a file for writing, with the umask's permissions; it must not exist."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return _opened(lambda: Descriptor(os.open(path, flags, 0o666)))

    def append(self, path: str, data: bytes) -> None:
        """Add a few bytes to the end of a file, in one call; makes the file if there is none."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | _OPENING
        file = _opened(lambda: Descriptor(os.open(path, flags, 0o666)))
        os.write(file.number, data)

    @_gone
    def _status(self, file: Descriptor) -> os.stat_result:
        return os.fstat(file.number)

    def size(self, file: Descriptor) -> int:
        """Bytes of an open file."""
        return self._status(file).st_size

    def links(self, file: Descriptor) -> int:
        """Names of an open file; 0 if it has been deleted."""
        try:
            return self._status(file).st_nlink
        except FileNotFoundError:
            return 0

    def same(self, file: Descriptor, path: str) -> bool:
        """Whether a path still names an open file."""
        try:
            # Without `st_nlink`, NFS might compare with what the path named some seconds ago.
            opened = self._status(file)
            return opened.st_nlink > 0 and os.path.samestat(opened, os.stat(path))
        except FileNotFoundError:
            return False

    def read(self, file: Descriptor, buffers: Sequence[Any], offset: int) -> int:
        """Read into writable buffers, one after another; may read less."""
        try:
            return os.preadv(file.number, buffers, offset)
        except OSError as error:  # here, as `_gone` costs as much as the call for a small row
            if error.errno != errno.ESTALE:
                raise
            raise FileNotFoundError(*error.args) from None

    @_gone
    def write(self, file: Descriptor, buffers: Sequence[Any], offset: int) -> int:
        """Write buffers, one after another; may write less."""
        return os.pwritev(file.number, buffers, offset)

    def will_need(self, file: Descriptor, offset: int, size: int) -> None:
        """Read a range ahead."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.number, offset, size, os.POSIX_FADV_WILLNEED)

    @_gone
    def sync(self, file: Descriptor) -> None:
        """Return once the file's bytes are on disk."""
        os.fsync(file.number)

    def sync_folder(self, path: str) -> None:
        """Return once the names in a folder are on disk."""
        file = _opened(lambda: Descriptor(os.open(path, _OPENING | os.O_DIRECTORY)))
        try:
            os.fsync(file.number)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # the file system cannot sync folders
                raise

    @_gone
    def lock(self, file: Descriptor, *, exclusive: bool) -> bool | None:
        """Lock an open file until it is closed, or the process ends, however it does.

        For an exclusive lock, open it by `open_to_lock`. False if another process has locked it; None if the
        file system has no locks. `PermissionError` if NFS or SMB has none for a file opened for reading.
        """
        try:
            fcntl.flock(file.number, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # the second on SMB
            return False
        except OSError as error:
            if error.errno == errno.EBADF and exclusive:
                raise PermissionError(
                    errno.EACCES, "it may not be written, so NFS does not lock it"
                ) from None
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
                raise
            return None
        return True

    def unlock(self, file: Descriptor) -> None:
        """Release a lock at once, even if a forked child has the file open too."""
        with contextlib.suppress(OSError):
            fcntl.flock(file.number, fcntl.LOCK_UN)

    def rename(self, old: str, new: str) -> None:
        """Rename a file, replacing one of the new name."""
        os.rename(old, new)

    def link(self, old: str, new: str) -> None:
        """Give a file one more name, which must be free."""
        try:
            os.link(old, new)
        except (FileExistsError, FileNotFoundError):
            raise
        except OSError:  # the file system has no hard links
            # Renaming replaces this empty file of ours, and never a file that another process has just made.
            self.create(new)
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
        """Whether anything has this name, even a dangling link."""
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
        """When a name was last added to or removed from a folder, in nanoseconds."""
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
            size = sum(map(len, some))
            done = self.read(file, some, offset)
            while done < size:
                rest = _after(some, done)
                more = self.read(file, rest, offset + done)
                if more == 0:
                    raise DamagedError(f"nothing at byte {offset + done}")
                done += more
            offset += size

    def write_all(self, file: Descriptor, buffers: Sequence[memoryview], offset: int) -> int:
        """Write buffers to one range of a file; returns the offset after it."""
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


def open_to_lock(fs: FileSystem, path: str) -> Descriptor:
    """Open a file to lock it exclusively: for writing, as NFS and SMB require, if we may."""
    try:
        return fs.edit(path)
    except OSError as error:
        if not is_read_only(error):
            raise
        return fs.open(path)


def _opened(make: Callable[[], T]) -> T:
    """Open a file by `make`; at the process's limit of open files, first close those that we can spare."""
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


_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


def ulid() -> str:
    """A name of 26 characters that no other writer uses and that sorts by time.

    As in the ULID specification (github.com/ulid/spec): 48 bits of milliseconds, then 80 random ones. Of
    these, the first 20 are the nanoseconds in the millisecond, so that names of one process sort by time.
    """
    milliseconds, nanoseconds = divmod(time.time_ns(), 1_000_000)
    number = (milliseconds & (2**48 - 1)) << 80 | nanoseconds << 60 | secrets.randbits(60)
    return "".join(_ALPHABET[number >> shift & 31] for shift in range(125, -1, -5))


def made_at(name: str) -> int:
    """The time of the `ulid` at the start of a name, in milliseconds since 1970."""
    number = 0
    for letter in name[:10]:
        number = number << 5 | _ALPHABET.index(letter)
    return number


def write_whole(
    fs: FileSystem,
    path: str,
    content: Sequence[memoryview] | Callable[[Descriptor], object],
    *,
    stem: str,
    suffix: str = "",
    replaces: bool = True,
    sync: bool = True,
    sync_name: bool = True,
) -> None:
    """Write a file that appears whole or not at all, even if the process is killed or the power fails.

    `content` is bytes, or a function that writes them to the open file; if it raises, no file appears. The
    temporary path is `stem`, a fresh `ulid` and `suffix`, in the folder of `path`. The temporary file is
    locked until it has its final name, so that processes that delete dead writers' files see that this
    writer lives.

    Replaces an existing file; without `replaces`, raises `FileExistsError` instead. With `sync_name`, the
    name is on disk, too, on return. Without `sync`, a power cut may leave garbage.
    """
    temporary, is_renamed = "", False
    try:
        while True:
            temporary = f"{stem}{ulid()}{suffix}"
            file = fs.create(temporary)
            with contextlib.suppress(FileNotFoundError):  # deleted by another machine, on NFS
                if fs.lock(file, exclusive=True) is not False and fs.links(file):
                    break  # otherwise another process has deleted it before it was locked
        if callable(content):
            content(file)
        else:
            fs.write_all(file, content, 0)
        if sync:
            fs.sync(file)
        if replaces:
            fs.rename(temporary, path)
            is_renamed = True
        else:
            fs.link(temporary, path)
        fs.unlock(file)  # users of the namespace lock this file if it is a fingerprint
    finally:
        if temporary and not is_renamed:  # after an interrupt there may be no name yet
            with contextlib.suppress(OSError):
                fs.remove(temporary)
    if sync_name:
        fs.sync_folder(os.path.dirname(path))
