"""Makes room in a cache directory.

Damaged segments are deleted first. Then come namespaces that no process uses, beginning with the one that was
not used for longest, and in each of them the oldest segment. Then, under ``lru``, come the segments of all
namespaces that were not used for longest.

In a folder that is `mirrored` in a bucket, nothing goes that the bucket lacks: of all namespaces, those
segments go that are not whole, then those that have a head, the least recently used one first, and then the
heads of namespaces that no process uses.

Writers take no lock as long as there is room. If two find room at the same time, they exceed the budget by
their segments, and the next writer makes room for both.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from torchcache2.files.directory import CacheDirectory
from torchcache2.files.filenames import HEAD, Contents
from torchcache2.files.filesystem import FileInfo
from torchcache2.files.removal import Removal, claimed, deleting

Removed = Callable[[str, list[str]], None]
_SHARE = 8  # a writer fills at most an eighth of the room that it has found, as others write too


def used_bytes(contents: list[Contents]) -> int:
    """Bytes of all files of a directory."""
    return sum(one.nbytes for one in contents)


def make_room(directory: CacheDirectory, needed: int, budget: int, *, lru: bool) -> bool:
    """Delete segments until `needed` more bytes fit into the budget; whether they do. See `room_after`."""
    return room_after(directory, needed, budget, lru=lru) >= 0


def room_after(
    directory: CacheDirectory,
    needed: int,
    budget: int,
    *,
    lru: bool,
    mirrored: bool = False,
    removed: Removed = lambda *_: None,
) -> int:
    """Delete segments until `needed` more bytes fit into the budget; the bytes that are then left.

    The result is negative if `needed` bytes do not fit; `OSError` if that is because something could not be
    deleted, and `TimeoutError` if another process is deleting. With `lru`, segments of namespaces in use may
    be deleted too; with `mirrored`, all that a bucket has, and no others. ``removed(namespace, names)`` is
    called for each namespace (32 hexadecimal digits) with the names of the segments that are gone.
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


class Allowance:
    """Bytes that one process may write before it scans the directory again; see `room_after`.

    To scan thousands of files takes longer than to write a small one. Writers do not see each other, so each
    may exceed the budget by what it may write: at most the `most` bytes of a segment.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._left = 0

    def take(self, size: int) -> bool:
        """Whether `size` bytes may be written without a scan; they count from now on."""
        if size > self._left:
            self._left = 0
            return False
        self._left -= size
        return True

    def looked(self, room: int, size: int) -> None:
        """Note that a scan has found `room` bytes, besides the `size` that are about to be written."""
        self._left = min(self._most - size, room // _SHARE)


def _delete(removal: Removal, scanned: list[Contents], lru: bool) -> None:
    """Delete until there is room, or until nothing is left that may be deleted."""
    for contents in sorted(scanned, key=lambda one: one.last_used):
        if removal.excess > 0:
            removal.namespace(contents)
    if lru:
        for info, contents in _least_recently_used(scanned):
            removal.file(contents, info)


def _delete_mirrored(directory: CacheDirectory, removal: Removal, scanned: list[Contents]) -> None:
    """The same, where nothing may be deleted that the bucket lacks."""
    for contents in scanned:
        for info in contents.parts:
            removal.file(contents, info)
    for info, contents in _least_recently_used(scanned):
        # This is asked now: who finds that a bucket has lost a segment deletes its head, under this lock.
        head = os.path.join(directory.path, contents.namespace, info.name + HEAD)
        if removal.excess > 0 and directory.fs.is_file(head):
            removal.file(contents, info)
    for contents in scanned:
        if removal.excess > 0 and contents.heads and not contents.segments:
            with claimed(directory, contents.namespace) as claim:
                for info in contents.heads if claim else []:
                    removal.file(contents, info)


def _least_recently_used(scanned: list[Contents]) -> list[tuple[FileInfo, Contents]]:
    """All segments, the one that was not used for longest first."""
    pairs = [(info, contents) for contents in scanned for info in contents.segments]
    return sorted(pairs, key=lambda pair: (pair[0].mtime, pair[0].name))
