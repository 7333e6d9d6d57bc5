"""`Downloads`: brings whole segments of a bucket into a local folder, as long as they fit.

Nothing is deleted for that. A segment has a temporary name until it is here and begins with the bytes of its
head. What was here before is not brought again: it has made room for new segments.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection

from torchcache2.files.directory import CacheDirectory, Contents
from torchcache2.files.errors import DamagedError
from torchcache2.files.filesystem import Descriptor, write_whole
from torchcache2.files.layout import HEAD, SEGMENT, TEMPORARY, read_head, read_size, stated
from torchcache2.files.removal import in_use, used_bytes
from torchcache2.tiers.bucket.folders import Transfer, absent
from torchcache2.tiers.bucket.objects import Objects

_USED, _UNUSED = 5.0, 0.3  # seconds for which a namespace counts as in use, or as unused
_ABOUT_TO_WRITE = 1.0  # seconds
_AGAIN_AFTER = 60.0  # seconds, after the folder could not be written
_MOST_HEAD = 1 << 30
_UNKNOWN = 1 << 62
_SIZES = 64  # heads that are read at one look


class _NotHadError(Exception):
    """The bucket fails, or does not have the segment any more."""


class Downloads:
    """Downloads of one process. `wanted` is called by one thread, `download` by several.

    The folder may have `budget` bytes.
    """

    def __init__(self, objects: Objects, directory: CacheDirectory, budget: int) -> None:
        self._objects = objects
        self._directory = directory
        self._fs = directory.fs
        self._budget = budget
        self._here: set[Transfer] = set()  # at the last look
        self._been_here: set[Transfer] = set()  # and what is damaged there
        self._asked: dict[str, tuple[float, bool]] = {}  # until when, and whether a namespace is in use
        self._sizes: dict[Transfer, int] = {}
        self._not_before = 0.0
        self._growing: set[str] = set()  # temporary files

    def grown(self) -> dict[str, int]:
        """When the files that are being brought were written to last, by path, in nanoseconds."""
        found = dict[str, int]()
        for path in list(self._growing):
            with contextlib.suppress(OSError):
                found[path] = self._fs.changed(path)
        return found

    def note(self, contents: list[Contents]) -> None:
        """Take note of what is here, so that it is not brought again after it was deleted.

        What is gone has made room for a segment that somebody is about to write: nothing comes in its place.
        """
        here = {Transfer(one.namespace, info.name) for one in contents for info in one.segments}
        if self._here - here:
            self._not_before = max(self._not_before, time.monotonic() + _ABOUT_TO_WRITE)
        self._here = here
        self._been_here |= here

    def wanted(self, contents: list[Contents], running: Collection[Transfer], most: int) -> list[Transfer]:
        """At most so many segments that fit beside those that are being brought, the last asked for first."""
        found: list[Transfer] = []
        if most <= 0 or time.monotonic() < self._not_before:
            return found
        room = self._budget - used_bytes(contents) - sum(map(self._size, running))
        most_known = len(self._sizes) + _SIZES  # else one look would take long if there are many heads
        for one in contents:
            some = [transfer for transfer in absent(one) if transfer not in self._been_here]
            if some and self._is_used(one.namespace):
                for transfer in some:
                    if transfer not in running and (size := self._size(transfer)) <= room:
                        room -= size
                        found.append(transfer)
                    if len(found) == most or len(self._sizes) >= most_known:
                        return found
        return found

    def download(self, transfer: Transfer) -> bool:
        """Bring a segment; False if the bucket fails, or something is wrong with it or with the folder."""
        folder = os.path.join(self._directory.path, transfer.namespace)
        path = os.path.join(folder, transfer.name)

        def fetch(file: Descriptor, temporary: str) -> None:
            self._growing.add(temporary)
            try:
                is_had = self._objects.download("/".join(transfer), temporary)
            finally:
                self._growing.discard(temporary)
            if not is_had:
                raise _NotHadError
            head = self._fs.read_file(path + HEAD, _MOST_HEAD)
            if read_head(self._fs, temporary) != (head, self._size(transfer)):
                raise DamagedError("its header is another one")

        self._been_here.add(transfer)
        try:
            # Nothing waits for the disk: what a power cut leaves is seen to be damaged, and fetched again.
            stem, suffix = os.path.join(folder, ""), SEGMENT + TEMPORARY
            write_whole(self._fs, path, fetch, stem=stem, suffix=suffix, sync=False, sync_name=False)
            if not self._fs.exists(path + HEAD):  # it was dropped meanwhile
                self._fs.remove(path)
        except FileNotFoundError:  # likewise
            return False
        except _NotHadError:
            if self._objects.cause is not None:
                self._been_here.discard(transfer)  # it is there, and is tried again
            return False
        except DamagedError as error:
            self._objects.corrupt += 1
            name, url = "/".join(transfer), self._objects.bucket.url
            self._objects.tell("damaged", "%s in %s is damaged (%s): it stays there", name, url, str(error))
            return False
        except OSError as error:
            self._been_here.discard(transfer)
            self._not_before = time.monotonic() + _AGAIN_AFTER
            path = self._directory.path
            self._objects.tell("unwritten", "%s gets no segments from the bucket: %s", path, str(error))
            return False
        return True

    def _is_used(self, namespace: str) -> bool:
        """Whether a process uses a namespace."""
        until, is_used = self._asked.get(namespace, (0.0, False))
        if time.monotonic() >= until:
            is_used = in_use(self._directory, namespace) is not False
            self._asked[namespace] = time.monotonic() + (_USED if is_used else _UNUSED), is_used
        return is_used

    def _size(self, transfer: Transfer) -> int:
        """Bytes of a segment, as its head says."""
        size = self._sizes.get(transfer)
        if size is None:
            size = _UNKNOWN
            with contextlib.suppress(OSError, DamagedError):
                file = self._fs.open(os.path.join(self._directory.path, *transfer) + HEAD)
                text = self._fs.read_bytes(file, 8, read_size(self._fs.read_bytes(file, 0, 8), _UNKNOWN))
                size = self._sizes[transfer] = stated(text, None)[2]
        return size
