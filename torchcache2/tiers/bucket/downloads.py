"""`Downloads`: brings whole segments of a bucket into a local folder, as long as they fit.

Nothing is deleted for that. What was here before is not brought again: it has made room for new segments.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection

from torchcache2.files.directory import PART, CacheDirectory, Contents
from torchcache2.files.errors import DamagedError
from torchcache2.files.removal import in_use, used_bytes
from torchcache2.tiers.bucket.folders import Transfer, absent
from torchcache2.tiers.bucket.objects import Objects
from torchcache2.tiers.bucket.sparse import BucketFolder

_USED, _UNUSED = 5.0, 0.3  # seconds for which a namespace counts as in use, or as unused
_ABOUT_TO_WRITE = 1.0  # seconds
_UNKNOWN = 1 << 62
_SIZES = 64  # heads that are read at one look


class Downloads:
    """Downloads of one process. `wanted` is called by one thread, `download` by several.

    The folder may have `budget` bytes.
    """

    def __init__(self, objects: Objects, directory: CacheDirectory, budget: int) -> None:
        self._objects = objects
        self._directory = directory
        self._folder = BucketFolder(objects, directory, budget)
        self._budget = budget
        self._here: set[Transfer] = set()  # at the last look
        self._been_here: set[Transfer] = set()  # and what is damaged there
        self._asked: dict[str, tuple[float, bool]] = {}  # until when, and whether a namespace is in use
        self._not_before = 0.0

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
        room, opened = self._budget - used_bytes(contents), 0
        for one in contents:
            begun = {info.name.removesuffix(PART) for info in one.parts}
            some = [transfer for transfer in absent(one) if transfer not in self._been_here]
            if some and self._is_used(one.namespace):
                for transfer in sorted(some, key=lambda transfer: transfer.name not in begun):
                    opened += 1
                    size = 0 if transfer.name in begun else self._size(transfer)
                    if transfer not in running and size <= room:
                        room -= size
                        found.append(transfer)
                    if len(found) == most or opened == _SIZES:
                        return found
        return found

    def download(self, transfer: Transfer) -> None:
        """Bring what is missing of a segment."""
        self._been_here.add(transfer)
        try:
            if self._folder.fill(os.path.join(self._directory.path, *transfer)) is None:
                self._been_here.discard(transfer)
        except (OSError, DamagedError):  # it was dropped meanwhile
            pass

    def _is_used(self, namespace: str) -> bool:
        """Whether a process uses a namespace."""
        until, is_used = self._asked.get(namespace, (0.0, False))
        if time.monotonic() >= until:
            is_used = in_use(self._directory, namespace) is not False
            self._asked[namespace] = time.monotonic() + (_USED if is_used else _UNUSED), is_used
        return is_used

    def _size(self, transfer: Transfer) -> int:
        """Bytes of a segment, as its head says."""
        try:
            return self._folder.size_of(os.path.join(self._directory.path, *transfer))
        except (OSError, DamagedError):
            return _UNKNOWN
