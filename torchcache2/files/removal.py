"""Deletes from a cache directory: one process at a time, and unused namespaces first.

To make room, it deletes damaged segments first, then namespaces that no process uses (least recently used
first, and in each the oldest segment first), and then, under ``lru``, the least recently used segments of all
namespaces.

In a folder `mirrored` in a bucket, it deletes nothing that the bucket lacks: in all namespaces, segments with
a head, least recently used first, and then the heads of namespaces that no process uses.

Writers take no lock while there is room. If two find room at the same time, they exceed the budget by one
segment each, and the next writer makes room for both.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator

import numpy as np
from filelock import FileLock

from torchcache2.core.errors import DamagedError, OptionError, UnreadableError
from torchcache2.core.keys import Array, Keys
from torchcache2.files.codec import Codec
from torchcache2.files.directory import FINGERPRINT, CacheDirectory, Contents, is_left_over
from torchcache2.files.filesystem import (
    Descriptor,
    Descriptors,
    FileInfo,
    FileSystem,
    StrangeFileError,
    open_to_lock,
    ulid,
)
from torchcache2.files.layout import HEAD, SEGMENT
from torchcache2.files.segment import Batch, Segment, empty_columns, encode, rows_of, write

_PATIENCE = 10.0  # seconds
_CLAIMS, _BETWEEN_CLAIMS = 3, 0.005  # seconds
_OLD = 24 * 3600.0  # seconds; without locks, older temporary files count as left by dead writers


def deleting(directory: CacheDirectory) -> FileLock:
    """The lock for deleting from a directory; `TimeoutError` after 10 s.

    One lock object per directory and process: in a thread that holds the lock, the garbage collector may
    close another tier, which may need it too.
    """
    return FileLock(directory.lock_path(), timeout=_PATIENCE, is_singleton=True)


@contextlib.contextmanager
def unused_now(directory: CacheDirectory, namespace: str) -> Iterator[bool]:
    """Yields whether no process uses a namespace; then none can begin to before the context ends.

    One without a ``fingerprint.json`` is used by none, but a process may make that file at any time.
    """
    fs, path = directory.fs, os.path.join(directory.path, namespace, FINGERPRINT)
    file: Descriptor | None = None
    try:
        try:
            file = open_to_lock(fs, path)
            is_free = _lock_alone(fs, file) and fs.same(file, path)
        except (FileNotFoundError, StrangeFileError):
            is_free = not fs.is_file(path)  # else another process has just begun to use it
        yield is_free
    finally:
        if file is not None:
            fs.unlock(file)  # explicitly: a child forked meanwhile has the file too


def in_use(directory: CacheDirectory, namespace: str) -> bool | None:
    """Whether a living process uses a namespace; None without locks."""
    path = os.path.join(directory.path, namespace, FINGERPRINT)
    try:
        with unused_now(directory, namespace) as is_free:
            if is_free:
                return False
        return None if directory.fs.lock(open_to_lock(directory.fs, path), exclusive=True) is None else True
    except (FileNotFoundError, StrangeFileError):
        return False
    except OSError:
        return None


def remove_namespace(directory: CacheDirectory, namespace: str, *, force: bool = False) -> bool:
    """Delete the cache's files of a namespace; other files stay, and then the folder, too.

    Deletes all it can before it raises an error of the file system.

    Parameters
    ----------
    directory : CacheDirectory
    namespace : str
        32 hexadecimal digits.
    force : bool
        Whether to delete it even if a process uses it, which must then compute again. Files being written
        stay.

    Returns
    -------
    bool
        False if a process uses it, and nothing was deleted.
    """
    with deleting(directory):
        removal = Removal(directory, math.inf)
        is_free = removal.namespace(directory.contents(namespace), force=force)
        if removal.error is not None:
            raise removal.error
    return is_free


def keep_rows(directory: CacheDirectory, keys: Keys, codec: Codec, library: str) -> int | None:
    """Delete the rows of a namespace that have none of these keys; returns how many.

    None if a process uses the namespace, and nothing was deleted. Of a file that has both, the other rows are
    written anew first, by this version of the `library`. A file that cannot be read whole stays as it is.
    """
    folder, kept, count = directory.folder(keys.namespace), np.unique(keys.words[:, 0]), 0
    with deleting(directory), unused_now(directory, keys.namespace.hex()) as is_free:
        if not is_free:
            return None
        contents = directory.contents(keys.namespace.hex())
        removal = Removal(directory, math.inf)
        for info in [*contents.segments]:
            path = os.path.join(folder, info.name)
            try:
                segment = Segment.open(directory.fs, Descriptors(directory.fs), path, limit=1 << 62)
                assert segment.keys is not None
                # Compared by half of the key: should two keys ever share it, a row more is kept.
                is_kept = np.isin(segment.keys.view("<u8")[:, 0], kept)
                if is_kept.all():
                    continue
                batches = _batches(segment, np.flatnonzero(is_kept)) if is_kept.any() else []
            except (FileNotFoundError, UnreadableError, OptionError):
                continue
            if batches:
                write(directory.fs, folder, ulid() + SEGMENT, encode(batches, codec, library=library))
            removal.file(contents, info)
            count += int((~is_kept).sum())
        for info in contents.index_files if count else ():  # they name files that are gone
            removal.file(contents, info)
        if removal.error is not None:
            raise removal.error
    return count


def _batches(segment: Segment, rows: Array) -> list[Batch]:
    """Some rows of a segment, with their keys; `DamagedError` if one is damaged."""
    assert segment.keys is not None
    batches = []
    for schema, which in segment.schemas(rows):
        some, columns = rows[which], empty_columns(schema, len(which))
        if not segment.read(some, columns, np.arange(len(some))):
            raise DamagedError("a row differs from its checksum")
        keys = Keys(segment.layout.namespace, segment.keys[some])
        batches.append((keys, rows_of(schema, columns, len(some))))
    return batches


def remove_leftovers(directory: CacheDirectory, namespace: str | None = None) -> None:
    """Delete files of dead writers, in one namespace or all, as far as this user may."""
    scanned = directory.scan() if namespace is None else [directory.contents(namespace)]
    found = [(one.namespace, info) for one in scanned for info in one.temporary]
    if namespace is None:
        above = directory.fs.listing(directory.path)
        found += [("", info) for info in above if not info.is_folder and is_left_over(info.name)]
    for folder, info in found:
        path = os.path.join(directory.path, folder, info.name)
        with contextlib.suppress(FileNotFoundError, StrangeFileError, PermissionError):
            locked = directory.fs.lock(open_to_lock(directory.fs, path), exclusive=True)
            if locked or (locked is None and time.time() - info.mtime > _OLD):
                directory.fs.remove(path)


class Removal:
    """Deletes files until enough bytes are freed; needs the lock of `deleting`.

    Parameters
    ----------
    directory : CacheDirectory
    excess : float
        Bytes to free.

    Attributes
    ----------
    excess : float
        Bytes still to free; 0 or less: enough are freed.
    gone : dict of str to list of str
        Names of deleted segments, by namespace (32 hexadecimal digits).
    error : OSError or None
        The first error. A file that cannot be deleted stays, and the others are tried.
    """

    def __init__(self, directory: CacheDirectory, excess: float) -> None:
        self.excess = excess
        self.gone: dict[str, list[str]] = {}
        self.error: OSError | None = None
        self._directory = directory

    def namespace(self, contents: Contents, *, force: bool = False) -> bool:
        """Delete a namespace's files, the oldest segment first; False if it is in use, and not `force`."""
        directory, namespace = self._directory, contents.namespace
        try:
            remove_leftovers(directory, namespace)  # may include a second name of the file locked below
            with unused_now(directory, namespace) as is_free:
                if not is_free and not force:
                    return False
                self.files(contents)
                left = directory.contents(namespace)
                if self.excess <= 0 or left.segments or left.temporary:
                    return True
                for info in left.others if force else contents.others:  # a new one belongs to a new user
                    if info in left.others:
                        self.file(left, info)
                with contextlib.suppress(OSError):  # it has other files
                    directory.fs.remove_folder(os.path.join(directory.path, namespace))
        except OSError as error:
            self.error = self.error or error
        return True

    def files(self, contents: Contents) -> None:
        """Delete a namespace's segments, oldest first, then heads and index files."""
        segments = sorted(contents.segments, key=lambda info: (info.mtime, info.name))
        rest = (
            *contents.asked,
            *contents.corrupt,
            *contents.heads,
            *contents.index_files,
        )
        for info in (*segments, *rest):
            self.file(contents, info)

    def file(self, contents: Contents, info: FileInfo) -> None:
        """Delete one file of a namespace, unless enough bytes are freed."""
        if self.excess <= 0:
            return
        path = os.path.join(self._directory.path, contents.namespace, info.name)
        try:
            self._directory.fs.remove(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            self.error = self.error or error
            return
        self.excess -= info.size
        if info in contents.corrupt:
            contents.corrupt.remove(info)
        if info in contents.segments:
            contents.segments.remove(info)
            self.gone.setdefault(contents.namespace, []).append(info.name)


def _lock_alone(fs: FileSystem, file: Descriptor) -> bool:
    """Lock a file exclusively; False if others have locked it, or there are no locks."""
    for _ in range(_CLAIMS):
        if (locked := fs.lock(file, exclusive=True)) is not False:
            return bool(locked)
        if fs.lock(file, exclusive=False):  # users share it: waiting is futile
            return bool(fs.lock(file, exclusive=True))  # its user may have just released it
        time.sleep(_BETWEEN_CLAIMS)  # another process is checking the same
    return False


Removed = Callable[[str, list[str]], None]


def used_bytes(contents: list[Contents]) -> int:
    """Bytes of all files of a directory."""
    return sum(one.nbytes for one in contents)


def make_room(
    directory: CacheDirectory, needed: int, budget: int, *, lru: bool, mirrored: bool = False
) -> bool:
    """Delete segments until `needed` more bytes fit into the budget; returns whether they do."""
    return room_after(directory, needed, budget, lru=lru, mirrored=mirrored) >= 0


def room_after(
    directory: CacheDirectory,
    needed: int,
    budget: int,
    *,
    lru: bool,
    mirrored: bool = False,
    removed: Removed = lambda *_: None,
) -> int:
    """Delete segments until `needed` more bytes fit into the budget; returns the bytes then left.

    Negative if they do not fit; `OSError` if that is because files could not be deleted, `TimeoutError` if
    another process is deleting. With `lru`, may delete segments of namespaces in use, too; with `mirrored`,
    only segments that a bucket has. Calls ``removed(namespace, names)`` with the names of deleted segments,
    for each namespace (32 hexadecimal digits).
    """
    scanned = directory.scan()
    left = budget - needed - used_bytes(scanned)
    if left >= 0 or needed > budget:
        return left
    with contextlib.ExitStack() as stack:
        lock = deleting(directory)
        try:
            stack.enter_context(lock.acquire(timeout=0))
        except TimeoutError:
            stack.enter_context(lock)
            scanned = directory.scan()  # another process has just made room
            left = budget - needed - used_bytes(scanned)
        removal = Removal(directory, -left)
        try:
            for contents in scanned:
                for info in list(contents.corrupt):
                    removal.file(contents, info)
            if mirrored:
                _delete_mirrored(directory, removal, scanned)
            else:
                _delete(removal, scanned, lru)
            if removal.excess > 0 and removal.error is not None:
                raise removal.error
        finally:
            for namespace, names in removal.gone.items():
                removed(namespace, names)
    return -int(removal.excess)


def _delete(removal: Removal, scanned: list[Contents], lru: bool) -> None:
    """Delete until there is room, or nothing left to delete."""
    for contents in sorted(scanned, key=lambda one: one.last_used):
        if removal.excess > 0:
            removal.namespace(contents)
    if lru:
        for info, contents in _least_recently_used(scanned):
            removal.file(contents, info)


def _delete_mirrored(directory: CacheDirectory, removal: Removal, scanned: list[Contents]) -> None:
    """Like `_delete`, but deletes nothing that the bucket lacks."""
    for info, contents in _least_recently_used(scanned):
        # Check for the head now, not in the scan: if the bucket loses a segment, its head is deleted.
        head = os.path.join(directory.path, contents.namespace, info.name + HEAD)
        if removal.excess > 0 and directory.fs.is_file(head):
            removal.file(contents, info)
    for contents in scanned:
        if removal.excess > 0 and contents.heads and not contents.segments:
            with unused_now(directory, contents.namespace) as is_free:
                for info in contents.heads if is_free and contents.others else []:
                    removal.file(contents, info)


def _least_recently_used(scanned: list[Contents]) -> list[tuple[FileInfo, Contents]]:
    """All segments, least recently used first."""
    pairs = [(info, contents) for contents in scanned for info in contents.segments]
    return sorted(pairs, key=lambda pair: (pair[0].mtime, pair[0].name))
