"""`Downloads`: chooses the segments of wanted namespaces that one process brings to a folder.

They are brought as long as they fit, without deleting anything. Segments that were here before are not
brought again: they had to make room for new ones.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence

from torchcache2.files.directory import CORRUPT, CacheDirectory, Contents
from torchcache2.files.layout import HEAD
from torchcache2.files.removal import in_use, used_bytes
from torchcache2.tiers.bucket.folder import BucketFolder

_ABOUT_TO_WRITE = 1.0  # seconds
_UNUSED = 0.3  # seconds until an unused namespace is asked for again
_GROUP = 128 << 20  # bytes of segments that a thread begins together


class Downloads:
    """For one folder of up to `budget` bytes; one thread calls `wanted`, several call `bring`."""

    def __init__(self, folder: BucketFolder, directory: CacheDirectory, budget: int) -> None:
        self._folder, self._directory, self._budget = folder, directory, budget
        self._here: set[str] = set()  # names of segments at the last look
        self._been_here: set[str] = set()  # those that were ever here, or are coming
        self._not_before = 0.0

    def wanted(self, contents: list[Contents]) -> list[str]:
        """Some segments of wanted namespaces that fit into the folder, those last read first."""
        found, size, is_unused = list[str](), 0, False
        room = self._budget - used_bytes(contents)
        if time.monotonic() < self._not_before or room <= 0:
            return found
        for one in [one for one in contents if one.asked]:
            names = [name for name in _absent(one) if name not in self._been_here | self._folder.bad]
            if names and in_use(self._directory, one.namespace) is False:
                is_unused = True
                continue
            for name in names:
                with contextlib.suppress(OSError):
                    needed = self._folder.sizes_of(os.path.join(self._directory.path, name))[1]
                    if size < _GROUP and size + needed <= room:
                        size += needed
                        found.append(name)
        if is_unused and not found:
            # Look again only later: each look locks the namespace briefly, and a process that begins to use
            # it meanwhile cannot mark it as used.
            self._not_before = time.monotonic() + _UNUSED
        self._been_here.update(found)
        return found

    def note(self, contents: list[Contents]) -> None:
        """Record the segments that are here, also while nothing is brought.

        A deleted segment made room for one about to be written: pause, to leave that room free.
        """
        here = {f"{one.namespace}/{info.name}" for one in contents for info in one.segments}
        if self._here - here:
            self._not_before = max(self._not_before, time.monotonic() + _ABOUT_TO_WRITE)
        self._here = here
        self._been_here |= here

    def bring(self, names: Sequence[str]) -> None:
        """Fetch segments into the folder."""
        try:
            self._folder.bring(names)
        finally:
            fs, root = self._directory.fs, self._directory.path
            self._been_here -= {name for name in names if not fs.exists(os.path.join(root, name))}


def _absent(contents: Contents) -> list[str]:
    """The segments that have a head and are neither here nor set aside; newest head first."""
    here = {info.name for info in contents.segments}
    here |= {info.name.removesuffix(CORRUPT) for info in contents.corrupt}
    heads = sorted(contents.heads, key=lambda info: (-info.mtime, info.name))
    names = [info.name.removesuffix(HEAD) for info in heads]
    return [f"{contents.namespace}/{name}" for name in names if name not in here]
