"""Making room in a cache directory.

Damaged segments go first. Then whole segments of namespaces that no process uses, the namespace that was
not used for longest first; its oldest segment first. Then, under ``lru``, the segments of all namespaces that
were not used for longest.

Only one process deletes at a time, under a file lock. Writers need none: two that find room at once
exceed the budget by their segments, and the next one makes room for both.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from filelock import FileLock

from torchcache2.files.directory import CacheDirectory, Contents
from torchcache2.files.filesystem import Entry

__all__ = ["Allowance", "Removed", "deleting", "make_room", "room_after", "used_bytes"]

Removed = Callable[[str, list[str]], None]
_PATIENCE = 10.0  # seconds
_SHARE = 8  # of what was left when it was looked: so many writers fill the directory and no more


def used_bytes(contents: list[Contents]) -> int:
    """Bytes of all files of a directory."""
    return sum(one.nbytes for one in contents)


def deleting(directory: CacheDirectory) -> FileLock:
    """The lock of whoever deletes from a directory.

    One a process: the garbage collector may close another tier, which makes room, in the thread that has it.
    """
    return FileLock(directory.lock_path(), timeout=_PATIENCE, is_singleton=True)


def make_room(
    directory: CacheDirectory, needed: int, budget: int, *, lru: bool, removed: Removed = lambda *_: None
) -> bool:
    """Delete segments until `needed` more bytes fit into the budget; whether they do.

    Parameters
    ----------
    directory : CacheDirectory
    needed, budget : int
        Bytes.
    lru : bool
        Whether segments of namespaces that are in use may go.
    removed : callable
        Is told a namespace (32 hexadecimal digits), and the names of its segments that are gone.

    Raises
    ------
    TimeoutError
        If another process deletes, and does not end.
    OSError
        As the file system does.
    """
    return room_after(directory, needed, budget, lru=lru, removed=removed) >= 0


def room_after(
    directory: CacheDirectory, needed: int, budget: int, *, lru: bool, removed: Removed = lambda *_: None
) -> int:
    """Likewise; the bytes that are left after `needed` more, negative if those do not fit."""
    left = budget - needed - used_bytes(directory.scan())
    if left >= 0 or needed > budget:
        return left
    with deleting(directory):
        room = _Room(directory, needed, budget)
        try:
            return room.make(lru)
        finally:
            for namespace, names in room.gone.items():
                removed(namespace, names)


class Allowance:
    """Bytes that one process may write without a look at the directory; see `room_after`.

    A look at thousands of files takes longer than writing a small one. Several writers that do not see each
    other exceed the budget by what each may write, which is no more than one segment.

    Parameters
    ----------
    most : int
        Bytes of a segment.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._left = 0

    def take(self, size: int) -> bool:
        """Whether so many bytes may be written without a look; they count from now on."""
        if size > self._left:
            self._left = 0
            return False
        self._left -= size
        return True

    def looked(self, room: int, size: int) -> None:
        """There is so much room after `size` bytes that are about to be written."""
        self._left = min(self._most - size, room // _SHARE)


class _Room:
    """One round of deletions. What cannot be deleted stays; the first error is raised in the end."""

    def __init__(self, directory: CacheDirectory, needed: int, budget: int) -> None:
        self.gone: dict[str, list[str]] = {}
        self._directory = directory
        self._contents = directory.scan()
        self._excess = used_bytes(self._contents) + needed - budget
        self._error: OSError | None = None

    def make(self, lru: bool) -> int:
        """Delete until there is room; how much there is then."""
        for contents in self._contents:
            for entry in contents.corrupt:
                self._remove(contents, entry)
        for contents in sorted(self._contents, key=lambda one: one.last_used):
            if self._excess > 0:
                self._remove_unused(contents)
        if lru:
            pairs = [(entry, contents) for contents in self._contents for entry in contents.segments]
            for entry, contents in sorted(pairs, key=lambda pair: (pair[0].mtime, pair[0].name)):
                self._remove(contents, entry)
        if self._excess > 0 and self._error is not None:
            raise self._error
        return -self._excess

    def _remove_unused(self, contents: Contents) -> None:
        try:
            with self._directory.claimed(contents.namespace) as claimed:
                if claimed or (claimed is None and not contents.others):  # else somebody has just deleted it
                    self._remove_all(contents, is_claimed=bool(claimed))
        except OSError as error:
            self._error = self._error or error

    def _remove_all(self, contents: Contents, *, is_claimed: bool) -> None:
        for entry in sorted(contents.segments, key=lambda entry: (entry.mtime, entry.name)):
            self._remove(contents, entry)
        left = self._directory.contents(contents.namespace)
        if not left.segments and not left.temporary and self._excess > 0:
            # Without a claim somebody may be about to use the folder: what has appeared since is theirs.
            for entry in left.others if is_claimed else []:
                self._remove(contents, entry)
            with contextlib.suppress(OSError):  # somebody else's files are there
                self._directory.fs.remove_folder(os.path.join(self._directory.path, contents.namespace))

    def _remove(self, contents: Contents, entry: Entry) -> None:
        if self._excess <= 0:
            return
        path = os.path.join(self._directory.path, contents.namespace, entry.name)
        try:
            self._directory.fs.remove(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._error = self._error or error
            return
        self._excess -= entry.size
        if entry in contents.segments:
            contents.segments.remove(entry)
            self.gone.setdefault(contents.namespace, []).append(entry.name)
