"""`Remote`: where the rows of one namespace are, in the segments that a bucket has.

Those that the local folder has too are among them: when they are deleted there, nothing has to be noticed.
Not thread-safe: the tier holds a lock.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator

import numpy as np

from torchcache2.files.directory import CacheDirectory
from torchcache2.files.errors import DamagedError
from torchcache2.files.filesystem import Descriptors, FileInfo, made_at
from torchcache2.files.layout import HEAD
from torchcache2.files.segment import Segment
from torchcache2.tiers.bucket.listing import Changes
from torchcache2.tiers.disk.catalog import Located

_MOST_HEAD = 1 << 30  # bytes


class Remote(Located):
    """The segments of one namespace in a bucket, known by their heads.

    Those that were made up to `since`, in milliseconds since 1970, are left out.

    Attributes
    ----------
    damaged : set of int
        Rows that are not what was written: numbers of segments, shifted by 32 bits, and of rows in them.
    """

    def __init__(
        self,
        namespace: bytes,
        directory: CacheDirectory,
        numbers: Iterator[int],
        limit: int,
        since: int,
        on_fault: Callable[[Exception, str], None],
    ) -> None:
        super().__init__(namespace, directory, Descriptors(directory.fs), numbers, limit, on_fault)
        self.since = since
        self.damaged: set[int] = set()
        self._lost: set[str] = set()  # objects that were gone, by name; they are among the `names`
        self._heads: dict[str, bytes] = {}  # those that could not be written to the folder, by segment

    @property
    def known(self) -> set[str]:
        """Names of segments whose heads need not be fetched."""
        return self.names | self._heads.keys()

    @property
    def stored(self) -> dict[int, Segment]:
        """The segments that the local folder lacks."""
        some = [(number, one) for number, one in self.segments.items() if isinstance(one, Segment)]
        return {number: one for number, one in some if not self._directory.fs.is_file(one.path)}

    def count(self) -> int:
        """How many rows are in these."""
        numbers, _ = self.places.where(np.arange(len(self.places)))
        return int(np.isin(numbers, list(self.stored)).sum())

    def update(self, changes: Changes) -> None:
        """Note what a listing has shown."""
        self.remove_files(changes.gone)
        self.names -= self._lost | changes.gone  # what the bucket has again is opened again
        self._lost.clear()
        self._heads |= {name: head for name, head in changes.heads.items() if name not in self.names}
        self._changed = -1
        self.look_again()

    def lose(self, numbers: Collection[int]) -> None:
        """Forget segments whose objects are gone, until a listing has them again."""
        some = [one for number in numbers if (one := self.segments.get(number)) is not None]
        self._lost.update(os.path.basename(one.path) for one in some if isinstance(one, Segment))
        self.remove(numbers, numbers)

    def hold(self, *, is_used: bool = True) -> None:
        """The disk tier in front counts as the user of the namespace."""

    def _files(self) -> list[FileInfo]:
        contents = self._directory.contents(self.namespace.hex())
        there = {info.name.removesuffix(HEAD): info for info in contents.heads}
        for name in (*self._heads, *self._numbers):  # the bucket has these, whatever is in the folder
            there.setdefault(name, FileInfo(name, False, 0, 0.0))
        return [
            info._replace(name=name) for name, info in sorted(there.items()) if made_at(name) > self.since
        ]

    def _open(self, path: str) -> Segment:
        fs, name = self._directory.fs, os.path.basename(path)
        head = self._heads.get(name)
        try:
            if head is None:
                head = fs.read_file(path + HEAD, _MOST_HEAD)
            segment = Segment.of_head(fs, self._descriptors, path, head, limit=self._limit)
        except DamagedError as error:
            self._on_fault(error, path + HEAD)
            self._heads.pop(name, None)
            with contextlib.suppress(OSError):
                fs.remove(path + HEAD)
            raise FileNotFoundError(path + HEAD) from None  # so that it is fetched again
        self._heads.pop(name, None)
        return segment
